"""The code of the pages runs, generated parts are up to date, and names on the pages exist."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mrl import errors
from mrl.cli.main import VERBS, main
from mrl.config.algorithm import ADVANTAGES, POLICY_LOSSES
from mrl.config.keys import schema_keys
from mrl.config.proofs import STORED
from mrl.config.resolved.load import VERBS as TRAINED_BY
from mrl.config.resolved.load import load_config_of
from mrl.config.sft import SftConfig
from mrl.config.values import dotted
from mrl.config.verl_keys import NAMES
from mrl.models.families import FAMILIES
from tests.docs.blocks import DOCS, NOT_RUN, ROOT, Block, blocks_of, mrl_commands, pages, run_page
from tests.docs.generate import MAKERS, first_line, names_in, renewed
from tests.docs.pictures import IMAGES, PICTURES
from tests.docs.proofs import algorithm_proofs

ELSEWHERE = {"scale.md": "tests/launch/test_scale_page.py"}
"""Pages whose code is run by another test."""
SLOW = {"extend.md"}
MADE = "=runs/"  # created by an earlier command
OVERRIDE = re.compile(r"[a-z][\w.]*=")
BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
CODE = re.compile(r"`([^`]+)`")
PATH = re.compile(r"(?<![\w/.])(?:mrl|tests|benchmarks|configs|launch|docs)/[\w./-]*\w\.\w+")


def named(page: Path) -> str:
    return page.name


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] if page.name in SLOW else [], id=page.name)
        for page in pages()
        if page.name not in ELSEWHERE
    ],
)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    run_page(page, tmp_path)


@pytest.mark.parametrize("page", pages(), ids=named)
def test_every_block_says_whether_it_is_run(page: Path) -> None:
    assert [str(block) for block in blocks_of(page) if not block.has_known_kind] == []


@pytest.mark.parametrize("page", pages(), ids=named)
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    for file, name in re.findall(r"[`[](tests/[\w/]+\.py)(?:::|\]\(\S+\) `)(\w+)`", page.read_text()):
        assert f"\ndef {name}(" in (ROOT / file).read_text(), f"{file} has no {name}"
    named_alone = re.findall(r"`(test_\w{3,})`", page.read_text())
    assert [name for name in named_alone if name not in names_of_tests()] == []


@cache
def names_of_tests() -> set[str]:
    """Return the names of test files and of their functions."""
    files = [*(ROOT / "tests").rglob("test_*.py")]
    functions = [name for file in files for name in re.findall(r"^def (test_\w+)\(", file.read_text(), re.MULTILINE)]
    return {*functions, *(file.stem for file in files)}


def try_commands(block: Block, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Parse the mrl commands of a block, load the presets in it, and return the verbs."""
    monkeypatch.chdir(ROOT)
    verbs = []
    for verb, *words in mrl_commands(block):
        with monkeypatch.context() as patched:
            patched.setattr(f"{VERBS[verb][0]}.run", lambda arguments: 0)
            assert main([verb, *words]) == 0, f"{block}: mrl {verb} {' '.join(words)}"
        for name in words:
            if name.startswith("configs/"):
                overrides = [word for word in words if OVERRIDE.match(word) and MADE not in word]
                load_config_of(verb if verb in TRAINED_BY.values() else "train", name, overrides)
        verbs.append(verb)
    return verbs


