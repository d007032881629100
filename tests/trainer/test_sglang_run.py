"""Whole runs with SGLang's engines: the same figures as with vLLM, and weights in flight."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.demo.model import make_model
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
def test_samples_carried_over_an_update_have_the_versions_of_their_tokens(config: Path) -> None:
    lines = train(config, "carried", *GRPO, *ENGINE, *CARRIED, "rollout.max_response_tokens=40")
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert max(line["async/staleness/max"] for line in lines[1:]) <= 1
