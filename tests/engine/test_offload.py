"""Parts of a model move off the device and back: training is the same, and no unnecessary byte is copied."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

from mrl.config.schema import ParallelConfig as Layout
from mrl.engine import offload
from mrl.engine.offload import (
    CopyStats,
    DeviceMemory,
    HostMirroredStorage,
    PartName,
    free_unused_memory,
    memory_of,
    pinned_memory,
)
from mrl.engine.parallel import model_parallel
from mrl.errors import EngineError
from mrl.verify.spawn import run_distributed
from tests.engine.tiny_training import build, log_probs, on_host, refusal, step

LIMIT_S = 300.0
ALL: tuple[PartName, ...] = ("parameters", "gradients", "optimizer")
Dtype = Literal["float32", "bfloat16"]
Ways = list[tuple[dict[str, Any], ...]]


@dataclass(frozen=True)
class Case:
    model: str
    layout: Layout
    dtype: Dtype


def plain(case: Case) -> dict[str, Any]:
    """Three steps, the log-probs before and after them, and a fourth step, without any offload."""
    with model_parallel(case.layout, seed=1) as groups:
        engine = build(case.model, case.layout, groups, dtype=case.dtype)
        before = log_probs(engine)
        steps = [step(engine) for _ in range(3)]
        return {"before": before, "after": log_probs(engine), "steps": [*steps, step(engine)]}


def untrained(case: Case) -> dict[str, Any]:
    """Offload and reload a model without an optimizer."""
    with model_parallel(case.layout, seed=1) as groups:
        engine = build(case.model, case.layout, groups, dtype=case.dtype, trained=False)
        before = dict(engine.memory.device_bytes)
        with on_host(engine.memory, *ALL):
            away = dict(engine.memory.device_bytes)
        refused = [refusal(lambda: engine.memory.need("gradients"))]
        next(engine.models[0].parameters()).detach().view(torch.uint8).numpy()
        refused.append(refusal(lambda: engine.memory.offload("parameters")))
        return {"device": [before, away], "refused": refused, "before": log_probs(engine)}


def moving(case: Case) -> dict[str, Any]:
    """The same with offloads and reloads between all calls. Also return the copies and the errors."""
    found: dict[str, Any] = {"dtype": case.dtype, "steps": [], "bytes": []}
    with model_parallel(case.layout, seed=1) as groups:
        engine = build(case.model, case.layout, groups, dtype=case.dtype)
        copy = engine.memory.copy_weights()
        memory, traffic = engine.memory, engine.memory.traffic

        traffic.to_host_bytes = 0

        def note(what: str) -> None:
            moved = (traffic.to_host_bytes, traffic.to_device_bytes)
            traffic.to_host_bytes = traffic.to_device_bytes = 0
            found["bytes"].append((what, *moved, sum(memory.device_bytes.values())))

        for _ in range(3):
            with on_host(memory, *ALL):
                note("away")
            note("back")
            found["steps"].append(step(engine))
            note("step")
        found["sizes"] = dict(memory.device_bytes)
        memory.offload(*ALL)
        note("away after the last step")
        memory.offload(*ALL)
        note("away again")
        found["refused"] = [refusal(lambda: log_probs(engine)), refusal(lambda: step(engine))]
        with memory.weights_of(copy):
            note("other")
            found["reference"] = log_probs(engine)
        note("other gone")
        memory.onload("parameters")
        note("parameters back")
        with memory.weights_of(copy):
            note("other in place of the own")
            found["reference_again"] = log_probs(engine)
        note("own back")
        found["after"] = log_probs(engine)
        memory.onload("gradients", "optimizer")
        found["zeroed"] = all(not bool(buffer.grad_data.any()) for buffer in engine.optimizer.buffers)  # type: ignore[union-attr]
        found["sizes_after"] = dict(memory.device_bytes)
        found["host"] = {name: 0 if part.host is None else part.host.numel() for name, part in memory._parts.items()}
        with memory.weights_of(copy):
            found["refused"] += [refusal(lambda: step(engine)), refusal(lambda: memory.offload("parameters"))]
        found["steps"].append(step(engine))
    return found


def each_way(cases: list[Case]) -> Ways:
    return [(plain(case), moving(case), untrained(case)) for case in cases]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Ways:
    """Results of the two ranks for each case and method."""
    from tests.models.tiny_models import make_tiny  # transformers is not for the ranks, which import this module

    directory = tmp_path_factory.mktemp("offload")
    qwen, mixtral = (str(make_tiny(family, directory / family)) for family in ("qwen3", "mixtral"))
    cases = [
        Case(qwen, Layout(), "float32"),  # two data-parallel ranks
        Case(qwen, Layout(pp=2), "bfloat16"),
        Case(mixtral, Layout(ep=2), "bfloat16"),
    ]
    ranks = run_distributed(2, each_way, cases, timeout_s=LIMIT_S)
    return [ways for rank in ranks for ways in rank]


def test_training_is_the_same_to_the_bit(found: Ways) -> None:
    for still, moved, _ in found:
        assert still["steps"] == moved["steps"]
        assert still["after"] == moved["after"]
        assert all(math.isfinite(norm) and norm > 0 for _, norm in still["steps"])
    assert any(still["after"] for still, _, _ in found)


def test_the_reference_is_the_model_before_training_to_the_bit(found: Ways) -> None:
    for still, moved, other in found:
        assert still["before"] == moved["reference"] == moved["reference_again"] == other["before"]
        assert not still["before"] or still["before"] != still["after"]


def test_nothing_stays_on_the_device_and_nothing_is_moved_twice(found: Ways) -> None:
    for _, moved, other in found:
        size = moved["sizes"]
        weights, optimizer = size["parameters"], size["optimizer"]
        assert weights > 0
        assert optimizer > 0
        away, back, _, *rest = moved["bytes"]
        at_first = away[1] - weights  # the optimizer's own float32 weights, where the model's are not; no moments yet
        assert away[2:] == (0, 0)
        assert back == ("back", 0, weights + at_first, weights + at_first + size["gradients"])
        assert at_first == (0 if moved["dtype"] == "float32" else optimizer // 3)
        everything = weights + optimizer
        whole = everything + size["gradients"]
        for number in (0, 3):
            assert rest[number] == ("away", everything, 0, 0)
            assert rest[number + 1] == ("back", 0, everything, whole)
            assert rest[number + 2] == ("step", 0, 0, whole)
        assert rest[6:] == [
            ("away after the last step", everything, 0, 0),
            ("away again", 0, 0, 0),
            ("other", 0, weights, weights),
            ("other gone", 0, 0, 0),
            ("parameters back", 0, weights, weights),
            ("other in place of the own", 0, weights, weights),
            ("own back", 0, weights, weights),
        ]
        assert moved["sizes_after"] == size
        assert moved["zeroed"]
        assert [bytes_of["parameters"] > 0 for bytes_of in other["device"]] == [True, False]
        assert 0 <= moved["host"]["parameters"] - weights < 64 * 4
        assert moved["host"]["gradients"] == 0


def test_what_cannot_work_is_refused(found: Ways) -> None:
    for _, moved, other in found:
        assert moved["refused"] == [
            "the model's parameters are not on the device",
            "the model's parameters are not on the device",
            "another model's weights are loaded: nothing can be trained until they are removed",
            "another model's weights are loaded: nothing can be offloaded until they are removed",
        ]
        assert other["refused"] == [
            "this engine is not trained: it has no gradients",
            "memory that numpy has seen cannot leave the device",
        ]


SIZES = (3, 40, 7)


def movable() -> tuple[HostMirroredStorage, list[torch.Tensor]]:
    tensors = [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in SIZES]
    return HostMirroredStorage(tensors, CopyStats(), None), tensors


def test_what_leaves_comes_back_to_the_bit_and_all_views_with_it() -> None:
    held, tensors = movable()
    before, view = [tensor.clone() for tensor in tensors], tensors[1].view(4, 10)[2]
    held.save_to_host()
    held.free()
    assert (held.on_device, held.device_bytes) == (False, 0)
    held.allocate()
    assert held.on_device
    assert held.host is not None
    held.load_from_host(held.host)
    assert held.device_bytes == 4 * sum(SIZES)
    assert all(torch.equal(tensor, old) for tensor, old in zip(tensors, before, strict=True))
    assert torch.equal(view, before[1][20:30])


def test_bytes_are_counted_where_they_go() -> None:
    held, _ = movable()
    num_bytes = 4 * sum(SIZES)
    held.save_to_host()
    assert (held.traffic.to_host_bytes, held.traffic.to_device_bytes) == (num_bytes, 0)
    held.save_to_host()
    assert held.traffic.to_host_bytes == num_bytes  # the copy is current
    first, held.host_is_current = held.host, False
    held.save_to_host()
    assert held.traffic.to_host_bytes == 2 * num_bytes
    assert held.host is first, "the buffer is used again"
    assert held.host is not None
    held.load_from_host(held.host)
    assert (held.traffic.to_host_bytes, held.traffic.to_device_bytes) == (2 * num_bytes, num_bytes)


def test_each_content_has_an_aligned_place_of_the_host_buffer() -> None:
    held, tensors = movable()
    assert held.host_buffer_bytes == 64 + 192 + 64  # 12, 160 and 28 bytes
    held.save_to_host()
    assert held.host is not None
    assert held.host.numel() == held.host_buffer_bytes
    places = [held.host[start : start + 4 * size] for start, size in zip((0, 64, 256), SIZES, strict=True)]
    assert all(torch.equal(at.view(torch.float32), x) for at, x in zip(places, tensors, strict=True))


def test_other_tensors_take_the_place_of_those_before() -> None:
    held, tensors = movable()
    held.save_to_host()
    first = held.host
    grown = [*tensors, torch.ones(9)]
    held.hold(grown)
    assert held.host_buffer_bytes == 64 + 192 + 64 + 64
    held.host_is_current = False
    held.save_to_host()
    assert held.host is not first
    assert held.host is not None
    grown[3].zero_()
    held.load_from_host(held.host)
    assert grown[3].tolist() == [1.0] * 9


@pytest.mark.parametrize("num_bytes", [1, 5_000_000])
def test_pinned_memory_is_of_its_size_in_pages_of_its_own_and_let_go_of(
    num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: dict[int, int] = {}

    def pin(address: int, size: int, flags: int) -> int:
        pinned[address] = size
        return flags

    runtime = SimpleNamespace(cudaHostRegister=pin, cudaHostUnregister=pinned.pop)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    buffer, other = pinned_memory(num_bytes), pinned_memory(num_bytes)
    assert buffer.numel() == num_bytes
    assert sorted(pinned) == sorted([buffer.data_ptr(), other.data_ptr()])
    pages = math.ceil(num_bytes / 4096) * 4096
    assert set(pinned.values()) == {pages}, "not the next power of two"
    assert all(address % 4096 == 0 for address in pinned)
    assert abs(buffer.data_ptr() - other.data_ptr()) >= pages
    view, at = buffer[:1], other.data_ptr()
    del buffer
    view.fill_(7)
    assert len(pinned) == 2, "a view holds it as well"
    del view
    assert list(pinned) == [at]


def test_memory_that_cannot_be_pinned_says_how_much_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: 2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    with pytest.raises(EngineError, match=r"cannot pin 5,000 bytes .*error 2\)\n  fix: .*ulimit -l"):
        pinned_memory(5_000)


MIB = 1 << 20
FREED = """
import re
import torch
from mrl.engine.offload import free_unused_memory

