"""Matrices of a frozen model in FP8: which ones, in which layouts, and their exact values."""

from __future__ import annotations

import math

import pytest
import torch

from mrl.config.schema import ParallelConfig as Layout
from mrl.errors import ModelError
from mrl.models.families import spec_of
from mrl.models.fp8_base import check_fp8_base, fp8_elements, fp8_shards, fp8_tensors
from mrl.models.fp8_exact import exact_scales, from_fp8, rounded_to_fp8, to_fp8
from mrl.models.hf_config import HfConfig
from mrl.models.layout import RankPlace
from mrl.models.table import hf_tensors
from mrl.plan.known_models import known_config
from tests.models.tiny_models import tiny_config


def published(name: str, **changes: int) -> object:
    return spec_of(HfConfig({**known_config(name), **changes}, "config.json"))


def test_linear_layers_are_in_fp8_and_everything_else_is_not() -> None:
    spec = published("Qwen3-30B-A3B", num_hidden_layers=2)
    others = {name.removeprefix("model.layers.1.") for name in {*hf_tensors(spec, "lm")} - fp8_tensors(spec)}
    norms = {"input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"}
    assert {name for name in others if "layers.0" not in name} == {
        *(f"{name}.weight" for name in ("mlp.gate", "model.norm", "lm_head", "model.embed_tokens")),
        *(f"{name}.weight" for name in norms),
    }


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=4, ep=4, etp=2, pp=2, sequence_parallel=True)])
def test_elements_are_those_of_the_shards(layout: Layout) -> None:
    spec = published("Qwen3-30B-A3B", num_hidden_layers=4, num_experts=8)
    sizes = [math.prod(shard.shape) for shard in fp8_shards(spec, layout, RankPlace(pp=layout.pp - 1))]
    assert fp8_elements(spec, layout, layout.pp - 1) == (sum(sizes), max(sizes))


def test_a_matrix_that_is_not_whole_blocks_keeps_its_dtype_in_every_layout() -> None:
    """Heads of 64 numbers: queries, keys and values alternate in Megatron's matrix every 64 rows."""
    spec = published("Llama-3.1-8B", num_attention_heads=64, head_dim=64)
    assert {name.split(".")[-2] for name in fp8_tensors(spec)} == {"o_proj", "gate_proj", "up_proj", "down_proj"}


def test_layouts_and_families_without_fp8_are_refused() -> None:
    spec = published("Qwen3-30B-A3B")
    with pytest.raises(ModelError, match=r"parallel.etp is 4, which cuts blocks of 128 x 128 of .*experts.0.gate_proj"):
        check_fp8_base(spec, Layout(tp=4, etp=4, sequence_parallel=True))
    with pytest.raises(ModelError, match=r"multi-latent attention cannot be kept in FP8 yet"):
        check_fp8_base(published("DeepSeek-V3"), Layout())
    with pytest.raises(ModelError, match=r"no matrix of this qwen3 consists of whole blocks"):
        check_fp8_base(spec_of(HfConfig(tiny_config("qwen3").to_dict(), "config.json")), Layout())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_are_exact_in_bfloat16_and_do_not_depend_on_shards(dtype: torch.dtype) -> None:
    matrix = (0.02 * torch.randn(256, 384, generator=torch.Generator().manual_seed(0))).to(dtype)
    matrix[:128, :128], matrix[128:, 128:256] = 0, 1e-30 * matrix[128:, 128:256]
    scales = exact_scales(matrix)
    held, values = to_fp8(matrix, scales), rounded_to_fp8(matrix)
    assert torch.equal(from_fp8(held, scales, torch.bfloat16).float(), values.float())
    assert torch.equal(rounded_to_fp8(values), values), "quantizing again changes nothing"
    assert torch.equal(rounded_to_fp8(matrix[128:, 128:]), values[128:, 128:])
    assert 224 < float(held.float().abs().amax()) <= 448
    errors = (values.float() - matrix.float()).abs()
    assert bool((errors <= matrix.float().abs() / 16 + scales.amax() * 2**-10).all()), "half of the last of four digits"
    assert float(errors.norm() / matrix.float().norm()) == pytest.approx(0.0266, abs=5e-4)
