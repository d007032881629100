"""A library that is installed but broken is reported. A missing library is not a fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.libraries import failure, transformer_engine_extension, transformer_engine_fault

WITHOUT_NCCL = (
    "import sys\nif 'torch' not in sys.modules: raise OSError('libnccl.so.2: cannot open shared object file')"
)
BROKEN = "raise ImportError('libtransformer_engine.so: undefined symbol: _ZN3c10')"


EXTENSION = "transformer_engine_torch.cpython-312-x86_64-linux-gnu.so"


def fake_package(site: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a package named like Transformer Engine importable, without the extension."""
    package = site / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.syspath_prepend(str(site))
    return package


@pytest.mark.parametrize(
    ("code", "why"),
    [("import json", ""), ("import os; os.abort()", "exit status -6"), ("raise SystemExit('no device')", "no device")],
)
def test_a_piece_of_python_says_why_it_does_not_run(code: str, why: str) -> None:
    assert failure(code) == why


@pytest.mark.parametrize(
    ("content", "error"),
    [("", ""), (WITHOUT_NCCL, ""), (BROKEN, "ImportError: libtransformer_engine.so: undefined symbol: _ZN3c10")],
)
def test_an_extension_of_another_torch_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, error: str
) -> None:
    package = fake_package(tmp_path, monkeypatch)
    (package / "pytorch.py").write_text(content)
    (package / "wheel_lib").mkdir()
    (package / "wheel_lib" / EXTENSION).touch()
    expected = f"Transformer Engine is installed, but cannot be loaded: {error}" if error else ""
    assert transformer_engine_fault() == expected


@pytest.mark.parametrize("place", ["", "transformer_engine", "transformer_engine/wheel_lib"])
def test_the_extension_is_found_where_transformer_engine_itself_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """An import cannot find it before Transformer Engine loads it, because pip installs it below the package."""
    fake_package(tmp_path, monkeypatch)
    (tmp_path / place).mkdir(exist_ok=True)
    (tmp_path / place / EXTENSION).touch()
    assert transformer_engine_extension() == tmp_path / place / EXTENSION


def test_the_package_without_its_extension_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_package(tmp_path, monkeypatch)
    assert transformer_engine_extension() is None
    message = "Transformer Engine is installed without its extension for torch, transformer_engine_torch"
    assert transformer_engine_fault() == message


def test_what_is_not_installed_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert transformer_engine_fault() == ""
