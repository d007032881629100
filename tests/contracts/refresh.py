"""Look everything up in the package index, and store it: `python -m tests.contracts.refresh`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from mrl.config.libraries.installed import field_types
from tests.config.test_fields import TARGETS
from tests.contracts.entry import Fact
from tests.contracts.index import IndexSilent, read_archive, read_wheel, url_of
from tests.contracts.stored import ENTRIES, EXTENSION, PINS, ROOT, Stored, package_of


def look_up(library: str) -> dict[str, Fact]:
    """Return the facts of a library as the index has it."""
    entries = [entry for entry in ENTRIES if entry.library == library]
    sources = read_wheel(url_of(*package_of(library)), {entry.member for entry in entries})
    return {entry.question: entry.look_up(sources[entry.member]) for entry in entries}


def read_fields(section: str) -> list[str]:
    """Return the names of the fields of the class that this section of the configuration is handed to."""
    target = TARGETS[section]
    members = [f"{target.package}/{file}" for file in target.files]
    sources = read_wheel(url_of(*package_of(target.package)), set(members))
    return sorted(field_types(target, tuple(sources[member] for member in members)) or ())


def read_extension() -> tuple[list[str], list[str]]:
    """Return the environment variables that the extension's installer knows, and what the extension requires."""
    sources = read_archive(url_of(EXTENSION, PINS["transformer_engine"]))
    words = {name for text in sources.values() for name in re.findall(r"NVTE_\w+", text)}
    return sorted(words), sources[f"{EXTENSION}.egg-info/requires.txt"].split()


def asked(extension_requires: list[str]) -> list[str]:
    """Return what has to be among the requirements: what mrl and the extension ask for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["cuda"], *extension_requires]


def resolve(wanted: list[str]) -> dict[str, str]:
    """Return what pip would install of the requirements and these, for Python 3.12."""
    python = next(filter(_is_python312, _pythons()), None)
    if python is None:
        raise IndexSilent("conditions on versions are those of Python 3.12, and there is none: PYTHON312=PATH")
    url_of("torch", PINS["torch"])  # an index that does not answer is not one that has no solution
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory() as newer_pip:
        # Older ones, such as Python 3.12 comes with, take several times as long.
        made = subprocess.run([*pip, f"--target={newer_pip}", "pip>=26"], capture_output=True, text=True, timeout=300)
        if made.returncode:
            raise IndexSilent(made.stderr)
        pip += ["--dry-run", "--ignore-installed", "--report=-", f"--requirement={ROOT / 'requirements-cuda.txt'}"]
        environment = os.environ | {"PYTHONPATH": newer_pip}
        found = subprocess.run([*pip, *wanted], capture_output=True, text=True, timeout=600, env=environment)
    assert found.returncode == 0, found.stderr
    resolved = [each["metadata"] for each in json.loads(found.stdout)["install"]]
    return {plain(each["name"]): each["version"] for each in resolved}


def plain(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def _pythons() -> list[str]:
    pyenv = Path.home().glob(".pyenv/versions/3.12*/bin/python3.12")
    return [os.environ.get("PYTHON312", "python3.12"), sys.executable, *map(str, pyenv)]


def _is_python312(python: str) -> bool:
    try:
        said = subprocess.run([python, "--version"], capture_output=True, text=True)
    except OSError:
        return False
    return said.stdout.startswith("Python 3.12.")


def main() -> None:
    libraries = sorted({entry.library for entry in ENTRIES})
    words, requires = read_extension()
    wanted = asked(requires)
    versions = {library: package_of(library)[1] for library in libraries}
    facts = {library: look_up(library) for library in libraries}
    fields = {section: read_fields(section) for section in TARGETS}
    Stored(versions, facts, fields, words, requires, wanted, resolve(wanted)).write()


if __name__ == "__main__":
    main()
