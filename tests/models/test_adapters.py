"""The table of adapters covers each target's A and B once, in any layout, under PEFT's names."""

from __future__ import annotations

import pytest

from mrl.config.lora import ATTENTION_TARGETS, MLP_TARGETS, LoraConfig
from mrl.config.schema import ParallelConfig as Layout
from mrl.errors import ModelError
from mrl.models.adapters import adapter_pairs, adapter_tensors, target_of
from mrl.models.complete import check_adapters_complete
from mrl.models.families import spec_of
from mrl.models.hf_config import HfConfig
from mrl.models.layout import RankPlace
from tests.models import published
from tests.models.tiny_models import tiny_config

LAYOUTS = [
    Layout(),
    Layout(tp=2),
    Layout(tp=4),
    Layout(pp=2, vpp=2),
    Layout(tp=2, pp=4, sequence_parallel=True),
]
SIZES = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "router_aux_loss_coef": 0.0}
OWN = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 32, "num_key_value_heads": 1},
    "qwen3_moe": {"head_dim": 32, "norm_topk_prob": True, **EXPERTS},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0},
}
SPECS = {
    family: spec_of(HfConfig({"model_type": family, **SIZES, **own}, "config.json")) for family, own in OWN.items()
}
ALL = LoraConfig(rank=4, alpha=8.0)
SOME = LoraConfig(rank=3, alpha=8.0, targets=["q_proj", "v_proj", "down_proj"])


@pytest.mark.parametrize("lora", [ALL, SOME])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_each_element_of_each_adapter_is_held_once(family: str, lora: LoraConfig) -> None:
    for layout in LAYOUTS:
        check_adapters_complete(SPECS[family], layout, lora)


def test_names_and_shapes_are_those_of_peft() -> None:
    tensors = adapter_tensors(SPECS["qwen3"], SOME)
    prefix = "base_model.model.model.layers.1"
    assert tensors[f"{prefix}.self_attn.q_proj.lora_A.weight"] == (3, 64)
    assert tensors[f"{prefix}.self_attn.q_proj.lora_B.weight"] == (128, 3)
    assert tensors[f"{prefix}.mlp.down_proj.lora_A.weight"] == (3, 96)
    assert len(tensors) == 4 * 3 * 2


def test_rows_of_b_lie_at_the_outputs_of_their_module() -> None:
    """Llama has two query groups of two heads: without keys, each group has a hole of one head."""
    qkv, *_ = adapter_pairs(SPECS["llama"], SOME, Layout(), RankPlace())
    assert qkv.outputs == ((0, 32), (64, 96), (48, 64), (112, 128))
    assert qkv.num_rows == (64, 32)
    assert qkv.a.shape == (6, 64)


def test_rank_without_outputs_of_any_target_is_refused() -> None:
    lora = LoraConfig(rank=2, alpha=2.0, targets=["v_proj"])
    with pytest.raises(ModelError, match="tensor rank 0 of 4 holds no outputs of v_proj"):
        list(adapter_pairs(SPECS["qwen3"], lora, Layout(tp=4), RankPlace()))


@pytest.mark.parametrize("lora", [ALL, SOME])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_each_expert_has_its_own_adapters_on_one_rank(family: str, lora: LoraConfig) -> None:
    for layout in (Layout(), Layout(tp=2, ep=2, sequence_parallel=True), Layout(pp=2, ep=4), Layout(tp=2, ep=1)):
        check_adapters_complete(SPECS[family], layout, lora)


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_5_text", "qwen3_next"])
def test_each_linear_layer_of_other_attention_has_adapters(family: str) -> None:
    spec = spec_of(HfConfig(tiny_config(family).to_dict(), "config.json"))
    for layout in (Layout(), Layout(tp=2, sequence_parallel=True), Layout(pp=2)):
        check_adapters_complete(spec, layout, ALL)
    modules = {target_of(name) for name in adapter_tensors(spec, ALL)}
    expected = {*ATTENTION_TARGETS} if spec.sinks else {*ATTENTION_TARGETS, *MLP_TARGETS, "out_proj"}
    inputs = {"qwen3_5_text": ("qkv", "z", "b", "a"), "qwen3_next": ("qkvz", "ba"), "gpt_oss": ()}[family]
    assert modules == expected | {f"in_proj_{name}" for name in inputs}


def test_experts_have_the_names_of_their_family() -> None:
    one, other = adapter_tensors(SPECS["qwen3_moe"], SOME), adapter_tensors(SPECS["mixtral"], SOME)
    prefix = "base_model.model.model.layers.1"
    assert one[f"{prefix}.mlp.experts.3.down_proj.lora_A.weight"] == (3, 48)
    assert other[f"{prefix}.block_sparse_moe.experts.3.w2.lora_A.weight"] == (3, 96)
    assert len(one) == len(other) == 4 * 2 * (2 + 4)
    assert not [name for name in adapter_tensors(SPECS["qwen3_moe"], ALL) if "gate.lora" in name], "not the router"


@pytest.mark.parametrize("layout", [Layout(etp=2), Layout(tp=2, ep=2, etp=4), Layout(tp=4, pp=2, ep=2, etp=2)])
def test_ranks_that_share_an_expert_split_one_factor_and_hold_the_other_whole(layout: Layout) -> None:
    check_adapters_complete(SPECS["qwen3_moe"], layout, ALL)
    for rank in range(layout.etp):
        pairs = [x for x in adapter_pairs(SPECS["qwen3_moe"], ALL, layout, RankPlace(etp=rank)) if x.weight.expert]
        first, second = pairs[:2]
        assert (first.a.split, first.b.split, second.a.split, second.b.split) == (False, True, True, False)
        assert (first.b.shape, second.a.shape) == ((96 // layout.etp, 4), (4, 48 // layout.etp))


def test_latents_have_adapters_except_the_projection_that_vllm_decodes_without() -> None:
    spec = spec_of(HfConfig(published.MOONLIGHT, "config.json"))
    names = {name.split(".")[-3] for name in adapter_tensors(spec, ALL) if "self_attn" in name}
    assert names == {"q_proj", "kv_a_proj_with_mqa", "o_proj"}, "not kv_b_proj"
    lora = LoraConfig(rank=8, alpha=16, targets=["q_proj", "kv_a_proj_with_mqa", "o_proj"])
    check_adapters_complete(spec, Layout(tp=2, sequence_parallel=True), lora)
    with pytest.raises(ModelError, match=r"kv_a_proj_with_mqa, o_proj, q_proj, up_proj; not q_a_proj, v_proj"):
        adapter_tensors(spec, LoraConfig(rank=8, alpha=16, targets=["q_a_proj", "v_proj", "o_proj"]))
