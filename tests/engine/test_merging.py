"""Weights with their adapters added, and the part of an update that rounding removes."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from mrl.config.lora import LoraConfig
from mrl.config.schema import ParallelConfig as Layout
from mrl.engine.merging import MergedWeights, RoundingLoss
from mrl.models.adapters import adapter_names, adapter_pairs, adapter_tensors
from mrl.models.families import spec_of
from mrl.models.hf_config import HfConfig
from mrl.models.layout import RankPlace
from mrl.models.regions import slices
from mrl.models.spec import ModelSpec
from mrl.models.table import hf_tensors, shards_of
from tests.models.test_adapters import ALL, SPECS
from tests.models.tiny_models import tiny_config

SOME = LoraConfig(rank=3, alpha=6.0, targets=["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"])


def random_tensors(spec: ModelSpec, lora: LoraConfig, scale: float) -> dict[str, torch.Tensor]:
    shapes = hf_tensors(spec, "lm") | adapter_tensors(spec, lora)
    generator = torch.Generator().manual_seed(5)
    return {name: scale * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("family", "layout", "lora"),
    [
        ("llama", Layout(), SOME),
        ("llama", Layout(tp=2), SOME),
        ("llama", Layout(tp=4), SOME),
        ("mixtral", Layout(tp=2, ep=4, sequence_parallel=True), SOME),
        ("qwen3_5_text", Layout(tp=2), ALL),
        ("qwen3_next", Layout(tp=2, ep=2, sequence_parallel=True), ALL),
        ("gpt_oss", Layout(tp=2, ep=2, sequence_parallel=True), ALL),
    ],
)
def test_each_rank_merges_its_part_of_each_module(family: str, layout: Layout, lora: LoraConfig) -> None:
    spec = SPECS[family] if family in SPECS else spec_of(HfConfig(tiny_config(family).to_dict(), "config.json"))
    tensors = random_tensors(spec, lora, 0.1)
    for tp, ep in product(range(layout.tp), range(layout.ep)):
        place = RankPlace(tp=tp, ep=ep)
        base = {}
        for shard in shards_of(spec, layout, place, "lm"):
            base[shard.chunk, shard.name] = torch.zeros(shard.shape)
            for piece in shard.pieces:
                base[shard.chunk, shard.name][slices(piece.target)] = tensors[piece.hf][slices(piece.source)]
        adapters = []
        for pair in adapter_pairs(spec, lora, layout, place):
            parts = torch.zeros(pair.a.shape), torch.zeros(pair.b.shape)
            for shard, part in zip((pair.a, pair.b), parts, strict=True):
                for piece in shard.pieces:
                    part[slices(piece.target)] = tensors[piece.hf][slices(piece.source)]
            adapters.append((pair, *parts))
        merged = MergedWeights(base, adapters, lora.scale, torch.float32)
        for shard in shards_of(spec, layout, place, "lm"):
            for piece in shard.pieces:
                a, b = adapter_names(piece.hf)
                whole = tensors[piece.hf] + (lora.scale * tensors[b] @ tensors[a] if a in tensors else 0.0)
                found = merged[shard.chunk, shard.name][slices(piece.target)]
                assert torch.allclose(found, whole[slices(piece.source)], atol=1e-6), piece.hf
        assert merged.loss.share < 1e-3


def test_small_update_is_lost_to_rounding_and_a_large_one_is_not() -> None:
    weight = (0.02 * torch.randn(256, 256, generator=torch.Generator().manual_seed(3))).bfloat16()
    update = torch.randn(256, 256, generator=torch.Generator().manual_seed(4))
    shares = []
    for size in (1e-6, 1e-5, 1e-4, 1e-3):
        loss = RoundingLoss()
        loss.add(size * update, weight, (weight.float() + size * update).bfloat16())
        shares.append(loss.share)
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.9
    assert shares[-1] < 0.05
    assert str(loss) == f"rounding left {shares[-1]:.1%} of the update out"
