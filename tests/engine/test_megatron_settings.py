"""Megatron settings that mrl accepts: each run equals a run without them, for steps of any size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from mrl.config.libraries import megatron_fields, transformer_fields
from mrl.config.libraries.megatron_fields import FieldRules
from mrl.config.schema import ParallelConfig, TrainedModelConfig
from mrl.engine.engine import EngineRequest, MegatronEngine
from mrl.engine.parallel import ParallelGroups, model_parallel
from mrl.engine.scores import ScoreRequest
from mrl.models.families import read_spec
from mrl.models.hf_reader import HfReader
from mrl.verify.parity import Difference, ParityCase, ParityResult, measure, merge_ranks
from mrl.verify.spawn import run_distributed
from tests.engine.tiny_training import negative_score, share
from tests.models.tiny_models import make_tiny

LIMIT_S = 300.0
NUM_MICRO_BATCHES = (2, 4, 2, 3)
"""Of each step: what is packed differs from step to step."""
Settings = Mapping[str, Any]

DDP: Mapping[str, Settings] = {
    "reduce while computing": {"overlap_grad_reduce": True, "use_distributed_optimizer": True},
    "gather while computing": {"overlap_grad_reduce": True, "overlap_param_gather": True},
    "small buckets": {"overlap_grad_reduce": True, "bucket_size": 1000},
    "reduce in one": {"overlap_grad_reduce": False, "bucket_size": 1000, "grad_reduce_in_fp32": True},
    "so many buckets": {"overlap_grad_reduce": True, "num_buckets": 3},
    "padded buckets": {"overlap_grad_reduce": True, "pad_buckets_for_high_nccl_busbw": True},
}
"""Settings that must change no number of a run."""
OPTIMIZER: Mapping[str, Settings] = {
    "adam": {"optimizer": "adam", "adam_beta1": 0.5, "adam_beta2": 0.7, "adam_eps": 1e-3},
    "decay in the gradient": {"decoupled_weight_decay": False, "weight_decay": 0.3, "clip_grad": 0.05},
    "slow decay": {"lr": 3e-3, "clip_grad": 0.0, "use_distributed_optimizer": True},
}
"""Settings that change what a run computes, in every layout alike."""
TRANSFORMER: Mapping[str, Settings] = {
    "every layer again": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "some layers again": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    "attention again": {"recompute_granularity": "selective"},
    "MLPs again": {"recompute_granularity": "selective", "recompute_modules": ["mlp", "moe", "core_attn"]},
    "fused activations": {"bias_activation_fusion": True},
    "fused residuals": {"bias_dropout_fusion": True},
}
"""Settings of how a model is computed, which must change no number of a run."""
LATENT: Mapping[str, Settings] = {
    "heads again": {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]},
    "heads and attention again": {
        "recompute_granularity": "selective",
        "recompute_modules": ["mla_up_proj", "core_attn"],
    },
}
"""The same for models with multi-latent attention."""
ON_GPUS = {"apply_rope_fusion", "gradient_accumulation_fusion", "moe_grouped_gemm", "moe_permute_fusion"}
"""No CPU computes these. Where Transformer Engine is, mrl sets them itself; tests/contracts hold what they rely on."""
CLASSES: Mapping[Any, tuple[FieldRules, Mapping[str, Settings], set[str]]] = {
    DistributedDataParallelConfig: (megatron_fields.DDP, DDP, set()),
    OptimizerConfig: (megatron_fields.OPTIMIZER, OPTIMIZER, set()),
    TransformerConfig: (transformer_fields.TRANSFORMER, TRANSFORMER, ON_GPUS),
}


def known(settings: Settings) -> dict[str, Any]:
    """Return the settings that the installed Megatron has: `num_buckets` exists only in the newer of two versions."""
    names = {field.name for cls in CLASSES for field in fields(cls)}
    return {name: value for name, value in settings.items() if name in names}


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_what_is_taken_is_held_against_a_plain_run(cls: Any) -> None:
    rules, cases, elsewhere = CLASSES[cls]
    assert set(rules.taken) == {name for settings in cases.values() for name in settings} | elsewhere


# --- of data parallelism and of the model: nothing runs between a step and the look at its weights -------------------


Steps = list[tuple[float, float]]


def steps(path: str, layout: ParallelConfig, groups: ParallelGroups, ddp: Settings, megatron: Settings) -> Steps:
    """Return each step's gradient norm, and the sum of this rank's parameters right after the step."""
    settings = TrainedModelConfig(
        parallel=layout,
        dtype="float32",
        max_tokens_per_device=64,
        ddp=known(ddp),
        optimizer={"lr": 1e-2},
        megatron=dict(megatron),
    )
    engine = MegatronEngine(EngineRequest(read_spec(path), "lm", settings), groups)
    engine.load(HfReader(path))
    found = []
    for number in NUM_MICRO_BATCHES:
        rows, _ = share(engine)
        micro_batches = np.array_split(np.arange(len(rows.lengths)), number)
        _, outcome = engine.update(rows, micro_batches, negative_score, ScoreRequest())
        # Nothing runs in between: exactly these parameters are sent to the engines.
        total = sum(
            float(parameter.detach().abs().double().sum())
            for model in engine.models
            for parameter in model.parameters()
        )
        found.append((outcome.grad_norm, total))
    return found


def all_steps(path: str, layout: ParallelConfig, section: str) -> dict[str, Steps]:
    """Return results with each of the settings, and without."""
    torch.manual_seed(0)
    with model_parallel(layout, seed=1) as groups:
        found = {"plain": steps(path, layout, groups, {}, {})}
        for name, settings in {"ddp": DDP, "megatron": TRANSFORMER, "latent": LATENT}[section].items():
            ddp, megatron = (settings, {}) if section == "ddp" else ({}, settings)
            found[name] = steps(path, layout, groups, ddp, megatron)
    return found


TOLERANCE = {"ddp": 1e-6, "megatron": 1e-5, "latent": 1e-6}
"""Relative; fused activations round in another order."""
EXPERTS = ParallelConfig(tp=2, ep=2, sequence_parallel=True)


@pytest.mark.parametrize(
    ("family", "ranks", "layout", "section"),
    [
        ("llama", 2, ParallelConfig(), "ddp"),
        pytest.param("llama", 4, ParallelConfig(pp=2), "ddp", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", 4, EXPERTS, "ddp", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", 2, EXPERTS, "megatron", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", 2, EXPERTS, "latent", marks=pytest.mark.slow),
        pytest.param("llama", 2, ParallelConfig(pp=2), "megatron", marks=pytest.mark.slow),
    ],
)
def test_a_setting_changes_no_number(
    family: str, ranks: int, layout: ParallelConfig, section: str, tmp_path: Path
) -> None:
    path = str(make_tiny(family, tmp_path / family))
    for found in run_distributed(ranks, all_steps, path, layout, section, timeout_s=LIMIT_S):
        for name in found.keys() - {"plain"}:
            for number, (seen, expected) in enumerate(zip(found[name], found["plain"], strict=True), 1):
                assert seen == pytest.approx(expected, rel=TOLERANCE[section]), f"{name}: step {number}"


# --- of the optimizer: a spread model's steps are those of one rank --------------------------------------------------


def results(size: int, cases: list[ParityCase]) -> list[ParityResult]:
    by_rank = run_distributed(size, measure, cases, timeout_s=LIMIT_S)
    return [merge_ranks(list(ranks)) for ranks in zip(*by_rank, strict=True)]


def test_an_optimizer_is_the_same_in_every_layout(tmp_path: Path) -> None:
    model = str(make_tiny("llama", tmp_path / "llama"))
    cases = [ParityCase(model, "lm", ParallelConfig(), 64, optimizer=settings) for settings in OPTIMIZER.values()]
    ones, spread = results(1, cases), results(2, cases)
    for name, one, other in zip(OPTIMIZER, ones, spread, strict=True):
        difference = Difference.between(one, other)
        assert max(difference.loss, difference.grad_norm) < 1e-5, (name, difference)
        assert difference.parameters < 1e-4, (name, difference)
    assert len({one.losses[-1] for one in ones}) == len(OPTIMIZER), "each of them computes something else"
