"""Whole runs with SGLang's engines: the figures of vLLM, a batch ahead, and conversations."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.demo.model import make_model
from mrl.observe.metrics import read_metrics
from tests.agents.test_segments_run import SAME, SAMPLES, trained
from tests.rollout.test_engine_conformance import SGLANG
from tests.trainer.test_fsdp_run import MISMATCH, assert_same, train
from tests.trainer.test_ppo import CONFIG

pytestmark = [*SGLANG]
GRPO = (
    *("algorithm={advantage: grpo, kl: {where: loss}}", "placement.roles.critic=null", "critic=null"),
    *("rollout.temperature=0.9", "sync.probe_every=1", "actor.optimizer.lr=1e-2"),
)
ENGINE = ("rollout.engine=sglang", "rollout.vllm={enforce_eager: null, kv_cache_memory_bytes: null}")
CARRIED = ("algorithm.correction={level: token}", "asynchrony={ahead: 1, weights: in_flight}")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sglang")
    path = directory / "run.yaml"
    path.write_text(CONFIG.format(directory=directory / "runs", model=make_model(directory / "model", seed=1)))
    return path


def test_grpo_has_the_figures_of_vllm(config: Path) -> None:
    """Engines take turns with the trainer: each step wakes them, sends weights and lets them sleep."""
    expected = train(config, "vllm", *GRPO)
    found = train(config, "sglang", *GRPO, *ENGINE)
    assert_same(found, expected)
    assert max(line[MISMATCH] for line in found if MISMATCH in line) < 2e-5


@pytest.mark.on_demand
def test_a_batch_ahead_continues_with_newer_weights(config: Path) -> None:
    lines = train(config, "carried", *GRPO, *ENGINE, *CARRIED, "rollout.max_response_tokens=40")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert {line["async/staleness/max"] for line in lines} == {0, 1}
    fresh = [line for line in lines if line["async/staleness/max"] == 0]
    assert max(line[MISMATCH] for line in fresh) < 2e-5


@pytest.mark.on_demand
def test_conversations_of_several_turns(tmp_path: Path) -> None:
    run = trained(tmp_path, '{name: "tests.agents.worlds:NewContext", max_turns: 2}', *ENGINE)
    lines = read_metrics(run / "metrics.jsonl")
    assert [(line["batch/samples"], line["agent/segments/mean"]) for line in lines] == [(SAMPLES, 2.0)] * 2
    assert all(line["mismatch/log_prob_abs_diff_mean"] <= SAME for line in lines)
