"""What is said where a GPU has less free memory than an engine takes that is to wake on it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mrl.config.hardware import DEFAULT_UTILIZATION
from mrl.errors import DeviceFull
from mrl.rollout.engine import FreeMemory, Part

_GIB = 1 << 30


@dataclass(frozen=True)
class RoleMemory:
    """What a process has of its GPU: taken from the driver by torch's allocator, and of that in use."""

    reserved_bytes: int
    allocated_bytes: int


def device_full(
    part: Part, device: str, room: FreeMemory, held: Mapping[str, RoleMemory], vllm: Mapping[str, Any]
) -> DeviceFull:
    """The error, with what each role's process holds, and the key that would make room; `vllm` is `rollout.vllm`."""
    others = room.total_bytes - room.free_bytes - sum(each.reserved_bytes for each in held.values())
    holders = [
        f"{role} {_gib(each.reserved_bytes)} ({_gib(each.allocated_bytes)} in use)" for role, each in held.items()
    ]
    what = (
        f"waking an engine's {part} takes {_gib(room.wanted_bytes)}, and {_gib(room.free_bytes)} of "
        f"{_gib(room.total_bytes)} are free: {_gib(room.lacking_bytes)} too little. Held by {', '.join(holders)}; "
        f"{_gib(others)} by CUDA, the engine itself and other programs"
    )
    largest = max(held, key=lambda role: held[role].reserved_bytes)
    fix = f"a smaller {largest}.max_tokens_per_device, or end other programs on it (nvidia-smi)"
    if part == "kv_cache" and (cache := vllm.get("kv_cache_memory_bytes")) is not None:
        fix = f"rollout.vllm.kv_cache_memory_bytes={max(0, cache - room.lacking_bytes)}; or {fix}"
    elif part == "kv_cache":
        utilization = vllm.get("gpu_memory_utilization", DEFAULT_UTILIZATION) - room.lacking_bytes / room.total_bytes
        fix = f"rollout.vllm.gpu_memory_utilization={math.floor(100 * utilization) / 100:g}; or {fix}"
    return DeviceFull(what, where=device, fix=fix)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB"
