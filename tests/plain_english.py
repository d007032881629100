"""Unusual turns of phrase, each with plain words. `make lint` rejects them in the COVERED trees.

`python -m tests.plain_english [TREE ...]` prints every hit. Code in backticks and generated parts are skipped."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COVERED = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs", "configs", "launch", "mrl", "tests", ".github")
_QUOTING = "plain_english test_architecture published published_files shelf test_formats test_template test_gpu"
EXAMPLES = {f"{name}.py" for name in _QUOTING.split()}  # bad examples, prompts, texts of others, names of rows
TURNS = {
    r"(one|those|that) (that|which)|those who|(say|know|ask|want)s? nothing|(held|holds?) against": "name it; compare",
    r"(?<!#\s)(?-i:What|Whoever|Whatever)\b(?![^.]*\?| is \Z)|who(so)?ever|whatever|whichever": "begin with a verb",
    r"(go|goes|going|gone|went) on(?! (a|an|the|its|one|to|each|every|devices|GPUs)\b)": "continue",
    r"nor|be they|be it|and so (is|are|was|were|do|does|did|would|will|has|have)": "or, and not, also",
    r"lack(s|ed|ing)?|there (is|are|was|were) none|(is|are|was|were) not there": "is missing, has no, does not exist",
    r"(tells?|told|said)(?! (apart|whether))": "shows, reports, means",
    r"beside|of (its|their|his) own|others than|otherwise than": "next to, besides; a separate X; different from",
    r"as (it|they) (is|are|was|were)(?=\s*([.,;:)]|\Z))|(?<!for\s)stands?(?!-| (for|alone)\b)|stood": "unchanged; is",
    r"(is|are|was|were) of(?! (the same|type|use|no use|course|shape|length|size)\b)": "comes from, was measured on",
    r"all that (is|are)|what (of|is left|is there)|(there|where)(of|upon|after|with)": "the rest, which parts; of it",
    r"(all|none|nothing|every\w*|no \w+) but|(is|are|was|were) to be|at the (most|least)": "except; must be; at most",
    r"anew|for ever|kin|mend(s|ed|ing)?|lets? go|somebody|nobody|everybody": "again, forever, fix, drop, no process",
}
_TURN = [(re.compile(rf"\b(?:{turn})\b".replace(" ", r"\s+"), re.I), plain) for turn, plain in TURNS.items()]
_UNREAD = re.compile(r"<!-- made: .*?<!-- end -->|``[^`\n].*?``|`[^`\n]+`", re.DOTALL)


def texts(text: str, suffix: str) -> Iterator[tuple[int, str]]:
    """Yield prose with its first line: strings and comments of Python, or all of a page but uncommented code."""
    if suffix == ".py":
        strings = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
        yield from ((node.lineno, node.value) for node in strings if isinstance(node.value, str) and " " in node.value)
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        yield from ((token.start[0], token.string.strip("# ")) for token in tokens if token.type == tokenize.COMMENT)
    else:
        yield 1, re.sub(r"(?ms)^```.*?^```$", lambda it: re.sub(r"(?m)^((?!.* # ).*|.*? # )", "", it[0]), text)


def hits(tree: str) -> Iterator[str]:
    """Yield each turn in the files of a tree: its place, its words, and what to write."""
    files = sorted((ROOT / tree, *(ROOT / tree).rglob("*.*")))
    for file in (file for file in files if file.suffix in (".md", ".py", ".yaml") and file.name not in EXAMPLES):
        for first, text in texts(file.read_text(encoding="utf-8"), file.suffix):
            read = _UNREAD.sub(lambda gone: "`" + re.sub(r"[^\n]", "", gone[0]) + "`", text)
            for turn, plain in ((turn, plain) for pattern, plain in _TURN for turn in pattern.finditer(read)):
                line = first + read.count("\n", 0, turn.start())
                yield f'{str(file).removeprefix(f"{ROOT}/")}:{line}: "{" ".join(turn[0].split())}": {plain}'


if __name__ == "__main__":
    sys.stdout.writelines(f"{hit}\n" for tree in sys.argv[1:] or COVERED for hit in hits(tree))
