"""Steps of a real optimizer on one rank: its reports, its updates, and its state after a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from mrl.config.schema import ParallelConfig, ScheduleConfig, TrainedModelConfig
from mrl.engine import checkpoint
from mrl.engine.engine import EngineRequest, MegatronEngine
from mrl.engine.optimizer import MAX_CONSECUTIVE_SKIPPED_UPDATES, Optimizer
from mrl.engine.parallel import ParallelGroups, model_parallel
from mrl.engine.scores import LossInput, LossOutput, ScoreRequest
from mrl.models.families import read_spec
from mrl.models.hf_reader import HfReader
from mrl.verify.spawn import run_distributed
from tests.engine.tiny_training import build, negative_score, refusal, share, step

LIMIT_S = 300.0
PEAK = 1e-2
SCHEDULE = ScheduleConfig(warmup_steps=2, decay="linear", decay_steps=6, min_lr_ratio=0.1)
RATES = [0, 0.5, 1, 0.775, 0.55, 0.325, 0.1, 0.1]
OTHER_SCHEDULES = [
    (ScheduleConfig(), [1, 1, 1, 1, 1]),
    (ScheduleConfig(warmup_steps=2), [0, 0.5, 1, 1, 1]),
    (ScheduleConfig(decay="cosine", decay_steps=4), [1, 0.8535534, 0.5, 0.1464466, 0]),
]
"""With the rate of each update, as a share of the peak."""
NUM_BEFORE = 3
Found = dict[str, Any]


def make(
    path: str, groups: ParallelGroups, *, dtype: Literal["float32", "bfloat16"] = "float32", **settings: Any
) -> Optimizer:
    """Return the optimizer of an engine with these settings."""
    return of(make_engine(path, groups, dtype=dtype, **settings))


def make_engine(
    path: str, groups: ParallelGroups, *, dtype: Literal["float32", "bfloat16"] = "float32", **settings: Any
) -> MegatronEngine:
    settings = {"optimizer": {"lr": PEAK, "weight_decay": 0.0}, **settings}
    config = TrainedModelConfig(max_tokens_per_device=64, dtype=dtype, **settings)
    engine = MegatronEngine(EngineRequest(read_spec(path), "lm", config), groups)
    engine.load(HfReader(path))
    return engine


def of(engine: MegatronEngine) -> Optimizer:
    assert engine.optimizer is not None, "the engine is trained"
    return engine.optimizer


def nothing(batch: LossInput) -> LossOutput:
    """Return a loss whose gradient is zero everywhere."""
    output = negative_score(batch)
    return LossOutput(output.loss * 0, output.reports)


def nan(batch: LossInput) -> LossOutput:
    output = negative_score(batch)
    return LossOutput(output.loss * math.nan, output.reports)


def states(engine: MegatronEngine) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Yield the optimizer's state of each parameter, by name."""
    for model in engine.models:
        for name, parameter in model.named_parameters():
            owned = of(engine).owned(parameter)
            if owned is not None:
                yield name, owned.state


def norm_of(engine: MegatronEngine, kind: str) -> float:
    return math.sqrt(sum(float(state[kind].double().square().sum()) for _, state in states(engine)))


def adam_steps(engine: MegatronEngine) -> list[float]:
    parts = of(engine)._parts
    return sorted({float(state["step"]) for part in parts for state in part.optimizer.state.values()})


# --- on the rank ------------------------------------------------------------------------------------------------------