@pytest.mark.parametrize("page", pages(), ids=named)
def test_a_command_that_is_not_run_could_be(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for block in blocks_of(page):
        if block.kind in NOT_RUN:
            try_commands(block, monkeypatch)


def test_a_recipe_goes_from_its_data_to_its_report(monkeypatch: pytest.MonkeyPatch) -> None:
    page = DOCS / "recipes.md"
    text = page.read_text(encoding="utf-8")
    asked = [try_commands(block, monkeypatch) for block in blocks_of(page) if block.kind == "bash cluster"]
    recipes = [verbs for verbs in asked if "report" in verbs]
    assert len(recipes) == len(re.findall(r"^## .* GPUs?$", text, re.MULTILINE)) == text.count("| ours | not run | |")
    for verbs in recipes:
        assert verbs[0] == "data"
        assert verbs[-3] in ("train", "launch")
        assert verbs[-2:] == ["report", "export"]


@pytest.mark.parametrize("page", [page for page in pages() if names_in(page.read_text())], ids=named)
def test_generated_parts_are_up_to_date(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert renewed(text) == text, "run python -m tests.docs.generate"


def test_every_generator_is_used_and_stale_text_is_detected() -> None:
    found = [name for page in pages() for name in names_in(page.read_text(encoding="utf-8"))]
    assert sorted(found) == sorted(MAKERS)
    assert renewed("a\n<!-- made: names -->\nold\n<!-- end -->\nb\n").startswith(
        "a\n<!-- made: names -->\n| key | names"
    )


def test_families_of_tests_are_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = MAKERS["models"]()
    monkeypatch.setitem(FAMILIES, "of_tests", replace(FAMILIES["llama"], model_type="of_tests"))
    assert MAKERS["models"]() == listed


def test_proofs_of_algorithms_are_up_to_date() -> None:
    assert STORED.read_text(encoding="utf-8") == algorithm_proofs()


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_match_the_recorded_run(name: str) -> None:
    drawn = PICTURES[name]()
    assert (IMAGES / name).read_text(encoding="utf-8") == drawn, "run python -m tests.docs.generate"
    assert len(drawn.encode()) < 60_000
    ElementTree.fromstring(drawn)


def test_every_file_of_mrl_has_a_docstring() -> None:
    assert [str(file.relative_to(ROOT)) for file in (ROOT / "mrl").rglob("*.py") if not first_line(file)] == []


@pytest.mark.parametrize("page", pages(), ids=named)
def test_links_and_paths_exist(page: Path) -> None:
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    links = [link for link in LINK.findall(text) if not (page.parent / link).exists()]
    paths = [path for code in CODE.findall(text) for path in PATH.findall(code) if not (ROOT / path).exists()]
    assert links + paths == []


@pytest.mark.parametrize("page", pages(), ids=named)
def test_anchors_lead_to_headings(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", BLOCK.sub("", page.read_text(encoding="utf-8")))
    assert [
        f"{link}#{anchor}" for link, anchor in links if anchor not in anchors(page.parent / link if link else page)
    ] == []


def anchors(page: Path) -> list[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", BLOCK.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("page", pages(), ids=named)
def test_every_table_row_belongs_to_a_table(page: Path) -> None:
    lines = ["", *BLOCK.sub("", page.read_text(encoding="utf-8")).splitlines(), ""]
    heads = [
        (line, below)
        for above, line, below in zip(lines, lines[1:], lines[2:], strict=False)
        if line[:1] == "|" != above[:1]
    ]
    assert [line for line, below in heads if not re.match(r"\| *:?-{3}", below)] == []


def test_the_index_links_every_page() -> None:
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    others = sorted({page.name for page in DOCS.glob("*.md")} - {"README.md"})
    assert [name for name in others if f"]({name})" not in index] == []


def test_the_readme_begins_with_a_command_and_has_every_verb() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert next(blocks_of(ROOT / "README.md")).line < 25
    assert [verb for verb in VERBS if f"`mrl {verb}" not in readme] == []
    assert readme.count("\n") <= 150


# --- troubleshoot.md --------------------------------------------------------------------------------------------

TROUBLES = (DOCS / "troubleshoot.md").read_text(encoding="utf-8")
ERRORS = {
    name: kind for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, errors.MrlError)
}


def test_every_error_has_its_section_and_its_exit_code() -> None:
    sections = dict(re.findall(r"^### `(\w+)` \(exit code (\d)\)$", TROUBLES, re.MULTILINE))
    assert sections == {name: str(kind.exit_code) for name, kind in ERRORS.items()}


def test_every_explained_message_exists() -> None:
    messages = re.findall(r"^\| `([^`]+)` \|", TROUBLES, re.MULTILINE)
    assert len(messages) > 40
    parts = [(message, part.strip()) for message in messages for part in message.split("...")]
    assert [message for message, part in parts if part not in all_text()] == []


@cache
def all_text() -> str:
    """Return every string of mrl, one per line."""
    strings = []
    for file in (ROOT / "mrl").rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        strings += [
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
    return "\n".join(strings)


# --- coming-from-verl.md ----------------------------------------------------------------------------------------

VERL = (DOCS / "coming-from-verl.md").read_text(encoding="utf-8")


def cells_below(heading: str) -> list[str]:
    """Return the code spans in the second column of the tables below a heading."""
    section = VERL.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| `")]
    return [code for row in rows for code in CODE.findall(row[2])]


def test_every_mrl_key_for_a_verl_key_exists() -> None:
    known = {dotted(key.path) for key in (*schema_keys(), *schema_keys(SftConfig))}
    keys = [cell.partition(":")[0].partition("=")[0] for cell in cells_below("Configuration keys")]
    assert len(keys) > 60
    free = re.compile(r"(actor|critic)\.(megatron|ddp|optimizer)\.\w+|rollout\.vllm\.\w+|agent\.\S+\.options\.\w+")
    assert [key for key in keys if key not in known and not free.fullmatch(key)] == []


def test_errors_and_page_map_verl_keys_alike() -> None:
    section = VERL.partition("\n## Configuration keys\n")[2].partition("\n## ")[0]
    said: dict[str, set[str]] = {}
    for row in (line.split("|") for line in section.splitlines() if line.startswith("| `")):
        for code in CODE.findall(row[1]):
            said.setdefault(code.rpartition(".")[2], set()).update(CODE.findall(row[2]))
    wrong = {
        key: name
        for key, (name, _) in NAMES.items()
        if not set(name.replace("ROLE", "actor").split(", ")) <= said.get(key.rpartition(".")[2], set())
    }
    assert wrong == {}


def test_new_names_of_verl_that_mrl_lacks_are_not_known_here() -> None:
    section = VERL.partition("\n### Names since 2026\n")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| `")]
    lacking = {name for row in rows if row[2].strip() == "no" for name in CODE.findall(row[1])}
    assert len(rows) > 10
    assert lacking & {*ADVANTAGES, *POLICY_LOSSES} == set()


def test_every_mrl_name_for_a_verl_name_exists() -> None:
    names = [cell for cell in cells_below("Names") if ":" in cell]
    assert len(names) > 25
    assert [name for name in names if not is_there(name)] == []


def is_there(name: str) -> bool:
    """Whether `package.module:attribute.attribute` exists in the sources; importing all of them would be slow."""
    module, _, attributes = name.partition(":")
    file = ROOT / f"{module.replace('.', '/')}.py"
    file = file if file.exists() else file.with_suffix("") / "__init__.py"
    body: list[ast.stmt] = ast.parse(file.read_text(encoding="utf-8")).body
    for part in attributes.split("."):
        found = [statement for statement in body if part in _names_of(statement)]
        if not found:
            return False
        body = getattr(found[0], "body", [])
    return True


def _names_of(statement: ast.stmt) -> set[str]:
    match statement:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return {name}
        case ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
        case ast.Assign(targets=[ast.Name(id=name)]):
            return {name}
        case ast.ImportFrom(names=aliases):
            return {alias.name for alias in aliases}
        case ast.If(test=ast.Name(id="TYPE_CHECKING"), body=loaded_later):
            return set().union(*map(_names_of, loaded_later))
    return set()