def resident_kib():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1])

tensors = [torch.ones(16_000) for _ in range(2_000)]  # 64 kB each, below what glibc maps by itself
kept = tensors[::100]  # as an optimizer's state lies between a step's activations
full = resident_kib()
del tensors
freed = resident_kib()
free_unused_memory(torch.device("cpu"))
print(full, freed, resident_kib(), sum(int(tensor.sum()) for tensor in kept))
"""
CALLS = ("synchronize", "free_workspaces", "ipc_collect", "empty_cache")


def test_a_process_on_a_cpu_shrinks_by_what_it_freed_and_keeps_what_it_uses() -> None:
    ran = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, timeout=120, check=True)
    full, freed, given_back, total = (int(word) for word in ran.stdout.split())
    assert (full - freed) * 1024 < 20 * MIB, "glibc gives back by itself: the test shows nothing"
    assert (freed - given_back) * 1024 > 100 * MIB
    assert total == 20 * 16_000


def test_a_c_library_without_a_trim_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "_C", SimpleNamespace())
    free_unused_memory(torch.device("cpu"))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls of CUDA and releases of memory, in order."""
    noted: list[str] = []
    for name in CALLS:
        module, called = torch.cuda, name
        if name == "free_workspaces":  # a build without CUDA does not have it
            module, called = torch._C, "_cuda_clearCublasWorkspaces"
        monkeypatch.setattr(module, called, lambda *_, name=name: noted.append(name), raising=module is torch.cuda)
    release = HostMirroredStorage.free

    def releasing(self: HostMirroredStorage) -> None:
        noted.append("release")
        release(self)

    monkeypatch.setattr(HostMirroredStorage, "free", releasing)
    return noted


def memory_on_gpu() -> DeviceMemory:
    """Return the memory of a model with an optimizer that claims to be on a GPU."""
    buffer = SimpleNamespace(param_data=torch.ones(40), grad_data=torch.ones(40))
    optimizer: Any = SimpleNamespace(buffers=[buffer], state_tensors=lambda: [torch.ones(80)])
    memory = memory_of([], optimizer, torch.device("cpu"))
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
