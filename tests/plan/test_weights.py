"""Bytes of parameters, gradients and optimizer state, by hand, with Megatron's padding."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mrl.config.arithmetic import make_mesh
from mrl.config.schema import MegatronModelConfig, ParallelConfig, TrainedModelConfig
from mrl.models.table import hf_tensors
from mrl.plan.known_models import model_spec
from mrl.plan.weights import Buffer, WeightBytes, _building_bytes, _padded_buckets, buffers, stage_weights

LLAMA, TIED, EXPERTS = model_spec("Llama-3.1-8B"), model_spec("Qwen2.5-0.5B"), model_spec("Qwen3-30B-A3B")


def trained(**settings: Any) -> TrainedModelConfig:
    return TrainedModelConfig(max_tokens_per_device=1000, **settings)


def test_buckets_are_filled_from_the_last_and_padded() -> None:
    assert list(_padded_buckets([100, 64, 1], None, 128)) == [math.ceil((64 + 64 + 100) / 128) * 128]
    assert list(_padded_buckets([100, 64, 1], 60, 128)) == [128, 128]
    assert list(_padded_buckets([100, 64, 100], 100, 128)) == [128, 256]
    assert list(_padded_buckets([128], None, 128)) == [128]
    assert list(_padded_buckets([], None, 128)) == []


@pytest.mark.parametrize(
    ("dtype", "ddp", "parameter", "gradient", "optimizer"),
    [
        ("bfloat16", {}, 2, 4, 12),
        ("bfloat16", {"grad_reduce_in_fp32": False}, 2, 2, 12),
        ("float32", {}, 4, 4, 8),
    ],
)
def test_a_rank_holds_parameters_gradients_and_its_share_of_the_optimizer(
    dtype: str, ddp: dict[str, Any], parameter: int, gradient: int, optimizer: int
) -> None:
    model = trained(dtype=dtype, ddp=ddp, parallel=ParallelConfig(cp=2))
    mesh = make_mesh(model.parallel, 8)
    (buffer,) = buffers(LLAMA, model, mesh, "lm", 0)
    elements = sum(math.prod(shape) for shape in hf_tensors(LLAMA, "lm").values())
    assert buffer.num_elements == elements
    assert buffer.num_owners == 8, "context ranks own a share as well"
    assert elements <= buffer.num_padded < elements + 300 * 64 + 1024
    assert buffer.num_padded % math.lcm(8, 128) == 0
    held = stage_weights(LLAMA, model, mesh, "lm", 0)
    assert held == WeightBytes(
        parameters=buffer.num_padded * parameter,
        gradients=buffer.num_padded * gradient,
        optimizer=buffer.num_padded // 8 * optimizer,
        largest_parameter=128256 * 4096 * parameter,
        layer_weight=2 * 14336 * 4096 * parameter,
        checkpoint=buffer.num_padded // 8 * 12,
        building=elements * parameter,
    )
    assert held.total == held.parameters + held.gradients + held.optimizer


def test_a_frozen_model_has_parameters_alone() -> None:
    frozen = MegatronModelConfig(max_tokens_per_device=1000)
    elements = sum(math.prod(shape) for shape in hf_tensors(LLAMA, "score").values())
    held = stage_weights(LLAMA, frozen, make_mesh(frozen.parallel, 4), "score", 0)
    assert held == WeightBytes(elements * 2, 0, 0, 0, 0, 0, building=elements * 2)


def test_buffers_are_made_one_after_the_other_while_later_parameters_are_elsewhere() -> None:
    model = trained(parallel=ParallelConfig(tp=2, ep=4))
    mesh = make_mesh(model.parallel, 16)
    dense, experts = buffers(EXPERTS, model, mesh, "lm", 0)
    assert experts.num_elements > dense.num_elements, "the second buffer is the fullest moment"
    assert stage_weights(EXPERTS, model, mesh, "lm", 0).building == experts.num_elements * 2
    more_dense = [Buffer(1000, 1000, 1), Buffer(100, 100, 1)]
    assert _building_bytes(more_dense, 2, 4) == 1100 * 2 - 100 * 6, "before the second buffer exists"
    alone = trained()
    (buffer,) = buffers(LLAMA, alone, make_mesh(alone.parallel, 1), "lm", 0)
    weights = stage_weights(LLAMA, alone, make_mesh(alone.parallel, 1), "lm", 0)
    copy = 128256 * 4096 * 2
    assert weights.building == buffer.num_padded * 4 + copy, "then come the optimizer's float32 weights"


def test_the_experts_of_a_rank_are_owned_by_those_that_hold_them() -> None:
    model = trained(parallel=ParallelConfig(tp=2, ep=4))
    mesh = make_mesh(model.parallel, 16)
    dense, experts = buffers(EXPERTS, model, mesh, "lm", 0)
    assert (dense.num_owners, experts.num_owners) == (8, 4)
    assert experts.num_elements == 48 * (128 // 4) * 3 * 2048 * 768
    together = trained(parallel=ParallelConfig())
    (one,) = buffers(EXPERTS, together, make_mesh(together.parallel, 2), "lm", 0)
    whole = sum(math.prod(shape) for shape in hf_tensors(EXPERTS, "lm").values())
    assert one.num_elements == whole
    frozen = MegatronModelConfig(max_tokens_per_device=1000, parallel=ParallelConfig(ep=4))
    held = stage_weights(EXPERTS, frozen, make_mesh(frozen.parallel, 4), "lm", 0).parameters // 2
    assert held == whole - 48 * 128 * 3 * 2048 * 768 * 3 // 4


def test_tied_embeddings_have_a_bucket_of_their_own_on_both_ends() -> None:
    model = trained(parallel=ParallelConfig(pp=2))
    mesh = make_mesh(model.parallel, 4)
    assert model.parallel.pp == 2
    embedding = 151936 * 896
    for stage in (0, 1):
        (buffer,) = buffers(TIED, model, mesh, "lm", stage)
        layers = sum(math.prod(shape) for name, shape in hf_tensors(TIED, "lm").items() if ".layers." in name) // 2
        assert buffer.num_elements == embedding + layers + (896 if stage else 0), "and the last has the final norm"
    assert isinstance(buffer, Buffer)


def test_sizes_known_by_name_add_up_to_published_totals() -> None:
    """The total that llama.cpp prints for the files of the largest model without a published table of its layers."""
    assert model_spec("Qwen3.5-122B-A10B").num_parameters == pytest.approx(122.11e9, rel=5e-5)
