"""Parts of a model leave the device and come back: the same training, and no byte moved that need not be."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch

from mrl.config.schema import ParallelConfig as Layout
from mrl.engine.offload import PartName
from mrl.engine.parallel import model_parallel
from mrl.verify.spawn import run_distributed
from tests.engine.tiny_training import build, log_probs, refusal, step

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
    """Three steps, the log-probs before and after them, and a fourth step, with everything where it is."""
    with model_parallel(case.layout, seed=1) as groups:
        engine = build(case.model, case.layout, groups, dtype=case.dtype)
        before = log_probs(engine)
        steps = [step(engine) for _ in range(3)]
        return {"before": before, "after": log_probs(engine), "steps": [*steps, step(engine)]}


def untrained(case: Case) -> dict[str, Any]:
    """A model without an optimizer leaves and comes back."""
    with model_parallel(case.layout, seed=1) as groups:
        engine = build(case.model, case.layout, groups, dtype=case.dtype, trained=False)
        before = dict(engine.memory.device_bytes)
        with engine.memory.on_host(*ALL):
            away = dict(engine.memory.device_bytes)
        refused = [refusal(lambda: engine.memory.need("gradients"))]
        next(engine.models[0].parameters()).detach().view(torch.uint8).numpy()
        refused.append(refusal(lambda: engine.memory.offload("parameters")))
        return {"device": [before, away], "refused": refused, "before": log_probs(engine)}


def moving(case: Case) -> dict[str, Any]:
    """The same with parts that come and go between any two calls; what was on the way, and what was refused."""
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
            with memory.on_host(*ALL):
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
        found["host"] = dict(memory.host_bytes)
        with memory.weights_of(copy):
            found["refused"] += [refusal(lambda: step(engine)), refusal(lambda: memory.offload("parameters"))]
        found["steps"].append(step(engine))
    return found


def each_way(cases: list[Case]) -> Ways:
    return [(plain(case), moving(case), untrained(case)) for case in cases]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Ways:
    """What each of two ranks found in each case, each way."""
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
            "the model's parameters left the device",
            "the model's parameters left the device",
            "another model's weights are in place: nothing can be trained before they are gone",
            "another model's weights are in place: nothing can be offloaded before they are gone",
        ]
        assert other["refused"] == [
            "this engine is not trained: it has no gradients",
            "memory that numpy has seen cannot leave the device",
        ]