def going_on(path: str, directory: Path, groups: ParallelGroups) -> Found:
    """A run with a schedule; the same run saved and resumed twice; and the same saved state loaded by a later run."""

    def rate_and_steps(engine: MegatronEngine, num: int) -> list[tuple[float, float, float]]:
        return [(of(engine).learning_rate / PEAK, *step(engine)) for _ in range(num)]

    engine = build(path, ParallelConfig(), groups, schedule=SCHEDULE)
    whole = rate_and_steps(engine, len(RATES))
    once = build(path, ParallelConfig(), groups, schedule=SCHEDULE)
    rate_and_steps(once, NUM_BEFORE)
    checkpoint.save(once, directory / "first", {"n": 1})
    twice = build(path, ParallelConfig(), groups, schedule=SCHEDULE)
    checkpoint.load(twice, directory / "first")
    after_load = (of(twice).learning_rate / PEAK, of(twice).num_steps, adam_steps(twice))
    middle = rate_and_steps(twice, 2)
    checkpoint.save(twice, directory / "second", {"n": 2})
    extra = checkpoint.load(once, directory / "second")  # into an engine at another step
    after_second = (of(once).learning_rate / PEAK, of(once).num_steps, adam_steps(once))
    last = rate_and_steps(once, len(RATES) - NUM_BEFORE - 2)
    checkpoint.load(engine, directory / "first")  # back, from the end
    back = (of(engine).learning_rate / PEAK, of(engine).num_steps, adam_steps(engine))
    return {
        "whole": whole,
        "resumed": [whole[:NUM_BEFORE], middle, last],
        "states": [after_load, after_second, back],
        "extra": extra,
        "again": rate_and_steps(engine, 2),
    }


def from_the_start(path: str, directory: Path, groups: ParallelGroups) -> Found:
    """Load the checkpoint of an engine before its first step into an engine that has trained."""
    fresh = build(path, ParallelConfig(), groups, schedule=SCHEDULE)
    checkpoint.save(fresh, directory / "start", {})
    expected = [step(fresh) for _ in range(3)]
    checkpoint.load(fresh, directory / "start")
    moments = {kind for _, state in states(fresh) for kind in state}
    num_steps = of(fresh).num_steps
    found = [step(fresh) for _ in range(3)]
    return {"expected": expected, "found": found, "moments": moments, "num_steps": num_steps}


def skipping(path: str, directory: Path, groups: ParallelGroups) -> Found:
    """Skip steps before and after a checkpoint: the count continues, and the schedule waits."""
    engine = build(path, ParallelConfig(), groups, schedule=SCHEDULE)
    step(engine)
    outcomes = [engine.update(*share(engine), nan, ScoreRequest())[1]]
    step(engine)
    outcomes += [engine.update(*share(engine), nan, ScoreRequest())[1] for _ in range(2)]
    rate = of(engine).learning_rate / PEAK
    checkpoint.save(engine, directory / "skipped", {})
    resumed = build(path, ParallelConfig(), groups, schedule=SCHEDULE)
    checkpoint.load(resumed, directory / "skipped")
    counted = (of(resumed).num_skipped, of(resumed).num_skipped_in_a_row, of(resumed).num_steps)
    error = refusal(lambda: step(resumed, nan))
    return {
        "outcomes": [(outcome.applied, outcome.learning_rate / PEAK) for outcome in outcomes],
        "rate": rate,
        "counted": counted,
        "error": error,
    }


def clipping(path: str, groups: ParallelGroups) -> Found:
    """First moments after one step; their size is a tenth of the applied gradient's."""
    found: Found = {}
    for clip in (0.0, 0.5, 1e6):
        engine = make_engine(path, groups, optimizer={"lr": PEAK, "clip_grad": clip})
        _, outcome = engine.update(*share(engine), negative_score, ScoreRequest())
        found[str(clip)] = (outcome.grad_norm, 10 * norm_of(engine, "exp_avg"))
    return found


def decaying(path: str, groups: ParallelGroups) -> dict[str, float]:
    """Return by how much one step without a gradient reduced each parameter."""
    engine = make_engine(path, groups, optimizer={"lr": PEAK, "weight_decay": 0.25})
    before = {name: parameter.detach().clone() for name, parameter in engine.models[0].named_parameters()}
    step(engine, nothing)
    after = dict(engine.models[0].named_parameters())
    return {name: float((after[name] / old).nanmean()) for name, old in before.items()}


