"""Whether a library can be loaded here, tried in a process of its own: an import can crash, hang or change one."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

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


def transformer_engine_fault() -> str:
    """Return why Transformer Engine cannot be loaded though it is installed; empty where it can, or is not there.

    Of its packages one may be there without the extension that it needs, or with that of another torch.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        return ""
    why = failure(IMPORT_TRANSFORMER_ENGINE)
    return f"Transformer Engine is installed and cannot be loaded: {why}" if why else ""
