"""A family for tests only: Qwen3-MoE with a float32 router, and a float32 buffer that corrects its choices."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from mrl.models import rollout_table
from mrl.models.decoder import Family
from mrl.models.families import FAMILIES
from mrl.models.hf_config import HfConfig
from mrl.models.parameters import Parameter, RowRange
from mrl.models.regions import Shape
from mrl.models.rollout_table import EngineSizes, Fused
from mrl.models.spec import ModelSpec, MoeSpec

MODEL_TYPE, GATE, BIAS = "float32_moe", "mlp.gate.weight", "mlp.gate.e_score_correction_bias"
MEGATRON = {"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.0}
"""Settings with which Megatron has the buffer."""


def _bias(name: str, layer: int, moe: MoeSpec) -> Parameter:
    return Parameter(name, ((RowRange(f"model.layers.{layer}.{BIAS}", 0, moe.num_experts),),), dtype="float32")


class Float32Family(Family):
    def tensors(self, spec: ModelSpec, layer: int) -> dict[str, Shape]:
        bias = {}
        if spec.moe and spec.has_experts(layer):
            bias = {f"model.layers.{layer}.{BIAS}": (spec.moe.num_experts,)}
        return super().tensors(spec, layer) | bias

    def parameters(self, spec: ModelSpec, layer: int) -> Iterator[Parameter]:
        for parameter in super().parameters(spec, layer):
            yield replace(parameter, dtype="float32") if parameter.name == "mlp.router.weight" else parameter
        if spec.moe and spec.has_experts(layer):
            yield replace(_bias("mlp.router.expert_bias", layer, spec.moe), trained=False)


def _read(config: HfConfig) -> ModelSpec:
    spec = FAMILIES["qwen3_moe"].read(config)
    assert spec.moe is not None
    return replace(spec, family=MODEL_TYPE, moe=replace(spec.moe, scoring="sigmoid"))


def register() -> None:
    """Add the family to the tables of this process."""
    FAMILIES[MODEL_TYPE] = Float32Family(MODEL_TYPE, "Qwen3Moe", _read)
    for_other_families = rollout_table._expert_tensors

    def expert_tensors(spec: ModelSpec, moe: MoeSpec, sizes: EngineSizes, rank: int, layer: int) -> Iterator[Fused]:
        is_own = spec.family == MODEL_TYPE
        for fused in for_other_families(spec, moe, sizes, rank, layer):
            yield replace(fused, dtype="float32") if is_own and fused.name.endswith(GATE) else fused
        if is_own:
            yield rollout_table._fused(_bias(f"model.layers.{layer}.{BIAS}", layer, moe), sizes, rank)

    rollout_table._expert_tensors = expert_tensors


if MODEL_TYPE not in FAMILIES:
    register()


def make(directory: Path) -> Path:
    """Save a tiny model of the family. Its biases differ only in bits that bfloat16 does not have."""
    from tests.models.tiny_models import make_tiny  # transformers is not for the ranks, which import this module

    source = make_tiny("qwen3_moe", directory / "source")
    model = directory / MODEL_TYPE
    shutil.copytree(source, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": MODEL_TYPE}))
    tensors = load_file(model / "model.safetensors")
    for layer, gate in [(name.removesuffix(GATE), tensors[name]) for name in tensors if name.endswith(GATE)]:
        tensors[layer + BIAS] = 7 + torch.arange(len(gate)) / 1000
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    return model


def float32_tensors(model: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a model's files that stay float32."""
    tensors = load_file(model / "model.safetensors")
    return {name: tensor for name, tensor in tensors.items() if name.endswith((GATE, BIAS))}
