"""A process runs on the CPUs beside its GPUs, so that memory that it pins lies on their side of the machine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

_QUERY = ("nvidia-smi", "--query-gpu=index,uuid,pci.bus_id", "--format=csv,noheader")
_QUERY_TIMEOUT_S = 30.0


def bind_to_gpus(visible: str, sysfs: Path = Path("/sys")) -> str:
    """Bind this process, and what it starts, to the CPUs beside these GPUs; a sentence about it, if there is any.

    `visible` is what CUDA_VISIBLE_DEVICES says. Machines of one NUMA node, and some virtual ones, tell nothing.
    """
    try:
        listed = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"not bound to the CPUs beside its GPUs: {error}"
    rows = [[cell.strip() for cell in line.split(",")] for line in listed.splitlines()]
    own = [pci for index, uuid, pci in rows if {index, uuid} & {*visible.split(",")}]
    nodes = {node for pci in own if (node := _node(pci, sysfs)) is not None}
    cpus = {cpu for node in nodes for cpu in _cpus(sysfs / f"devices/system/node/node{node}/cpulist")}
    allowed = os.sched_getaffinity(0)
    if not cpus or cpus >= allowed:
        return ""
    if not cpus & allowed:
        return f"not bound to NUMA node {_text(nodes)} of its GPUs: the job was given none of that node's CPUs"
    os.sched_setaffinity(0, cpus & allowed)
    return f"bound to {len(cpus & allowed)} CPUs of NUMA node {_text(nodes)}, beside GPU {visible}"


def _node(pci: str, sysfs: Path) -> int | None:
    """Return the NUMA node of a device; the driver writes eight digits of the PCI domain, the kernel four."""
    domain, _, rest = pci.lower().partition(":")
    path = sysfs / f"bus/pci/devices/{domain[-4:]}:{rest}/numa_node"
    node = int(path.read_text()) if path.is_file() else -1
    return node if node >= 0 else None


def _cpus(path: Path) -> Iterator[int]:
    """Yield the numbers of a list as the kernel writes it: `0-31,64-95`."""
    for part in path.read_text().strip().split(",") if path.is_file() else ():
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _text(nodes: set[int]) -> str:
    return " and ".join(map(str, sorted(nodes)))
