"""Settings that the strategy `fsdp` cannot have are refused with the key, the reason and a fix."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mrl.config.arithmetic import held_dtype
from mrl.config.lora import LoraConfig
from mrl.config.schema import TrainedModelConfig
from tests.config.test_rules import problems

FSDP = ["actor={strategy: fsdp, parallel: {tp: 1, cp: 1, pp: 1}, megatron: {}, ddp: {}}"]


def of(valid: str, write: Callable[..., str], *overrides: str) -> dict[str, str]:
    return {
        what: fix
        for what, fix in problems(write(valid), [*FSDP, *overrides]).items()
        if "fsdp" in what or "fsdp" in fix
    }


def test_a_plain_configuration_is_valid(valid: str, write: Callable[..., str]) -> None:
    assert of(valid, write) == {}


REFUSED = [
    ("actor.parallel.tp=2", "actor.parallel.tp: 2, but strategy=fsdp has no tensor parallelism", "actor.parallel.tp=1"),
    ("actor.parallel.pp=2", "actor.parallel.pp: 2, but strategy=fsdp has no pipeline", "actor.strategy=megatron"),
    ("actor.parallel.ep=2", "actor.parallel.ep: 2, but strategy=fsdp has no expert parallelism", "actor.parallel.ep=1"),
    ("actor.megatron={recompute_granularity: full}", "actor.megatron.recompute_granularity: strategy=fsdp does not run",
     "actor.megatron.recompute_granularity=null, and actor.fsdp.recompute=true"),
    ("actor.ddp={overlap_grad_reduce: true}", "actor.ddp.overlap_grad_reduce: strategy=fsdp does not run Megatron",
     "actor.ddp.overlap_grad_reduce=null"),
    ("actor.ddp={overlap_grad_reduce: null, bucket_size: 1}", "actor.ddp.bucket_size: strategy", "bucket_size=null"),
    ("actor.optimizer={lr: 1e-6, sgd_momentum: 0.9}", "actor.optimizer.sgd_momentum: the optimizer of strategy=fsdp",
     "known: adam_beta1, adam_beta2, adam_eps, clip_grad, lr, weight_decay"),
    ("actor.lora={rank: 8, alpha: 16, base_quantization: fp8_per_block}",
     "actor.lora.base_quantization: fp8_per_block, but strategy=fsdp cannot", "actor.lora.base_quantization=null"),
    ("critic={strategy: fsdp, parallel: {tp: 1, cp: 1, pp: 1}, megatron: {}, ddp: {}, lora: {rank: 8, alpha: 16, "
     "base: actor}}", "critic.lora.base: strategy=fsdp shards each role's own model", "critic.lora.base=own"),
    ("critic={lora: {rank: 8, alpha: 16, base: actor}}", "critic.strategy: megatron, but the shared model has actor.",
     "critic.strategy=fsdp, or critic.lora.base=own"),
    ("algorithm.router_replay=R2", "algorithm.router_replay: R2, but strategy=fsdp cannot", "actor.strategy=megatron"),
    ("actor.fsdp.shard_size=3", "actor.fsdp.shard_size: 3 does not divide the", "nearest: actor.fsdp.shard_size="),
    ("actor={strategy: megatron, fsdp: {recompute: true}}", "actor.fsdp.recompute: only strategy=fsdp reads it",
     "actor.strategy=fsdp"),
]  # fmt: skip


@pytest.mark.parametrize(("override", "what", "fix"), REFUSED, ids=[override for override, *_ in REFUSED])
def test_what_it_cannot_do_is_refused(
    valid: str, write: Callable[..., str], override: str, what: str, fix: str
) -> None:
    found = of(valid, write, override)
    assert [(own, its) for own, its in found.items() if own.startswith(what) and fix in its], found


@pytest.mark.parametrize(("targets", "is_refused"), [("all-linear", True), ("up_proj", True), ("o_proj", False)])
def test_adapters_on_experts_are_refused(
    valid: str, write: Callable[..., str], targets: str, is_refused: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "num_experts": 8}))
    lora = f"actor.lora={{rank: 8, alpha: 16, targets: [{targets}], sync: merged}}"
    found = of(valid, write, f"model.path={tmp_path}", lora)
    refused = [what for what in found if what.startswith("actor.lora.targets: strategy=fsdp takes the experts")]
    assert bool(refused) == is_refused, found


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_next", "bloom"])
def test_families_that_are_known_not_to_work_are_refused(
    valid: str, write: Callable[..., str], family: str, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": family}))
    found = of(valid, write, f"model.path={model}")
    assert [what for what in found if what.startswith(f"actor.strategy: fsdp does not support {family}: ")], found


def test_a_model_below_adapters_is_held_in_its_dtype() -> None:
    plain = TrainedModelConfig(strategy="fsdp", max_tokens_per_device=1)
    assert held_dtype(plain) == "float32"
    assert held_dtype(replace(plain, lora=LoraConfig(rank=1, alpha=1))) == plain.dtype == "bfloat16"
