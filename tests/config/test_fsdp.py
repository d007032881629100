"""Settings that the strategy `fsdp` cannot have are refused with the key, the reason and a fix."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

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
    ("actor.lora={rank: 8, alpha: 16, targets: [all-linear]}", "actor.lora: strategy=fsdp trains all weights",
     "actor.lora=null"),
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


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_next", "bloom"])
def test_families_that_are_known_not_to_work_are_refused(
    valid: str, write: Callable[..., str], family: str, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": family}))
    found = of(valid, write, f"model.path={model}")
    assert [what for what in found if what.startswith(f"actor.strategy: fsdp does not support {family}: ")], found