def adding_up(path: str, groups: ParallelGroups) -> Found:
    """Gradients of several calls are added, an update starts with none, and rates are those of the step."""
    engine = make_engine(path, groups, schedule=SCHEDULE)
    optimizer = of(engine)
    (rows, micro_batches), request = share(engine), ScoreRequest()
    engine.forward_backward(rows, micro_batches, negative_score, request)
    one = optimizer.step()
    optimizer.zero_grad()
    zeroed = all(not bool(buffer.grad_data.any()) for buffer in optimizer.buffers)
    for _ in range(2):
        engine.forward_backward(rows, micro_batches, negative_score, request)
    two = optimizer.step()
    _, three = engine.update(rows, micro_batches, negative_score, request)
    return {
        "norms": [one.grad_norm, two.grad_norm, three.grad_norm],
        "rates": [outcome.learning_rate / PEAK for outcome in (one, two, three)],
        "zeroed": zeroed,
        "applied": [one.applied, two.applied, three.applied],
    }


def in_bfloat16(path: str, groups: ParallelGroups) -> Found:
    """Float32 weights and two moments of every element; the model's own weights are their rounding."""
    engine = make_engine(path, groups, dtype="bfloat16")
    num_elements = sum(parameter.numel() for parameter in engine.models[0].parameters())
    before = sum(tensor.numel() for tensor in of(engine).state_tensors())
    step(engine)
    tensors = of(engine).state_tensors()
    rounded = []
    for name, state in states(engine):
        parameter = dict(engine.models[0].named_parameters())[name]
        rounded.append(torch.equal(parameter.flatten(), state["param"].bfloat16().flatten()))
    with torch.no_grad():
        for parameter in engine.models[0].parameters():
            parameter.zero_()
    of(engine).weights_from_owned()
    back = all(bool(parameter.any()) for parameter in engine.models[0].parameters())
    return {
        "sizes": (before / num_elements, sum(tensor.numel() for tensor in tensors) / num_elements),
        "dtypes": {str(tensor.dtype) for tensor in tensors},
        "rounded": all(rounded),
        "back": back,
        "buffers": sum(buffer.param_data.numel() for buffer in of(engine).buffers) >= num_elements,
    }


def refused(path: str, groups: ParallelGroups) -> list[str]:
    untrained = build(path, ParallelConfig(), groups, trained=False)
    return [
        refusal(lambda: make(path, groups, optimizer={})),
        refusal(lambda: step(untrained)),
        refusal(lambda: checkpoint.save(untrained, "nowhere", {})),
    ]


def rates(path: str, groups: ParallelGroups) -> list[list[float]]:
    """Return the learning rates of each of the other schedules."""
    found = []
    for schedule, expected in OTHER_SCHEDULES:
        engine = build(path, ParallelConfig(), groups, schedule=schedule)
        found.append([])
        for _ in expected:
            found[-1].append(of(engine).learning_rate / PEAK)
            step(engine)
    return found


def everything(path: str, directory: str) -> Found:
    with model_parallel(ParallelConfig(), seed=1) as groups:
        return {
            "schedule": going_on(path, Path(directory), groups),
            "from the start": from_the_start(path, Path(directory), groups),
            "skipping": skipping(path, Path(directory), groups),
            "clipping": clipping(path, groups),
            "decaying": decaying(path, groups),
            "adding up": adding_up(path, groups),
            "bfloat16": in_bfloat16(path, groups),
            "refused": refused(path, groups),
            "rates": rates(path, groups),
        }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """All results of one rank."""
    from tests.models.tiny_models import make_tiny  # transformers is not for the ranks, which import this module

    directory = tmp_path_factory.mktemp("optimizer")
    path = str(make_tiny("llama", directory / "llama"))
    (seen,) = run_distributed(1, everything, path, str(directory), timeout_s=LIMIT_S)
    return dict(seen)


# --- what it must have seen -------------------------------------------------------------------------------------------


