"""The error if a GPU has no room for an engine: the numbers, the owners of the memory, and a working setting."""

from __future__ import annotations

from typing import Any

import pytest

from mrl.errors import RolloutError
from mrl.rollout.engine import FreeMemory, Part, RoleMemory, device_full

GIB = 1 << 30
ROOM = FreeMemory(free_bytes=51 * GIB, total_bytes=80 * GIB, wanted_bytes=60 * GIB)
HELD = {"actor": RoleMemory(24 * GIB, GIB // 2), "critic": RoleMemory(2 * GIB, 2 * GIB)}
LESS_ACTOR = "reduce actor.max_tokens_per_device, or end other programs on the device (nvidia-smi)"


def test_all_numbers_are_named() -> None:
    error = device_full("kv_cache", "device 3 of n1", ROOM, HELD, {"gpu_memory_utilization": 0.85})
    assert isinstance(error, RolloutError)
    assert str(error).splitlines() == [
        "device 3 of n1: waking an engine's kv_cache takes 60.0 GiB, but only 51.0 GiB of 80.0 GiB are free (9.0 "
        "GiB too little). Reserved by actor 24.0 GiB (0.5 GiB in use), critic 2.0 GiB (2.0 GiB in use); 3.0 GiB by "
        "CUDA, the engine itself and other programs",
        f"  fix: set rollout.vllm.gpu_memory_utilization=0.73; or {LESS_ACTOR}",
    ]


@pytest.mark.parametrize(
    ("part", "vllm", "fix"),
    [
        ("kv_cache", {}, f"set rollout.vllm.gpu_memory_utilization=0.8; or {LESS_ACTOR}"),  # of vLLM's own 0.92
        (
            "kv_cache",
            {"kv_cache_memory_bytes": 60 * GIB},
            f"set rollout.vllm.kv_cache_memory_bytes={51 * GIB}; or {LESS_ACTOR}",
        ),
        ("weights", {"gpu_memory_utilization": 0.85}, LESS_ACTOR),  # which takes nothing from the weights
    ],
)
def test_the_key_is_that_of_the_part_that_finds_no_room(part: Part, vllm: dict[str, Any], fix: str) -> None:
    assert device_full(part, "device 0", ROOM, HELD, vllm).fix == fix
