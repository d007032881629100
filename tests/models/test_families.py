"""Specs read from `config.json`: sizes, costs and frequencies as transformers has them, refusals where mrl cannot."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from mrl.errors import ModelError
from mrl.models.families import read_spec, spec_of
from mrl.models.hf_config import HfConfig
from mrl.models.megatron_arguments import gpt_model_arguments, transformer_arguments
from mrl.models.spec import MlaSpec, ModelSpec
from mrl.models.table import hf_tensors
from tests.models import published
from tests.models.conftest import Tiny
from tests.models.tiny_models import TINY_FAMILIES

MLA = MlaSpec(1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128)
YARN = published.DEEPSEEK_V3["rope_scaling"]


def spec_from(values: dict[str, Any], **changes: Any) -> ModelSpec:
    return spec_of(HfConfig({**values, **changes}, "config.json"))


@pytest.mark.parametrize(
    ("values", "billions"),
    [
        (published.LLAMA_2_7B, 6.738),
        (published.LLAMA_31_70B, 70.554),
        (published.MISTRAL_7B, 7.242),
        (published.QWEN25_05B, 0.494),
        (published.QWEN3_8B, 8.191),
        (published.QWEN3_235B, 235.094),
        (published.MIXTRAL_8X22B, 140.621),
        (published.GLM_45, 352.798),
        (published.GLM_45_AIR, 106.852),
        (published.DEEPSEEK_V3, 671.026),
        (published.MOONLIGHT, 15.960),
        (published.GPT_OSS_20B, 20.915),
        (published.GPT_OSS_120B, 116.829),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_published_models_have_their_published_size(values: dict[str, Any], billions: float) -> None:
    spec = spec_from(values)
    assert round(spec.num_parameters / 1e9, 3) == billions
    assert spec.num_parameters + num_frozen(spec) == num_elements(spec)


def num_elements(spec: ModelSpec) -> int:
    return sum(torch.Size(shape).numel() for shape in hf_tensors(spec, "lm").values())


def num_frozen(spec: ModelSpec) -> int:
    """Return the elements of correction biases, which are buffers."""
    moe = spec.moe
    return (spec.num_layers - len(moe.dense_layers)) * moe.num_experts if moe and moe.correction_bias else 0


@pytest.mark.parametrize(
    ("values", "with_predicting_layer"),
    [(published.GLM_45, 358_337_791_296), (published.GLM_45_AIR, 110_468_824_832)],
    ids=["GLM-4.5", "GLM-4.5-Air"],
)
def test_glm_has_the_hubs_number_of_elements_once_its_predicting_layer_is_counted(
    values: dict[str, Any], with_predicting_layer: int
) -> None:
    """The hub counts all tensors in the files.

    mrl leaves out an expert layer with a separate embedding, a separate head, a projection of two hidden states to one,
    and three norms.
    """
    spec = spec_from(values)
    left_out = sum(torch.Size(shape).numel() for shape in tensors_of(spec, spec.num_layers - 1))
    left_out += 2 * spec.vocab * spec.hidden + 2 * spec.hidden**2 + 3 * spec.hidden
    assert num_elements(spec) + left_out == with_predicting_layer


def tensors_of(spec: ModelSpec, layer: int) -> list[tuple[int, ...]]:
    return [shape for name, shape in hf_tensors(spec, "lm").items() if name.startswith(f"model.layers.{layer}.")]


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_parameters_frequencies_and_work_are_those_of_transformers(tiny: Tiny, family: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny(family), attn_implementation="eager")
    model.set_experts_implementation("eager")
    spec = read_spec(tiny(family))

    assert spec.num_parameters == sum(parameter.numel() for parameter in model.parameters())

    theirs = model.model.rotary_emb.inv_freq
    assert torch.equal(spec.rope.inverse_frequencies(), theirs)

    # Below the tiny window, because eager attention computes every pair, seen or not; with linear attention one chunk.
    num_tokens = 64 if spec.gdn else 20
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(num_tokens)[None], use_cache=False)
    # transformers multiplies frequencies and positions as matrices, in Qwen3.5 three of them: time, height and width.
    angles = spec.rope.dim * num_tokens * (3 if "qwen3_5" in family else 1)
    pairs = spec.attention_flops_per_token_pair * num_tokens**2
    uncounted = 0
    if gdn := spec.gdn:  # the triangular system, and outputs of the convolution beyond the last token
        uncounted = num_tokens * gdn.value_heads * 32 * (gdn.key_dim + gdn.value_dim)
        uncounted -= (gdn.kernel - 1) * gdn.kernel * gdn.conv_rows
    counted = counter.get_total_flops() + 2 * (len(spec.gdn.layers) if spec.gdn else 0) * uncounted
    assert counted == spec.flops_per_token * num_tokens + pairs + angles


def test_a_sequence_costs_the_pairs_that_its_mask_lets_through() -> None:
    spec = spec_from(published.MISTRAL_7B, sliding_window=4)
    seen = sum(query - key < 4 for query in range(10) for key in range(query + 1))
    assert spec.sequence_flops(10) == 10 * spec.flops_per_token + seen * spec.attention_flops_per_token_pair
    spec = spec_from(published.MISTRAL_7B, sliding_window=None)
    assert spec.sequence_flops(10) == 10 * spec.flops_per_token + 55 * spec.attention_flops_per_token_pair


@pytest.mark.parametrize(
    ("new", "old"),
    [
        ({"rope_type": "default", "rope_theta": 5e5}, {"rope_theta": 5e5}),
        (
            {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 3.0}},
        ),
        (
            {"rope_theta": 5e5, **published.LLAMA_31_70B["rope_scaling"]},
            {"rope_theta": 5e5, "rope_scaling": published.LLAMA_31_70B["rope_scaling"]},
        ),
    ],
    ids=["default", "linear", "llama3"],
)
def test_both_ways_of_writing_rope_give_the_frequencies_of_transformers(
    new: dict[str, Any], old: dict[str, Any]
) -> None:
    base = {key: value for key, value in published.LLAMA_31_70B.items() if not key.startswith("rope")}
    theirs = LlamaRotaryEmbedding(LlamaConfig(**base, rope_parameters=dict(new))).inv_freq
    for given in ({"rope_parameters": new}, old):
        assert torch.equal(spec_from(base, **given).rope.inverse_frequencies(), theirs)


def test_a_file_without_rope_theta_means_ten_thousand_for_llama_and_a_million_for_mixtral() -> None:
    assert spec_from(published.LLAMA_2_7B).rope.theta == 1e4
    assert spec_from(published.MIXTRAL_8X22B, rope_theta=None).rope.theta == 1e6


def test_transformer_config_of_experts_and_of_windows() -> None:
    config = transformer_arguments(spec_from(published.QWEN3_235B, mlp_only_layers=[0, 5], decoder_sparse_step=2))
    pattern = [int(layer % 2 == 1 and layer != 5) for layer in range(94)]
    assert config["moe_layer_freq"] == pattern
    assert (config["moe_ffn_hidden_size"], config["ffn_hidden_size"]) == (1536, 12288)
    assert (config["num_moe_experts"], config["moe_router_topk"], config["qk_layernorm"]) == (128, 8, True)
    assert config["moe_router_pre_softmax"] is False
    assert (
        transformer_arguments(spec_from(published.QWEN3_235B, norm_topk_prob=False))["moe_router_pre_softmax"] is True
    )
    assert transformer_arguments(spec_from(published.MISTRAL_7B))["window_size"] == (4095, 0)
    assert transformer_arguments(spec_from(published.QWEN25_05B))["add_qkv_bias"] is True


def test_transformer_config_of_glm() -> None:
    spec = spec_from(published.GLM_45)
    config = transformer_arguments(spec)
    assert config["moe_layer_freq"] == [0] * 3 + [1] * 89
    assert (config["moe_router_score_function"], config["moe_router_topk_scaling_factor"]) == ("sigmoid", 2.5)
    assert (config["moe_router_enable_expert_bias"], config["moe_router_bias_update_rate"]) == (True, 0.0)
    assert (config["moe_router_dtype"], config["moe_router_load_balancing_type"]) == ("fp32", "none")
    assert config["moe_shared_expert_intermediate_size"] == 1536
    assert (config["add_qkv_bias"], config["qk_layernorm"]) == (True, True)
    assert gpt_model_arguments(spec)["rotary_percent"] == 0.5
    assert transformer_arguments(spec_from(published.GLM_45_AIR))["qk_layernorm"] is False


def test_transformer_config_of_deepseek() -> None:
    config = transformer_arguments(spec_from(published.DEEPSEEK_V3))
    latent = (config["q_lora_rank"], config["kv_lora_rank"], config["qk_head_dim"], config["qk_pos_emb_head_dim"])
    assert latent == (1536, 512, 128, 64)
    assert (config["v_head_dim"], config["multi_latent_attention"], config["qk_layernorm"]) == (128, True, True)
    assert (config["moe_router_num_groups"], config["moe_router_group_topk"], config["moe_router_topk"]) == (8, 4, 8)
    # The softmax's scale gets (0.1 ln 40 + 1)^2; cosines and sines have Megatron's plain embedding.
    assert (config["rope_type"], config["rotary_scaling_factor"], config["mscale_all_dim"]) == ("rope", 40, 1.0)
    config = transformer_arguments(spec_from(published.MOONLIGHT))
    assert (config["q_lora_rank"], config["rotary_scaling_factor"], config["mscale_all_dim"]) == (None, 1.0, 0.0)
    assert config["moe_router_num_groups"] is None
    assert config["moe_shared_expert_intermediate_size"] == 2816


def test_an_engine_caches_the_latents_of_a_token_whole_on_each_rank() -> None:
    spec = spec_from(published.DEEPSEEK_V3)
    assert {tp: spec.cached_elements(tp) for tp in (1, 8)} == dict.fromkeys((1, 8), 61 * 576)
    assert spec_from(published.LLAMA_31_70B).cached_elements(8) == 80 * 2 * 128


def test_a_file_says_whether_queries_have_a_latent() -> None:
    assert spec_from(published.MOONLIGHT).mla == replace(MLA, q_rank=None)
    without = {name: value for name, value in published.DEEPSEEK_V3.items() if name != "q_lora_rank"}
    with pytest.raises(ModelError, match="q_lora_rank: is missing: vLLM would take the size of DeepSeek-V3"):
        spec_from(without)


def test_layers_of_glm_flash_without_experts_are_listed_or_counted() -> None:
    listed = {"model_type": "glm4_moe_lite", "architectures": None, "first_k_dense_replace": None, "rms_norm_eps": 1e-5}
    kinds = ["dense", "dense", *["sparse"] * 25]
    spec = spec_from(published.MOONLIGHT, **listed, mlp_layer_types=kinds)
    assert spec.moe
    assert spec.moe.dense_layers == {0, 1}
    with pytest.raises(ModelError, match="only before the others"):
        spec_from(published.MOONLIGHT, **listed, mlp_layer_types=kinds[::-1])


def test_half_of_each_head_rotates_wherever_the_file_says_so() -> None:
    for changes in ({}, {"partial_rotary_factor": None}, {"partial_rotary_factor": 0.25}):
        expected = 32 if changes.get("partial_rotary_factor") else 64
        assert spec_from(published.GLM_45, **changes).rope.dim == expected
    inside = {"rope_theta": 1e6, "rope_type": "default", "partial_rotary_factor": 0.5}
    assert spec_from(published.GLM_45, partial_rotary_factor=0.25, rope_parameters=inside).rope.dim == 64


def test_a_family_without_a_class_for_scores_has_no_score_head() -> None:
    with pytest.raises(ModelError, match=r"transformers has no Glm4MoeForSequenceClassification.*\s*fix: use a model"):
        hf_tensors(spec_from(published.GLM_45_AIR), "score")


def test_windows_of_qwen_are_taken_for_all_layers_or_none() -> None:
    on = {"use_sliding_window": True, "sliding_window": 128}
    assert spec_from(published.QWEN25_05B).sliding_window is None
    assert spec_from(published.QWEN25_05B, **on, max_window_layers=24).sliding_window is None
    assert spec_from(published.QWEN25_05B, **on, max_window_layers=0).sliding_window == 128
    assert spec_from(published.QWEN25_05B, **on, layer_types=["sliding_attention"] * 24).sliding_window == 128


@pytest.mark.parametrize(
    ("values", "changes", "message"),
    [
        (published.LLAMA_2_7B, {"model_type": "lama"}, 'did you mean "llama"?'),
        (published.LLAMA_2_7B, {"architectures": ["LlamaForTokenClassification"]}, "LlamaForTokenClassification: only"),
        (published.LLAMA_2_7B, {"attention_bias": True}, "attention_bias: True is not supported"),
        (published.LLAMA_2_7B, {"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
        (published.LLAMA_2_7B, {"attention_dropout": 0.1}, "without dropout"),
        (published.LLAMA_2_7B, {"hidden_size": None}, "hidden_size: is missing"),
        (published.LLAMA_2_7B, {"num_hidden_layers": "32"}, "num_hidden_layers: '32' is not a whole number"),
        (published.LLAMA_2_7B, {"num_key_value_heads": 5}, "32 attention heads are not a multiple of 5"),
        (published.LLAMA_2_7B, {"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5 is not supported"),
        (published.LLAMA_2_7B, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, '"yarn" is not supported'),
        (published.LLAMA_2_7B, {"rope_scaling": {"type": "linear"}}, "rope_scaling: factor: is missing"),
        (published.LLAMA_2_7B, {"rope_parameters": {"full_attention": {}}}, "only one rotary embedding for all layers"),
        (published.MISTRAL_7B, {"layer_types": ["full_attention"] * 32}, "a window in some layers"),
        (published.QWEN25_05B, {"use_sliding_window": True, "max_window_layers": 20}, "windows in 4 of 24 layers"),
        (published.QWEN3_235B, {"use_sliding_window": True}, "use_sliding_window: True is not supported"),
        (published.QWEN3_235B, {"num_experts_per_tok": 1}, "gives its router no gradient"),
        (published.QWEN3_235B, {"num_experts_per_tok": 129}, "129 experts per token, but there are only 128"),
        (published.QWEN3_235B, {"decoder_sparse_step": 100}, "none of the 94 layers has any"),
        (published.MIXTRAL_8X22B, {"router_jitter_noise": 0.1}, "router_jitter_noise: 0.1 is not supported"),
        (
            published.GLM_45,
            {"n_group": 8},
            "topk_group: 1 of 8 groups for 8 experts per token is not supported, only 4",
        ),
        (published.DEEPSEEK_V3, {"scoring_func": None}, "scoring_func: is missing: vLLM would choose experts in"),
        (published.DEEPSEEK_V3, {"topk_method": "greedy"}, "topk_method: 'greedy' is not supported"),
        (published.DEEPSEEK_V3, {"n_group": 7}, "4 of 7 groups, of 256 experts in all"),
        (published.DEEPSEEK_V3, {"moe_layer_freq": 2}, "moe_layer_freq: 2 is not supported"),
        (published.DEEPSEEK_V3, {"attention_bias": True}, "attention_bias: True is not supported"),
        (published.DEEPSEEK_V3, {"num_key_value_heads": 8}, "num_key_value_heads: 8 is not supported, only 128"),
        (published.DEEPSEEK_V3, {"rope_interleave": False}, "rope_interleave: False is not supported"),
        (published.DEEPSEEK_V3, {"rope_scaling": YARN | {"mscale": 0.7}}, "mscale: 0.7 is not supported, only 1.0"),
        (published.DEEPSEEK_V3, {"rope_scaling": YARN | {"truncate": False}}, "truncate: False is not supported"),
        (published.DEEPSEEK_V3, {"rope_scaling": YARN | {"attention_factor": 1.0}}, "attention_factor: 1.0 is not"),
        (published.DEEPSEEK_V3, {"rope_scaling": {"type": "llama3"}}, '"llama3" is not supported, only default, lin'),
        (published.GLM_45, {"norm_topk_prob": False}, "norm_topk_prob: False is not supported"),
        (published.GLM_45, {"attention_bias": None}, "attention_bias: is missing"),
        (published.GLM_45, {"partial_rotary_factor": 1.5}, "partial_rotary_factor: 1.5 of 128 dimensions is not"),
        (published.GLM_45, {"partial_rotary_factor": 0.01}, "partial_rotary_factor: 0.01 of 128 dimensions is not"),
        (published.GLM_45, {"first_k_dense_replace": 92}, "none of the 92 layers has any"),
        (published.GLM_45, {"architectures": ["Glm4MoeForSequenceClassification"]}, "only Glm4MoeForCausalLM"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_trained_exactly_is_refused(
    values: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError) as caught:
        spec_from(values, **changes)
    assert message in str(caught.value)
    assert str(caught.value).startswith("config.json")


@pytest.mark.parametrize(
    ("content", "message"), [(None, "cannot be read"), ("{", "is not JSON"), ("[]", "is not a JSON object")]
)
def test_a_directory_without_a_config_is_refused(tmp_path: Any, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=message):
        read_spec(tmp_path)


def test_planning_needs_no_torch() -> None:
    program = "import sys, mrl.models.complete; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
