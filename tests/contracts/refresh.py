"""Look up every fact in the package index and store it: `python -m tests.contracts.refresh`."""

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
    """Return the facts of a library from the package index."""
    entries = [entry for entry in ENTRIES if entry.library == library]
    sources = read_wheel(url_of(*package_of(library)), {entry.member for entry in entries})
    return {entry.question: entry.look_up(sources[entry.member]) for entry in entries}


def read_fields(section: str) -> list[str]:
    """Return the field names of the class that receives this section of the configuration."""
    target = TARGETS[section]
    members = [f"{target.package}/{file}" for file in target.files]
    sources = read_wheel(url_of(*package_of(target.package)), set(members))
    return sorted(field_types(target, tuple(sources[member] for member in members)) or ())


def read_extension() -> tuple[list[str], list[str]]:
    """Return the environment variables of the extension's installer, and the extension's requirements."""
    sources = read_archive(url_of(EXTENSION, PINS["transformer_engine"]))
    words = {name for text in sources.values() for name in re.findall(r"NVTE_\w+", text)}
    return sorted(words), sources[f"{EXTENSION}.egg-info/requires.txt"].split()


def asked(extension_requires: list[str]) -> list[str]:
    """Return the requirements of mrl and of the extension, all of which requirements-cuda.txt must satisfy."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["cuda"], *extension_requires]


def resolve(requirements: list[str]) -> dict[str, str]:
    """Return the versions that pip would install for requirements-cuda.txt plus these, on Python 3.12."""
    python = next(filter(_is_python312, _pythons()), None)
    if python is None:
        raise IndexSilent("no Python 3.12 was found, which the requirements' version markers need: set PYTHON312=PATH")
    url_of("torch", PINS["torch"])  # an index that does not answer must not look like unsolvable requirements
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory() as newer_pip:
        # Older versions of pip, such as the one bundled with Python 3.12, take several times as long.
        upgrade = subprocess.run(
            [*pip, f"--target={newer_pip}", "pip>=26"], capture_output=True, text=True, timeout=300
        )
        if upgrade.returncode:
            raise IndexSilent(upgrade.stderr)
        pip += ["--dry-run", "--ignore-installed", "--report=-", f"--requirement={ROOT / 'requirements-cuda.txt'}"]
        environment = os.environ | {"PYTHONPATH": newer_pip}
        report = subprocess.run([*pip, *requirements], capture_output=True, text=True, timeout=600, env=environment)
    assert report.returncode == 0, report.stderr
    resolved = [package["metadata"] for package in json.loads(report.stdout)["install"]]
    return {plain(package["name"]): package["version"] for package in resolved}


def plain(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def _pythons() -> list[str]:
    pyenv = Path.home().glob(".pyenv/versions/3.12*/bin/python3.12")
    return [os.environ.get("PYTHON312", "python3.12"), sys.executable, *map(str, pyenv)]


def _is_python312(python: str) -> bool:
    try:
        answer = subprocess.run([python, "--version"], capture_output=True, text=True)
    except OSError:
        return False
    return answer.stdout.startswith("Python 3.12.")


def main() -> None:
    libraries = sorted({entry.library for entry in ENTRIES})
    words, requires = read_extension()
    requirements = asked(requires)
    versions = {library: package_of(library)[1] for library in libraries}
    facts = {library: look_up(library) for library in libraries}
    fields = {section: read_fields(section) for section in TARGETS}
    Stored(versions, facts, fields, words, requires, requirements, resolve(requirements)).write()


if __name__ == "__main__":
    main()
