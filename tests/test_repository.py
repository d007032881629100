"""Workflow, version, license and issue templates agree with the code."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

import mrl

ROOT = Path(__file__).resolve().parent.parent


def test_the_workflow_runs_what_ci_runs() -> None:
    lines = re.findall(r"^check(?:_together)? (.*)$", (ROOT / ".ci/run").read_text(), flags=re.MULTILINE)
    words = " ".join(lines).replace('"', "").split()
    assert words[0] == "install"
    targets = [word for word in words if "=" not in word and not word.startswith("install")]
    job = yaml.safe_load((ROOT / ".github/workflows/ci.yaml").read_text())["jobs"]["make"]
    assert sorted(job["strategy"]["matrix"]["target"]) == sorted(targets)
    assert "make ${{ matrix.target }} </dev/null" in [step.get("run") for step in job["steps"]]


def test_version_and_licence_are_said_alike() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["license"], citation["version"]) == (project["license"], mrl.__version__)
    assert citation["title"] in (ROOT / "README.md").read_text()
    assert f"Version {mrl.__version__}" in (ROOT / "README.md").read_text()
    assert mrl.__version__ in (ROOT / "CHANGELOG.md").read_text()
