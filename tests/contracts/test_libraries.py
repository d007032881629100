"""What requirements-cuda.txt names, as the package index has it: nothing of it is installed or imported."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.contracts.index import read_archive, read_wheel, url_of
from tests.contracts.test_table import ENTRIES

pytestmark = [pytest.mark.slow, pytest.mark.on_demand]
ROOT = Path(__file__).parents[2]
PINS = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "requirements-cuda.txt").read_text(), re.MULTILINE))
PACKAGES = {"megatron": "megatron-core"} | {name: name for name in ("torch", "transformer_engine", "vllm")}
EXTENSION = "transformer_engine_torch"


@pytest.fixture(scope="module")
def extension() -> dict[str, str]:
    return read_archive(url_of(EXTENSION, PINS["transformer_engine"]))


@pytest.mark.parametrize("library", sorted({entry.library for entry in ENTRIES}))
def test_a_library_is_what_mrl_relies_on(library: str) -> None:
    entries = [entry for entry in ENTRIES if entry.library == library]
    name, _, version = library.partition("@")
    package = PACKAGES[name]
    sources = read_wheel(url_of(package, version or PINS[package]), {entry.member for entry in entries})
    complaints = [f"mrl/{entry.branch}: {why}" for entry in entries if (why := entry.complaint(sources[entry.member]))]
    assert not complaints, "\n".join(complaints)


def test_the_installer_speaks_to_the_extension_in_its_own_words(extension: dict[str, str]) -> None:
    said = set(re.findall(r"NVTE_\w+", (ROOT / "launch/install.py").read_text()))
    known = {name for text in extension.values() for name in re.findall(r"NVTE_\w+", text)}
    assert said
    assert said <= known


def test_the_requirements_are_all_that_pip_would_install(extension: dict[str, str], tmp_path: Path) -> None:
    """What `pyproject.toml` and the extension of Transformer Engine ask for is among them, too."""
    python = next(filter(_is_python312, _pythons()), None)
    if python is None:
        pytest.skip("conditions on versions are those of Python 3.12, and there is none: PYTHON312=PATH")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = extension[f"{EXTENSION}.egg-info/requires.txt"].split()
    asked = [*project["dependencies"], *project["optional-dependencies"]["cuda"], *listed]
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # Older ones, such as Python 3.12 comes with, take several times as long.
    subprocess.run([*pip, f"--target={tmp_path}", "pip>=26"], check=True, timeout=300)
    pip += ["--dry-run", "--ignore-installed", "--report=-", f"--requirement={ROOT / 'requirements-cuda.txt'}", *asked]
    newer = os.environ | {"PYTHONPATH": str(tmp_path)}
    found = subprocess.run(pip, capture_output=True, text=True, timeout=600, env=newer)
    assert found.returncode == 0, found.stderr
    resolved = [each["metadata"] for each in json.loads(found.stdout)["install"]]
    assert {_plain(each["name"]): each["version"] for each in resolved} == {_plain(name): PINS[name] for name in PINS}


def _pythons() -> list[str]:
    pyenv = Path.home().glob(".pyenv/versions/3.12*/bin/python3.12")
    return [os.environ.get("PYTHON312", "python3.12"), sys.executable, *map(str, pyenv)]


def _is_python312(python: str) -> bool:
    try:
        said = subprocess.run([python, "--version"], capture_output=True, text=True)
    except OSError:
        return False
    return said.stdout.startswith("Python 3.12.")


def _plain(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")
