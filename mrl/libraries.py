"""Whether a library can be loaded here, tried in a process of its own: an import can crash, hang or change one."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

IMPORT_TRANSFORMER_ENGINE = "import torch, transformer_engine.pytorch"  # by itself it does not find torch's NCCL
TRANSFORMER_ENGINE_FIX = "make install-cuda, which builds it against this torch; or pip uninstall transformer_engine"
_TIMEOUT_S = 120
_MAX_REASON_LENGTH = 200


def failure(code: str, timeout_s: float = _TIMEOUT_S) -> str:
    """Return why a piece of Python does not run, in the last line that it said; empty where it runs."""
    try:
        tried = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout_s:g} s"
    if tried.returncode == 0:
        return ""
    lines = [line.strip() for line in tried.stderr.splitlines() if line.strip()]
    return lines[-1][:_MAX_REASON_LENGTH] if lines else f"exit status {tried.returncode}"


def transformer_engine_extension() -> Path | None:
    """Return the file of Transformer Engine's extension for torch, which has its kernels; None where there is none.

    `find_spec` does not find it: pip puts it below the package, which loads it from there by its path.
    """
    package = importlib.util.find_spec("transformer_engine")
    for location in package.submodule_search_locations or () if package else ():
        inner = Path(location)
        for directory in (inner.parent, inner, inner / "wheel_lib"):
            if found := sorted(directory.glob("transformer_engine_torch*.so")):
                return found[0]
    return None


def transformer_engine_fault() -> str:
    """Return why Transformer Engine cannot be loaded though it is installed; empty where it can, or is not there.

    The package can be installed without its extension, or with an extension that was built for another torch.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        return ""
    if transformer_engine_extension() is None:
        return "Transformer Engine is installed without its extension for torch, transformer_engine_torch"
    why = failure(IMPORT_TRANSFORMER_ENGINE)
    return f"Transformer Engine is installed and cannot be loaded: {why}" if why else ""