def test_a_schedule_goes_on_from_where_a_checkpoint_was_saved(found: Found) -> None:
    run = found["schedule"]
    assert [rate for rate, *_ in run["whole"]] == pytest.approx(RATES, abs=1e-6)
    assert [each for part in run["resumed"] for each in part] == run["whole"]
    assert run["again"] == run["whole"][NUM_BEFORE : NUM_BEFORE + 2]
    assert run["extra"] == {"n": 2}


def test_each_schedule_has_its_learning_rates(found: Found) -> None:
    for (schedule, expected), seen in zip(OTHER_SCHEDULES, found["rates"], strict=True):
        assert seen == pytest.approx(expected, abs=1e-6), schedule


def test_the_rate_and_the_number_of_steps_are_right_before_the_next_step(found: Found) -> None:
    first, second, back = found["schedule"]["states"]
    assert first == (pytest.approx(RATES[NUM_BEFORE]), NUM_BEFORE, [NUM_BEFORE])
    assert second == (pytest.approx(RATES[NUM_BEFORE + 2]), NUM_BEFORE + 2, [NUM_BEFORE + 2])
    assert back == first


def test_a_checkpoint_from_before_the_first_step_forgets_all_moments(found: Found) -> None:
    run = found["from the start"]
    assert run["found"] == run["expected"]
    assert run["moments"] == {"param"}
    assert run["num_steps"] == 0


def test_skipped_updates_are_counted_across_a_checkpoint(found: Found) -> None:
    run = found["skipping"]
    assert run["counted"] == (3, 2, 2)
    assert run["error"].startswith(f"{MAX_CONSECUTIVE_SKIPPED_UPDATES} updates in a row had no finite gradient norm")


def test_a_skipped_update_leaves_the_schedule_where_it_is(found: Found) -> None:
    run = found["skipping"]
    assert run["outcomes"] == [(False, pytest.approx(rate)) for rate in (RATES[1], RATES[2], RATES[2])]
    assert run["rate"] == pytest.approx(RATES[2])


def test_gradients_are_clipped_where_their_norm_is_too_large(found: Found) -> None:
    norms = {clip: norm for clip, (norm, _) in found["clipping"].items()}
    assert min(norms.values()) > 0.5
    assert len(set(norms.values())) == 1  # the norm before clipping is what is reported
    applied = {clip: size for clip, (_, size) in found["clipping"].items()}
    assert applied["0.5"] == pytest.approx(0.5, rel=1e-4)
    assert applied["0.0"] == pytest.approx(norms["0.0"], rel=1e-4)
    assert applied["1000000.0"] == pytest.approx(norms["0.0"], rel=1e-4)


def test_weights_decay_by_the_rate_and_vectors_do_not(found: Found) -> None:
    for name, ratio in found["decaying"].items():
        is_vector = "layernorm" in name
        assert ratio == pytest.approx(1.0 if is_vector else 1 - PEAK * 0.25, abs=1e-5), name


def test_an_update_begins_without_gradients_and_calls_add_theirs(found: Found) -> None:
    run = found["adding up"]
    one, two, three = run["norms"]
    assert two == pytest.approx(2 * one, rel=1e-5)  # the first step had a rate of 0
    assert 0 < three < 1.5 * one
    assert run["rates"] == pytest.approx(RATES[:3])
    assert run["zeroed"]
    assert run["applied"] == [True] * 3


def test_bfloat16_has_float32_weights_and_moments_beside_it(found: Found) -> None:
    run = found["bfloat16"]
    assert run["sizes"] == (1, 3)
    assert run["dtypes"] == {"torch.float32"}
    assert run["rounded"]
    assert run["back"]
    assert run["buffers"]


def test_what_cannot_train_is_refused(found: Found) -> None:
    assert found["refused"] == [
        "the optimizer has no learning rate",
        "this engine is not trained: it has no gradients",
        "this engine is not trained: it has no optimizer",
    ]
