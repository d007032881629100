"""A library that is installed and broken is noticed, one that is not there is none of that."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.libraries import failure, transformer_engine_fault

WITHOUT_NCCL = (
    "import sys\nif 'torch' not in sys.modules: raise OSError('libnccl.so.2: cannot open shared object file')"
)
BROKEN = "raise ImportError('libtransformer_engine.so: undefined symbol: _ZN3c10')"


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
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "pytorch.py").write_text(content)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    wanted = f"Transformer Engine is installed and cannot be loaded: {said}" if said else ""
    assert transformer_engine_fault() == wanted


def test_what_is_not_installed_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert transformer_engine_fault() == ""
