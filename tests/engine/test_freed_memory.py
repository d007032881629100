"""Memory that was freed leaves the process: on a CPU measured, on a GPU the order of the calls."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mrl.engine import freed_memory
from mrl.engine.freed_memory import free_unused_memory
from mrl.engine.host_mirror import HostMirroredStorage
from mrl.engine.offload import DeviceMemory

MIB = 1 << 20
FREED = """
import re
import torch
from mrl.engine.freed_memory import give_back

def resident_kib():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1])

tensors = [torch.ones(16_000) for _ in range(5_000)]  # 64 kB each, below what glibc maps by itself
kept = tensors[::100]  # as an optimizer's state lies between a step's activations
full = resident_kib()
del tensors
freed = resident_kib()
give_back(torch.device("cpu"))
print(full, freed, resident_kib(), sum(int(tensor.sum()) for tensor in kept))
"""
CALLS = ("synchronize", "ipc_collect", "empty_cache")


def test_a_process_on_a_cpu_shrinks_by_what_it_freed_and_keeps_what_it_uses() -> None:
    ran = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, timeout=120, check=True)
    full, freed, given_back, total = (int(word) for word in ran.stdout.split())
    assert (full - freed) * 1024 < 50 * MIB, "glibc gives back by itself: the test shows nothing"
    assert (freed - given_back) * 1024 > 250 * MIB
    assert total == 50 * 16_000


def test_a_c_library_without_a_trim_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freed_memory, "_C", SimpleNamespace())
    free_unused_memory(torch.device("cpu"))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of CUDA, and what is released, in order."""
    noted: list[str] = []
    for name in CALLS:
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: noted.append(name))
    release = HostMirroredStorage.free

    def releasing(self: HostMirroredStorage) -> None:
        noted.append("release")
        release(self)

    monkeypatch.setattr(HostMirroredStorage, "free", releasing)
    return noted


def memory_on_gpu() -> DeviceMemory:
    """Of a model with an optimizer, which says of itself that it is on a GPU."""
    buffer = SimpleNamespace(param_data=torch.ones(40), grad_data=torch.ones(40))
    optimizer: Any = SimpleNamespace(buffers=[buffer], state_tensors=lambda: [torch.ones(80)])
    memory = DeviceMemory([], optimizer, torch.device("cpu"))
    memory._device = torch.device("cuda")
    return memory


def test_a_gpu_is_given_back_once_after_the_last_part_has_left(calls: list[str]) -> None:
    memory = memory_on_gpu()
    memory.offload("parameters", "gradients", "optimizer")
    assert calls == ["release", "release", "release", *CALLS]


def test_weights_that_stood_in_for_others_are_given_back_where_they_leave(calls: list[str]) -> None:
    memory = memory_on_gpu()
    reference = memory.copy_weights()
    with memory.weights_of(reference):
        pass
    assert calls == []  # the own weights came back: nothing is free that was not before
    memory.offload("parameters")
    calls.clear()
    with memory.weights_of(reference):
        pass
    assert calls == ["release", *CALLS]
