"""Engines in FP8: which layers vLLM quantizes, and what the plan counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.config.resolved.load import load_any_config
from mrl.models.families import read_spec
from mrl.models.rollout_table import EngineSizes, _is_linear, engine_bytes, layer_tensors
from mrl.plan.known_models import model_spec
from mrl.plan.plan_input import make_plan_input
from mrl.plan.timing import _sent_elements
from mrl.rollout.quantization import gate_arguments
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
    assert left_out == {tensor.name for tensor in matrices if not _is_linear(tensor)}
    assert 0 < len(left_out) < len(matrices)


def test_layers_that_the_user_names_are_not_changed() -> None:
    assert gate_arguments({**FP8, "quantization_config": {"ignore": ["x"]}}) == gate_arguments({}) == {}


@pytest.mark.parametrize(("model", "gb"), [("Llama-3.1-70B", 72.7), ("Qwen3-235B-A22B", 236.5), ("DeepSeek-V3", 673)])
def test_linear_layers_take_a_byte_per_element(model: str, gb: float) -> None:
    """Published arithmetic: matrices in FP8, embeddings, head, norms and gates in bfloat16."""
    total = engine_bytes(model_spec(model), 1, "bfloat16", 1)[0]
    assert total / 1e9 == pytest.approx(gb, rel=0.005)


def test_each_device_of_an_engine_in_fp8_gets_all_weights() -> None:
    path = str(CONFIGS / "grpo-qwen3-235b-a22b-16n8g.yaml")
    plain, quantized = (
        make_plan_input(load_any_config(path, overrides), None)
        for overrides in ([], ["rollout.vllm.quantization=fp8_per_block"])
    )
    elements = quantized.specs["actor"].num_parameters
    assert _sent_elements(quantized) == (elements, elements * 7 / 8)  # 64 of 128 ranks hold all experts
    assert sum(_sent_elements(plain)) < elements / 4
