"""Memory reports of a worker with a sleeping engine: fakes replace CUDA and vLLM's allocator."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.device_allocator.cumem import CuMemAllocator

from mrl.weight_sync.vllm_receiver import WorkerExtension


def test_a_part_takes_what_of_it_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[str] = []
    asleep = [("weights", 100, True), ("weights", 28, True), ("kv_cache", 500, True), ("weights", 7, False)]
    memory = {
        number: SimpleNamespace(tag=tag, handle=(0, size, number, []), is_asleep=sleeps)
        for number, (tag, size, sleeps) in enumerate(asleep)
    }
    monkeypatch.setattr(CuMemAllocator, "instance", SimpleNamespace(pointer_to_data=memory))
    monkeypatch.setattr("vllm.device_allocator.cumem.cumem_available", True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: noted.append("empty_cache"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: noted.append("mem_get_info") or (300, 1000))
    assert WorkerExtension().free_memory("weights") == (300, 1000, 128)
    assert WorkerExtension().free_memory("kv_cache") == (300, 1000, 500)
    assert noted == ["empty_cache", "mem_get_info"] * 2
