"""Engines in FP8: which layers vLLM quantizes, and what the plan counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.config.resolved.load import load_any_config
from mrl.config.schema import RolloutConfig
from mrl.errors import ConfigError
from mrl.models.families import read_spec
from mrl.models.rollout_table import EngineSizes, engine_bytes, is_linear, layer_tensors
from mrl.plan.known_models import model_spec
from mrl.plan.plan_input import make_plan_input
from mrl.plan.reshard_traffic import busiest_traffic, handed_over, sent_sizes
from mrl.rollout.quantization import gate_arguments, shares_scales
from tests.models.tiny_models import make_tiny

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
FP8 = {"quantization": "fp8_per_block"}


@pytest.mark.needs
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3", "qwen3_5_moe_text", "gpt_oss"])
def test_vllm_leaves_out_gates_and_nothing_else(family: str, tmp_path: Path) -> None:
    from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer

    spec = read_spec(make_tiny(family, tmp_path / "model"))
    ignored = gate_arguments(FP8)["quantization_config"]["ignore"]
    matrices = [
        tensor
        for layer in range(spec.num_layers)
        for tensor in layer_tensors(spec, EngineSizes(1), 0, layer)
        if len(tensor.shape) > 1 and not tensor.name.endswith("conv1d.weight")
    ]
    left_out = {t.name for t in matrices if should_ignore_layer(t.name.removesuffix(".weight"), ignore=ignored)}
    assert left_out == {tensor.name for tensor in matrices if not is_linear(tensor)}
    assert 0 < len(left_out) < len(matrices)


def test_layers_that_the_user_names_are_not_changed() -> None:
    assert gate_arguments({**FP8, "quantization_config": {"ignore": ["x"]}}) == gate_arguments({}) == {}


@pytest.mark.parametrize(("model", "gb"), [("Llama-3.1-70B", 72.7), ("Qwen3-235B-A22B", 236.5), ("DeepSeek-V3", 673)])
def test_linear_layers_take_a_byte_per_element(model: str, gb: float) -> None:
    """Published arithmetic: matrices in FP8, embeddings, head, norms and gates in bfloat16."""
    total = engine_bytes(model_spec(model), 1, "bfloat16", 1)[0]
    assert total / 1e9 == pytest.approx(gb, rel=0.005)


def test_an_engine_in_fp8_gets_half_the_bytes_of_another() -> None:
    """235B of parameters, 8 devices an engine: published arithmetic gives 58.8 GB a device in bfloat16."""
    path = str(CONFIGS / "grpo-qwen3-235b-a22b-fp8-8n8g.yaml")
    plain, quantized = (
        make_plan_input(load_any_config(path, overrides), None)
        for overrides in (["rollout.vllm.quantization=null"], [])
    )
    spec = plain.specs["actor"]
    sizes = [sent_sizes(subject.config, spec) for subject in (plain, quantized)]
    whole, half = (handed_over(spec, each, "bfloat16")[0] for each in sizes)
    assert (whole / 1e9, half / 1e9) == (pytest.approx(58.9, abs=0.2), pytest.approx(29.7, abs=0.2))
    assert not sizes[1].unaligned
    before, after = (busiest_traffic(subject.config, spec).network for subject in (plain, quantized))
    assert 0.49 < after / before < 0.52


def test_experts_that_vllm_would_pad_are_refused() -> None:
    path, split = str(CONFIGS / "grpo-qwen3-235b-a22b-fp8-8n8g.yaml"), "rollout.vllm.enable_expert_parallel=false"
    with pytest.raises(ConfigError, match=r"8 leaves 192 of the 1536 rows of an expert .*enable_expert_parallel=true"):
        make_plan_input(load_any_config(path, [split]), None)
    make_plan_input(load_any_config(path, [split, "rollout.tp=4"]), None)


@pytest.mark.parametrize(
    ("vllm", "tp", "expected"),
    [
        ({"quantization": "fp8_per_channel"}, 2, True),
        ({"quantization": "fp8_per_tensor"}, 2, True),
        ({"quantization": "fp8_per_channel"}, 1, False),
        ({"quantization": "fp8_per_block"}, 2, False),
        ({"quantization": "fp8_per_block", "quantization_config": {"linear": "fp8_per_tensor"}}, 2, True),
        ({}, 2, False),
    ],
)
def test_scales_of_rows_and_matrices_are_computed_together(vllm: dict[str, object], tp: int, expected: bool) -> None:
    assert shares_scales(RolloutConfig(tp=tp, vllm=vllm, max_prompt_tokens=8, max_response_tokens=8)) is expected
