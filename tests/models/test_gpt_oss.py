"""gpt-oss: its config.json, its experts in bfloat16 and MXFP4 files, and layouts that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from mrl.config.schema import ParallelConfig as Layout
from mrl.config.schema import RolloutConfig
from mrl.errors import ModelError
from mrl.models.families import read_spec, spec_of
from mrl.models.hf_config import HfConfig
from mrl.models.hf_reader import HfReader, load_shard
from mrl.models.layout import RankPlace
from mrl.models.megatron_arguments import transformer_arguments
from mrl.models.regions import slices
from mrl.models.rollout_table import EngineSizes, rollout_tensors
from mrl.models.table import shards_of
from mrl.models.windows import mean_visible, window_elements
from mrl.verify.transformers_model import answer
from tests.models import published
from tests.models.conftest import Tiny
from tests.models.quantized import pack_mxfp4
from tests.models.test_hf_reader import Tensors, changed, refusal
from tests.models.test_hf_writer import write_from_ranks
from tests.models.tiny_models import make_tiny

EXPERTS = "model.layers.1.mlp.experts."


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_mxfp4(make_tiny("gpt_oss", tmp_path_factory.mktemp("mxfp4")))


def test_megatron_gets_the_window_of_every_other_layer_and_the_sharper_softmax(tiny: Tiny) -> None:
    arguments = transformer_arguments(read_spec(tiny("gpt_oss")))
    assert arguments["window_size"] == (7, 0)
    assert arguments["window_attn_skip_freq"] == [1, 0, 1, 0]
    assert arguments["softmax_scale"] == pytest.approx((0.1 * 1.3862944 + 1) ** 2 / 32**0.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["full_attention"] * 24}, "layer_types: the window is supported in every other layer"),
        ({"swiglu_limit": 5.0}, "swiglu_limit: 5.0 is not supported, only 7.0"),
        ({"attention_bias": False}, "attention_bias: False is not supported, only True"),
        ({"rope_scaling": None}, "rope_scaling: is missing"),
        ({"rope_scaling": {**published.GPT_OSS_20B["rope_scaling"], "mscale": 1.0}}, "mscale: 1.0 is not supported"),
        ({"rope_scaling": {**published.GPT_OSS_20B["rope_scaling"], "rope_type": "linear"}}, "rope_type: 'linear' is"),
    ],
)
def test_what_the_engine_would_compute_in_another_way_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        spec_of(HfConfig({**published.GPT_OSS_20B, **change}, "config.json"))


def test_layers_with_a_window_cache_and_compute_no_more_than_it() -> None:
    spec = spec_of(HfConfig(published.GPT_OSS_120B, "config.json"))
    assert spec.cached_elements(4) == 18 * 2 * 2 * 64
    assert window_elements(spec, 4) == 18 * 2 * 2 * 64 * 128
    assert window_elements(spec_of(HfConfig(published.MISTRAL_7B, "config.json")), 1) == 0
    assert mean_visible(spec, 1000) == (1000 + 128) / 2
    num_pairs = sum(min(place, 128) + place for place in range(1, 1001)) // 2
    work = spec.flops_per_token * 1000 + spec.attention_flops_per_token_pair * num_pairs
    assert spec.sequence_flops(1000) == work


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(tp=2, etp=2), "etp 2, but Megatron does not split experts with biases"),
        (Layout(tp=8), "tp 8 is more than 4 key-value heads"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(tiny: Tiny, layout: Layout, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        shards_of(read_spec(tiny("gpt_oss")), layout, RankPlace(), "lm")


def test_engines_are_refused_whole_tensors_and_more_ranks_than_key_heads(tiny: Tiny) -> None:
    spec = read_spec(tiny("gpt_oss"))
    with pytest.raises(ModelError, match="vLLM cannot take whole tensors of gpt-oss while it runs"):
        EngineSizes.of(RolloutConfig(max_prompt_tokens=1, max_response_tokens=1), spec, whole=True)
    with pytest.raises(ModelError, match="tp 8 is more than 4 key-value heads"):
        rollout_tensors(spec, EngineSizes(8, 8), 0)


def test_only_the_first_rank_that_splits_an_expert_adds_the_bias_of_its_output(tiny: Tiny) -> None:
    spec, name = read_spec(tiny("gpt_oss")), f"{EXPERTS}routed_experts.w2_bias"
    for sizes, held in ((EngineSizes(2), [4, 0]), (EngineSizes(2, 2), [2, 2])):
        ranks = [{fused.name: fused for fused in rollout_tensors(spec, sizes, rank)}[name] for rank in range(2)]
        assert [len(fused.pieces) for fused in ranks] == held
        assert [len(fused.padding) for fused in ranks] == [int(not number) for number in held]


def test_experts_of_a_file_are_transposed_and_gate_and_up_alternate(tiny: Tiny) -> None:
    reader, tensors = HfReader(tiny("gpt_oss")), load_file(tiny("gpt_oss") / "model.safetensors")
    gate_up, bias, down = (tensors[EXPERTS + name][3] for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj"))
    assert torch.equal(reader.whole(f"{EXPERTS}3.gate_proj.weight"), gate_up[:, 0::2].T)
    assert torch.equal(reader.read(f"{EXPERTS}3.up_proj.weight", ((5, 9), (2, 60))), gate_up[2:60, 11:19:2].T)
    assert torch.equal(reader.whole(f"{EXPERTS}3.up_proj.bias"), bias[1::2])
    assert torch.equal(reader.read(f"{EXPERTS}3.down_proj.weight", ((0, 128), (7, 8))), down[7:8].T)
    with pytest.raises(ModelError, match=r"the tensor model\.layers\.9\.mlp\.experts\.down_proj does not exist"):
        reader.whole("model.layers.9.mlp.experts.0.down_proj.weight")


def test_mxfp4_is_read_as_transformers_converts_it_to_the_bit(packed: Path) -> None:
    tensors, reader, spec = load_file(packed / "model.safetensors"), HfReader(packed), read_spec(packed)
    reader.check(spec, "lm")
    for name in ("gate_up_proj", "down_proj"):
        blocks, scales = (tensors[f"{EXPERTS}{name}_{part}"] for part in ("blocks", "scales"))
        theirs = convert_moe_packed_tensors(blocks, scales)
        assert torch.equal(reader.whole(EXPERTS + name).bfloat16(), theirs)
        box = ((1, 3), (30, 70), (5, 9))
        assert torch.equal(reader.read(EXPERTS + name, box).bfloat16(), theirs[slices(box)])
    fc2 = "decoder.layers.1.mlp.experts.local_experts.1.linear_fc2.weight"
    shards = {shard.name: shard for shard in shards_of(spec, Layout(ep=2), RankPlace(ep=1), "lm")}
    assert torch.equal(load_shard(reader, shards[fc2], torch.bfloat16), theirs[3].T)


def test_a_model_in_mxfp4_answers_like_its_export(packed: Path, tmp_path: Path) -> None:
    write_from_ranks(packed, tmp_path / "plain", "lm")
    config = json.loads((tmp_path / "plain/config.json").read_text())
    assert "quantization_config" not in config
    tokens = torch.arange(30) * 7 % 131
    one, other = (answer(path, "lm", tokens) for path in (packed, tmp_path / "plain"))
    assert one.scores_T is not None
    assert other.scores_T is not None
    torch.testing.assert_close(one.scores_T, other.scores_T, atol=2e-5, rtol=0)
    exported, reader = load_file(tmp_path / "plain/model.safetensors"), HfReader(packed)
    assert exported.keys() == {*reader}
    assert all(torch.equal(reader.whole(name), tensor) for name, tensor in exported.items())


def test_files_that_are_not_in_mxfp4_are_refused(packed: Path, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors[f"{EXPERTS}gate_up_proj_scales"] = tensors[f"{EXPERTS}gate_up_proj_scales"].float()
        tensors[f"{EXPERTS}down_proj_scales"] = tensors[f"{EXPERTS}down_proj_scales"][:, 1:].clone()
        del tensors["model.layers.0.mlp.experts.down_proj_scales"]
        tensors["model.layers.2.mlp.experts.down_proj_blocks"] = torch.zeros(4, 128, 2, 16, dtype=torch.uint8)
        tensors["model.layers.2.mlp.experts.down_proj_scales"] = torch.zeros(4, 128, 2, dtype=torch.uint8)

    message = refusal(changed(packed, tmp_path / "changed", change))
    assert "model.layers.0.mlp.experts.down_proj is missing" in message
    assert "model.layers.0.mlp.experts.down_proj_blocks is unexpected" in message
    assert f"{EXPERTS}gate_up_proj_scales holds F32, not U8" in message
    assert f"{EXPERTS}down_proj_scales has shape [4, 127, 4], not [4, 128, 4]" in message
    assert "model.layers.2.mlp.experts.down_proj has shape [4, 64, 128], not [4, 128, 128]" in message


def test_mxfp4_of_another_family_is_refused() -> None:
    config = {**published.QWEN3_8B, "quantization_config": {"quant_method": "mxfp4"}}
    with pytest.raises(ModelError, match='"mxfp4" cannot be read'):
        spec_of(HfConfig(config, "config.json"))
