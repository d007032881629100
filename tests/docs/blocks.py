"""The code blocks of the pages: the meaning of the word after the language, and a directory in which they run.

python test, bash test       run, in the order of the page, in one directory
LANGUAGE name.ext            a file of that directory, for the blocks that follow
bash minutes, bash cluster   not run: it installs, trains, or needs machines that tests do not have; its mrl
                             commands are parsed, and presets are loaded with their overrides
text                         shown only
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
NOT_RUN = ("bash minutes", "bash cluster", "text")
RUN = ("bash test", "python test")
_FENCE = re.compile(r"^```(.*)\n((?:.*\n)*?)```$", re.MULTILINE)
_FILE = re.compile(r"(python|yaml) \w+\.(py|yaml)")
_SHELL = ("|", "&&", "||", ";", "&", ">")
_TIMEOUT_S = 120
_MRL = "import sys; sys.path.append({root!r}); from mrl.cli.main import main; sys.exit(main())"


@dataclass(frozen=True)
class Block:
    """A code block of a page."""

    page: Path
    line: int
    kind: str
    code: str

    @property
    def is_file(self) -> bool:
        """Whether the block is a file for later blocks."""
        return _FILE.fullmatch(self.kind) is not None

    @property
    def has_known_kind(self) -> bool:
        """Whether its kind is known."""
        return self.is_file or self.kind in RUN or self.kind in NOT_RUN

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def mrl_commands(block: Block) -> Iterator[list[str]]:
    """Yield the words of each line that begins with `mrl`, up to the first shell operator."""
    for line in block.code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["mrl"]:
            yield list(takewhile(lambda word: word not in _SHELL, words[1:]))


def pages() -> list[Path]:
    """Return all pages, including README and CONTRIBUTING."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]


def blocks_of(page: Path) -> Iterator[Block]:
    """Yield the code blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        yield Block(page, text.count("\n", 0, found.start()) + 1, found[1], found[2])


def run_page(page: Path, directory: Path) -> None:
    """Run the blocks of a page that a test can run, in `directory`."""
    environment = _furnish(directory)
    for block in blocks_of(page):
        if block.is_file:
            (directory / block.kind.split()[1]).write_text(block.code, encoding="utf-8")
        elif block.kind in RUN:
            run_block(block, directory, environment)


def _furnish(directory: Path) -> dict[str, str]:
    """Provide presets, and `mrl` as an installed command that does not search the current directory for modules."""
    for name in ("configs", "launch"):
        (directory / name).symlink_to(ROOT / name)
    command = directory / "bin" / "mrl"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -P -c "{_MRL.format(root=str(ROOT))}" "$@"\n')
    command.chmod(0o755)
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SLURM", "PYTHON"))}
    search = os.pathsep.join([str(command.parent), str(Path(sys.executable).parent), os.environ["PATH"]])
    return plain | {"PATH": search, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run_block(block: Block, directory: Path, environment: dict[str, str]) -> None:
    """Run one block, and fail if it fails."""
    if block.kind.startswith("bash"):
        command = ["bash", "-euo", "pipefail", "-c", block.code]
    else:
        script = directory / f"line_{block.line}.py"
        script.write_text(block.code, encoding="utf-8")
        command = [sys.executable, script.name]
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=_TIMEOUT_S, cwd=directory, env=environment, check=False
    )
    assert ran.returncode == 0, f"{block}\n{block.code}\n{ran.stdout}\n{ran.stderr}"
