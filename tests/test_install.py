"""`make install-cuda` checks the machine before it downloads anything, and reports what is missing and the fix."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def installer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Module of the installer, with a fake driver 580.95.05 and no minimum of disk space."""
    monkeypatch.setattr(sys, "argv", ["install.py", ".venv-cuda"])
    spec = importlib.util.spec_from_file_location("install", ROOT / "launch" / "install.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    fake_driver(tmp_path, "580.95.05")
    monkeypatch.setattr(module, "CUDA_ROOM_GB", 0)
    monkeypatch.setattr(module.sys, "version_info", (3, 12, 1))
    monkeypatch.setattr(module.platform, "machine", lambda: "x86_64")
    header = tmp_path / "Python.h"
    header.touch()
    monkeypatch.setattr(module.sysconfig, "get_path", lambda name: str(tmp_path))
    return module


def fake_driver(directory: Path, version: str) -> None:
    program = directory / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho {version}\n")
    program.chmod(0o755)


def test_a_machine_that_has_everything_lacks_nothing(installer: Any) -> None:
    assert list(installer.missing_for_cuda(False)) == []


def test_each_thing_that_lacks_is_named_with_what_helps(
    installer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_driver(tmp_path, "575.57.08")
    (tmp_path / "Python.h").unlink()
    monkeypatch.setattr(installer.sys, "version_info", (3, 11, 7))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(installer, "CUDA_ROOM_GB", 10**9)
    missing = list(installer.missing_for_cuda(False))
    assert [item.partition(",")[0].partition(":")[0] for item in missing] == [
        "Python 3.12 on x86_64",
        "an NVIDIA driver 580 or later",
        "a C++20 compiler",
        "Python's headers",
        "disk space",
    ]
    assert "'575.57.08'" in missing[1]
    assert all(". fix: " in item for item in missing)
    assert list(installer.missing_for_cuda(True)) == [missing[0], *missing[2:]]


def test_nothing_is_made_where_something_lacks(tmp_path: Path) -> None:
    (tmp_path / "launch").mkdir()
    for name in ("launch/install.py", "requirements-cuda.txt", "requirements-dev.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    ran = subprocess.run(
        [sys.executable, "-I", tmp_path / "launch" / "install.py", ".venv-cuda"],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "CXX": "no-such-compiler"},
    )
    assert ran.returncode == 2
    assert "nothing has been downloaded; missing on this machine:\n" in ran.stderr
    assert "tried as no-such-compiler" in ran.stderr
    assert not (tmp_path / ".venv-cuda").exists()
