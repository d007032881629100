"""A library that is installed and broken is noticed, one that is not there is none of that."""

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
    """Make a package of Transformer Engine's name importable, without the extension."""
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
    ("content", "said"),
    [("", ""), (WITHOUT_NCCL, ""), (BROKEN, "ImportError: libtransformer_engine.so: undefined symbol: _ZN3c10")],
)
def test_an_extension_of_another_torch_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, said: str
) -> None:
    package = fake_package(tmp_path, monkeypatch)
    (package / "pytorch.py").write_text(content)
    (package / "wheel_lib").mkdir()
    (package / "wheel_lib" / EXTENSION).touch()
    wanted = f"Transformer Engine is installed, but cannot be loaded: {said}" if said else ""
    assert transformer_engine_fault() == wanted


@pytest.mark.parametrize("place", ["", "transformer_engine", "transformer_engine/wheel_lib"])
def test_the_extension_is_found_where_transformer_engine_itself_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """No import finds it before Transformer Engine has loaded it: pip puts it below the package."""
    fake_package(tmp_path, monkeypatch)
    (tmp_path / place).mkdir(exist_ok=True)
    (tmp_path / place / EXTENSION).touch()
    assert transformer_engine_extension() == tmp_path / place / EXTENSION


def test_the_package_without_its_extension_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_package(tmp_path, monkeypatch)
    assert transformer_engine_extension() is None
    said = "Transformer Engine is installed without its extension for torch, transformer_engine_torch"
    assert transformer_engine_fault() == said


def test_what_is_not_installed_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert transformer_engine_fault() == ""
