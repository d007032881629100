"""`mrl diff` names where two records part: faults planted in one rank of tp 2 pp 2, in gradients, seeds and columns."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.tensor_parallel import layers as megatron_layers

from mrl.config.schema import ParallelConfig
from mrl.engine.parallel import model_parallel
from mrl.engine.tensor_prints import UpdateWatch, state_prints
from mrl.observe.print_diff import RoundingLimits, print_differences
from mrl.observe.step_diff import StepDifference, step_differences
from mrl.protocol import DataProto
from mrl.protocol.columns import from_rows
from mrl.protocol.step_record import (
    AFTER,
    BEFORE,
    Moment,
    Placed,
    RankRecord,
    StepRecord,
)
from mrl.verify.spawn import run_distributed
from tests.engine.tiny_training import build, step

# --- planted faults -----------------------------------------------------------------------------------------------


@contextmanager
def wrong_scale(engine: Any) -> Iterator[None]:
    """The MLP of the third layer on rank 2 of tp 2 pp 2 gets an input that is 1 % too large."""
    handle = None
    if engine.groups.at.rank == 2:
        linear = engine.models[0].decoder.layers[0].mlp.linear_fc2
        handle = linear.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 1.01, *inputs[1:]))
    yield
    if handle is not None:
        handle.remove()


@contextmanager
def wrong_weight(engine: Any) -> Iterator[None]:
    """A norm of the third layer on rank 3 is 1 % too large: the copy of rank 2 is right."""
    if engine.groups.at.rank == 3:
        with torch.no_grad():
            engine.models[0].decoder.layers[0].input_layernorm.weight.mul_(1.01)
    yield


@contextmanager
def skipped_all_reduce(engine: Any) -> Iterator[None]:
    """Rank 1 takes part in the second sum, after the first attention, but continues with its own part."""
    real, calls = megatron_layers.reduce_from_tensor_model_parallel_region, []

    def reduce(part: torch.Tensor, *options: Any, **more: Any) -> torch.Tensor:
        calls.append(1)
        whole = real(part.clone(), *options, **more)  # it sums in place
        return part if engine.groups.at.rank == 1 and len(calls) == 2 else whole

    with mock.patch.object(megatron_layers, "reduce_from_tensor_model_parallel_region", reduce):
        yield


@contextmanager
def other_attention(engine: Any) -> Iterator[None]:
    """The attention of the fourth layer on rank 2 rounds its output to 16 bits, as another kernel may."""
    handle = None
    if engine.groups.at.rank == 2:
        attention = engine.models[0].decoder.layers[1].self_attention.core_attention
        handle = attention.register_forward_hook(lambda module, inputs, output: output.bfloat16().float())
    yield
    if handle is not None:
        handle.remove()


@contextmanager
def own_gradients(engine: Any) -> Iterator[None]:
    """Data-parallel rank 1 of tp 2 dp 2, tensor rank 0, keeps its own gradients instead of the sums."""
    config = engine.models[0].config
    real = config.finalize_model_grads_func

    def finalize(chunks: list[Any], *options: Any, **more: Any) -> None:
        buffers = [buffer for chunk in chunks for buffer in chunk.buffers]
        own = [buffer.grad_data.clone() for buffer in buffers]
        real(chunks, *options, **more)
        if engine.groups.at.rank == 2:
            for buffer, data in zip(buffers, own, strict=True):
                buffer.grad_data.copy_(data)

    config.finalize_model_grads_func = finalize
    yield
    config.finalize_model_grads_func = real


FAULTS: dict[str, tuple[ParallelConfig, Callable[[Any], Any]]] = {
    "wrong scale": (ParallelConfig(tp=2, pp=2), wrong_scale),
    "wrong weight": (ParallelConfig(tp=2, pp=2), wrong_weight),
    "skipped all-reduce": (ParallelConfig(tp=2, pp=2), skipped_all_reduce),
    "other attention": (ParallelConfig(tp=2, pp=2), other_attention),
    "own gradients": (ParallelConfig(tp=2), own_gradients),
}
RIGHT = {"tp 2 pp 2": ParallelConfig(tp=2, pp=2), "tp 2 dp 2": ParallelConfig(tp=2), "pp 2 dp 2": ParallelConfig(pp=2)}


@contextmanager
def nothing(engine: Any) -> Iterator[None]:
    yield


def record_rank(path: str, layout: ParallelConfig, fault: Callable[[Any], Any]) -> tuple[list[Any], RankRecord]:
    with model_parallel(layout, 1) as groups:
        engine = build(path, layout, groups)
        watch = UpdateWatch(gradients=True, activations=True)
        with fault(engine):
            before = state_prints(engine)
            engine.watch = partial(watch.watching, engine)
            step(engine)
        return before, RankRecord(asdict(groups.at), "host", state_prints(engine), watch.updates)


EXPERTS = {
    "experts tp 2 ep 2": ParallelConfig(tp=2, ep=2, sequence_parallel=True),
    "experts pp 2 vpp 2": ParallelConfig(pp=2, vpp=2),
}


def record_all(path: str, mixture: str) -> dict[str, tuple[list[Any], RankRecord]]:
    right = {name: record_rank(path, layout, nothing) for name, layout in RIGHT.items()}
    right |= {name: record_rank(mixture, layout, nothing) for name, layout in EXPERTS.items()}
    return right | {name: record_rank(path, *fault) for name, fault in FAULTS.items()}


def record_of(ranks: list[tuple[list[Any], RankRecord]]) -> StepRecord:
    """Return a record of the prints of all ranks."""
    placed: list[Placed] = []
    for rank, (before, record) in enumerate(ranks):
        for moment, parts in ((BEFORE, before), (Moment(1), record.updates[0]), (AFTER, record.state)):
            placed += [("actor", moment, rank, part) for part in parts]
    facts = {
        "config": {"actor": {"dtype": "float32"}},
        "ranks": {"actor": [record.place for _, record in ranks]},
        "updates": {"actor": []},
    }
    record = StepRecord(Path("record"), DataProto.from_dict(), DataProto.from_dict(), facts)
    record.__dict__["prints"] = placed
    return record


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, StepRecord]:
    from tests.models.tiny_models import make_tiny  # transformers is not for the ranks, which import this module

    paths = [str(make_tiny(name, tmp_path_factory.mktemp(name))) for name in ("qwen2", "qwen3_moe")]
    by_rank = run_distributed(4, record_all, *paths, timeout_s=300)
    return {name: record_of([rank[name] for rank in by_rank]) for name in by_rank[0]}


def parted(one: StepRecord, other: StepRecord, *, exact: bool = False) -> list[tuple[str, str, str, str]]:
    """Return kind, tensor, ranks and note of everything that differs too much, in causal order."""
    limits = RoundingLimits.of(one, other, exact=exact)
    moments = (BEFORE, Moment(1), AFTER)
    found = [part for moment in moments for part in print_differences(one, other, "actor", moment, limits)]
    assert len(found) > 5
    return [(part.kind, part.name, part.ranks, part.note) for part in found if not part.size <= part.limit]


@pytest.mark.parametrize(
    ("fault", "first"),
    [
        ("wrong scale", ("activation (input)", "layers.2.mlp.linear_fc2", "rank 2 (tp 0 pp 1)", "")),
        ("wrong weight", ("weight", "model.layers.2.input_layernorm.weight", "rank 3 (tp 1 pp 1)", "1 of 50 tensors")),
        (
            "other attention",
            ("activation (output)", "layers.3.self_attention.core_attention", "rank 2 (tp 0 pp 1)", ""),
        ),
        (
            "skipped all-reduce",
            ("activation (output)", "layers.0.self_attention.linear_proj", "rank 1 (tp 1 pp 0)", ""),
        ),
    ],
)
def test_a_fault_on_one_rank_of_tp_2_pp_2_is_named(
    fault: str, first: tuple[str, ...], records: dict[str, StepRecord]
) -> None:
    assert parted(records["tp 2 pp 2"], records[fault])[0] == first


def test_a_rank_that_keeps_its_own_gradients_is_named(records: dict[str, StepRecord]) -> None:
    kind, _, ranks, _ = parted(records["tp 2 dp 2"], records["own gradients"])[0]
    assert (kind, ranks) == ("gradient", "rank 2 (tp 0 dp 1)")


def test_equal_layouts_are_equal_to_the_bit_and_others_within_rounding(records: dict[str, StepRecord]) -> None:
    again = copy.copy(records["tp 2 pp 2"])
    assert parted(records["tp 2 pp 2"], again, exact=True) == []
    for other in ("tp 2 dp 2", "pp 2 dp 2"):
        assert parted(records["tp 2 pp 2"], records[other]) == []
        assert parted(records["tp 2 pp 2"], records[other], exact=True) != []
    assert parted(records["pp 2 dp 2"], records["own gradients"])[0][0] == "gradient"


def test_experts_are_counted_once_in_every_layout(records: dict[str, StepRecord]) -> None:
    one, other = (records[name] for name in EXPERTS)
    assert parted(one, other) == []
    assert parted(one, other, exact=True) != []


def step_record(responses: list[list[int]], facts: dict[str, Any] | None = None, **columns: Any) -> StepRecord:
    """Return a record of columns without tensors."""
    tensors = {
        "prompts": from_rows([torch.tensor([1]) for _ in responses]),
        "responses": from_rows([torch.tensor(row) for row in responses]),
        **{name: from_rows([torch.tensor(row) for row in rows]) for name, rows in columns.items()},
    }
    batch = DataProto.from_dict(tensors, row_ids=range(10, 10 + len(responses)))
    known = {"config": {"actor": {"dtype": "float32"}}, "ranks": {"actor": []}, "updates": {"actor": []}}
    record = StepRecord(Path("record"), batch, batch, known | (facts or {}))
    record.__dict__["prints"] = []
    return record


def first_of(one: StepRecord, other: StepRecord, *, exact: bool = False) -> StepDifference | None:
    return next((part for part in step_differences(one, other, exact=exact) if part.is_too_large), None)


def test_a_token_is_named_by_row_and_place() -> None:
    one, other = step_record([[5, 6], [7, 8, 9]]), step_record([[5, 6], [7, 3, 9]])
    assert first_of(one, one, exact=True) is None
    found = first_of(one, other)
    assert found is not None
    assert (found.phase, found.subject, found.place) == ("rollout", "column responses", "row 1 (id 11), token 1")
    assert found.values == ("8", "3")
    found = first_of(one, step_record([[5, 6], [7, 3]]))
    assert found is not None
    assert (found.place, found.values) == ("row 1 (id 11), token 1 is 8 and 3", ("3 tokens", "2 tokens"))


def test_the_rollout_comes_before_what_follows_from_it() -> None:
    advantages = [[0.0, 0.0], [1.0, 1.0, 1.0]]
    one = step_record([[5, 6], [7, 8, 9]], advantages=advantages, old_log_probs=advantages)
    moved = [[0.0, 0.0], [1.0, 1.5, 1.0]]
    found = first_of(one, step_record([[5, 6], [7, 8, 9]], advantages=moved, old_log_probs=moved))
    assert found is not None
    assert (found.phase, found.subject, found.values) == ("log-probs", "column old_log_probs", ("1", "1.5"))


def test_rounding_is_accepted_unless_the_comparison_is_exact() -> None:
    one = step_record([[5]], advantages=[[1.0]])
    near, far, nan = (step_record([[5]], advantages=[[value]]) for value in (1.0 + 1e-6, 1.0 + 1e-4, math.nan))
    assert first_of(one, near) is None
    for found in (first_of(one, near, exact=True), first_of(one, far), first_of(one, nan), first_of(nan, one)):
        assert found is not None
    assert first_of(nan, nan, exact=True) is None
    one.facts["config"] = {"actor": {"dtype": "bfloat16"}}
    assert first_of(one, far) is None, "the wider rounding of both sides applies"


def test_other_rows_orders_and_figures_are_named() -> None:
    def update(rows: list[int], norm: float) -> dict[str, Any]:
        figures = {"loss": 0.5, "grad_norm": norm, "lr": 1e-6}
        return {"updates": {"actor": [{"rows": rows, "micro_batches": [], "figures": figures}]}}

    one = step_record([[5], [6]], update([10, 11], 2.0))
    found = first_of(one, step_record([[5], [6]], update([11, 10], 2.0)))
    assert found is not None
    assert (found.phase, found.subject, found.values) == (
        "update 1 of the actor",
        "order of the rows",
        ("row id 10", "row id 11"),
    )
    found = first_of(one, step_record([[5], [6]], update([10, 11], 2.1)))
    assert found is not None
    assert (found.subject, found.values) == ("grad_norm", ("2", "2.1"))
    found = first_of(one, step_record([[5]], update([10], 2.0)))
    assert found is not None
    assert (found.subject, found.values) == ("row ids", ("row id 11", "only 1 rows"))
    found = first_of(one, step_record([[5], [6]], {"updates": {"actor": []}}))
    assert found is not None
    assert found.values == ("1 updates", "0 updates")


def test_whole_tensors_have_the_norms_of_the_files(records: dict[str, StepRecord]) -> None:
    """In every layout, the prints before training add up to the weights of the model."""
    sums = []
    for record in (records[name] for name in RIGHT):
        squares: dict[str, float] = {}
        for _, moment, _, part in record.prints:
            if moment == BEFORE and part.kind == "weight" and part.is_first_copy:
                squares[part.name] = squares.get(part.name, 0.0) + part.squares
        sums.append(squares)
    assert sums[0].keys() == sums[1].keys() == sums[2].keys()
    for name, value in sums[0].items():
        assert math.isclose(value, sums[1][name]), name
        assert math.isclose(value, sums[2][name]), name
