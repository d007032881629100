"""Whole runs of a mixture with router replay: conversations, segments, batches ahead, and the same run resumed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from mrl.demo.model import save_toy_tokenizer
from tests.agents.test_segments_run import CONFIG
from tests.apart import run_mrl, untimed

LEARNS = (
    'reward={functions: {chance: {name: "tests.trainer.rewards:chance"}}, num_workers: 1}',
    "actor.optimizer.lr=1e-2",
)
REPLAY = ("algorithm.router_replay=R3", *LEARNS)
WORLD = '{{name: "tests.agents.worlds:{}", max_turns: 3}}'


def make_mixture(directory: Path) -> Path:
    """Write a random mixture with eight experts, two of them per token, for the toy tasks."""
    directory.mkdir(parents=True)
    config = Qwen3MoeConfig(
        vocab_size=save_toy_tokenizer(directory),
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        max_position_embeddings=64,
        tie_word_embeddings=False,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        Qwen3MoeForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mixture(tmp_path_factory.mktemp("mixture") / "model")


def write(directory: Path, model: Path, world: str) -> Path:
    config = directory / "run.yaml"
    config.write_text(CONFIG.format(directory=directory, model=model, world=WORLD.format(world)))
    return config


@pytest.mark.slow
@pytest.mark.on_demand
@pytest.mark.parametrize("world", ["NewContext", "Waiting"])
def test_every_turn_and_segment_has_its_routes(world: str, mixture: Path, tmp_path: Path) -> None:
    run_mrl("train", str(write(tmp_path, mixture, world)), *REPLAY)
    lines = untimed(tmp_path / "agents")
    assert [line["mismatch/other_experts"] for line in lines] == [0, 0], "float32 chooses the engine's experts again"
    assert all(line["actor/other_experts"] > 0 for line in lines), "the second update has other weights"
    assert all(line["mismatch/log_prob_abs_diff_max"] < 1e-4 for line in lines)


@pytest.mark.slow
@pytest.mark.on_demand
def test_batches_ahead_keep_their_routes_over_a_resume(mixture: Path, tmp_path: Path) -> None:
    config = write(tmp_path, mixture, "NewContext")
    ahead = (
        *REPLAY,
        "asynchrony.ahead=1",
        "placement={pools: {all: 2, engines: 1}, roles: {actor: all, rollout: engines}}",
        "cluster.devices_per_node=3",
        "training={steps: 3, save_every: 1, keep: 3}",
    )
    run_mrl("train", str(config), *ahead)
    run = tmp_path / "agents"
    lines = untimed(run)
    assert lines[0]["mismatch/other_experts"] == 0
    assert lines[2]["mismatch/other_experts"] > 0, "the samples are one update old"
    again = run.with_name("again")
    shutil.copytree(run, again)
    for step in (2, 3):
        shutil.rmtree(again / "checkpoints" / f"step-00000{step}")
    run_mrl("train", str(config), *ahead, "run.name=again")
    assert untimed(again) == lines


@pytest.mark.slow
@pytest.mark.on_demand
def test_updates_replay_the_choice_of_the_old_log_probs(mixture: Path, tmp_path: Path) -> None:
    config = write(tmp_path, mixture, "NewContext")
    run_mrl("train", str(config), *LEARNS, "algorithm.router_replay=R2", "actor.parallel.pp=2")
    lines = untimed(tmp_path / "agents")
    assert all("mismatch/other_experts" not in line for line in lines)
    assert all(line["actor/other_experts"] > 0 for line in lines)
