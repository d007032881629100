"""Whole runs with adapters: real Ray, real Megatron, a real vLLM engine, and `mrl export`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mrl.demo.model import make_model
from tests.apart import run_mrl, untimed
from tests.trainer.test_ppo import CONFIG
from tests.trainer.test_ranked_run import CONFIG as RANKED
from tests.trainer.test_ranked_run import KINDS

BETWEEN = "sync/bytes_between_ranks"
LORA = (
    "placement.roles.critic=null",
    "critic=null",
    "algorithm={advantage: grpo, kl: {where: loss, coef: 0.01}}",
    "actor.lora={rank: 4, alpha: 8}",
    "actor.optimizer.lr=1e-2",
    "actor.max_tokens_per_device=256",
)


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["adapters", pytest.param("merged", marks=pytest.mark.on_demand)])
def test_a_policy_with_adapters_trains_resumes_and_is_exported(sync: str, tmp_path: Path) -> None:
    config, run = tmp_path / "run.yaml", tmp_path / "runs" / "small"
    config.write_text(CONFIG.format(directory=tmp_path / "runs", model=make_model(tmp_path / "model", seed=1)))
    awake = "sync.offload=false"  # engines that stay awake keep the frozen weights
    run_mrl("train", str(config), *LORA, f"actor.lora.sync={sync}", awake)
    lines = untimed(run)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[0]["actor/kl_loss"] == pytest.approx(0, abs=1e-5), (
        "the adapters start at zero, so the policy is its reference"
    )
    assert lines[2]["actor/kl_loss"] > 1e-6
    assert (
        max(line["mismatch/log_prob_abs_diff_max"] for line in lines if "mismatch/log_prob_abs_diff_max" in line) < 1e-4
    )
    if sync == "merged":
        assert lines[2]["sync/lost_update"] < 0.01, "float32 loses little of an update"
        return
    assert "sync/lost_update" not in lines[2]
    assert [line[BETWEEN] > 0 for line in lines] == [True, False, False]
    assert {line["sync/adapter_bytes"] > 0 for line in lines} == {True}
    again = run.with_name("again")
    shutil.copytree(run, again)
    for step in (2, 3):
        shutil.rmtree(again / "checkpoints" / f"step-00000{step}")
    run_mrl("train", str(config), *LORA, "run.name=again", awake)
    again_lines = untimed(again)
    assert again_lines[1].pop(BETWEEN) > 0, "the engines of another process need the frozen weights"
    assert again_lines[1].pop("sync/least_bytes") > lines[1].pop("sync/least_bytes") == lines[1].pop(BETWEEN) == 0
    assert again_lines == lines
    assert "PEFT's files" in run_mrl("export", str(run), str(tmp_path / "peft"))
    assert (tmp_path / "peft" / "adapter_model.safetensors").exists()
    assert "rounding left" in run_mrl("export", str(run), str(tmp_path / "merged"), "--merge")


@pytest.mark.slow
@pytest.mark.on_demand
def test_engines_with_stages_get_the_adapters_of_each_version(tmp_path: Path) -> None:
    config, run = tmp_path / "run.yaml", tmp_path / "runs" / "small"
    config.write_text(CONFIG.format(directory=tmp_path / "runs", model=make_model(tmp_path / "model", seed=1)))
    run_mrl("train", str(config), *LORA, "sync.offload=false", "rollout.tp=1", "rollout.pp=2")
    lines = untimed(run)
    assert [line[BETWEEN] > 0 for line in lines] == [True, False, False]
    assert lines[2]["actor/kl_loss"] > 1e-6
    assert all(line["mismatch/log_prob_abs_diff_max"] < 1e-4 for line in lines)


@pytest.mark.slow
@pytest.mark.on_demand
@pytest.mark.parametrize("sync", ["adapters", "merged"])
def test_engines_sample_from_a_frozen_model_in_fp8(sync: str, tmp_path: Path) -> None:
    config, run = tmp_path / "run.yaml", tmp_path / "runs" / "small"
    config.write_text(CONFIG.format(directory=tmp_path / "runs", model=make_model(tmp_path / "model", seed=1)))
    fp8 = ("actor.lora.base_quantization=fp8_per_block", f"actor.lora.sync={sync}", "actor.parallel.tp=1")
    run_mrl("train", str(config), *LORA, *fp8)
    name, lines = "mismatch/log_prob_abs_diff_max", untimed(run)
    assert max(line[name] for line in lines if name in line) < 1e-4, "the engine has the weights of the trainer"
    assert "rounding left" in run_mrl("export", str(run), str(tmp_path / "merged"), "--merge")


@pytest.mark.slow
@pytest.mark.on_demand
def test_dpo_with_adapters_writes_a_merged_model(tmp_path: Path) -> None:
    config, model = tmp_path / "run.yaml", make_model(tmp_path / "model", seed=1)
    config.write_text(RANKED.format(directory=tmp_path, model=model) + KINDS["dpo"])
    printed = run_mrl("dpo", str(config), "actor.lora={rank: 4, alpha: 8}", "actor.optimizer.lr=1e-3")
    lines = untimed(tmp_path / "run")
    assert lines[0]["val/accuracy"] == 0.5, "the adapters start at zero, so the policy is its reference"
    assert lines[1]["accuracy"] == 0.5
    assert lines[-1]["val/loss"] != lines[0]["val/loss"]
    assert "rounding left" in printed
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.on_demand
def test_reward_model_with_adapters_learns_and_writes_a_merged_model(tmp_path: Path) -> None:
    config, model = tmp_path / "run.yaml", make_model(tmp_path / "model", seed=1)
    config.write_text(RANKED.format(directory=tmp_path, model=model) + KINDS["rm"])
    printed = run_mrl("rm", str(config), "actor.lora={rank: 4, alpha: 8}", "actor.optimizer.lr=1e-3")
    lines = untimed(tmp_path / "run")
    assert lines[-1]["val/loss"] != lines[0]["val/loss"]
    assert "rounding left" in printed
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.on_demand
def test_a_critic_on_the_actors_model_equals_one_on_a_copy_and_resumes(tmp_path: Path) -> None:
    config, shared = tmp_path / "run.yaml", tmp_path / "runs" / "shared"
    config.write_text(CONFIG.format(directory=tmp_path / "runs", model=make_model(tmp_path / "model", seed=1)))
    lora = [f"{role}.lora={{rank: 4, alpha: 8}}" for role in ("actor", "critic")]
    rates = [f"{role}.optimizer.lr=1e-2" for role in ("actor", "critic")]
    same = ("critic.parallel.tp=2", "actor.max_tokens_per_device=256", "critic.max_tokens_per_device=256")
    run_mrl("train", str(config), *lora, *rates, *same, "run.name=own")
    run_mrl("train", str(config), *lora, *rates, *same, "critic.lora.base=actor", "run.name=shared")
    lines = untimed(shared)
    assert lines == untimed(shared.with_name("own"))
    assert lines[-1]["critic/grad_norm"] > 0
    for step in (2, 3):
        shutil.rmtree(shared / "checkpoints" / f"step-00000{step}")
    (shared / "metrics.jsonl").write_text("".join((shared / "metrics.jsonl").read_text().splitlines(True)[:1]))
    run_mrl("train", str(config), *lora, *rates, *same, "critic.lora.base=actor", "run.name=shared")
    assert untimed(shared) == lines


@pytest.mark.slow
@pytest.mark.on_demand
def test_critic_with_adapters_learns_and_resumes(tmp_path: Path) -> None:
    config, run = tmp_path / "run.yaml", tmp_path / "runs" / "small"
    config.write_text(CONFIG.format(directory=tmp_path / "runs", model=make_model(tmp_path / "model", seed=1)))
    lora = ("critic.lora={rank: 4, alpha: 8}", "critic.optimizer.lr=1e-2")
    run_mrl("train", str(config), *lora)
    lines = untimed(run)
    assert lines[-1]["critic/grad_norm"] > 0
    assert lines[-1]["critic/values/max"] > 0, "the first updates have changed the critic"
    again = run.with_name("again")
    shutil.copytree(run, again)
    for step in (2, 3):
        shutil.rmtree(again / "checkpoints" / f"step-00000{step}")
    run_mrl("train", str(config), *lora, "run.name=again")
    assert untimed(again) == lines
    assert "PEFT's files" in run_mrl("export", str(run), str(tmp_path / "peft"), "--role", "critic")
