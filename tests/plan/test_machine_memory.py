"""A machine of CPU slots: how processes share its memory, and the report if a run does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mrl.config.resolved.load import load_config
from mrl.config.schema import Config
from mrl.plan.assumptions import ASSUMPTIONS
from mrl.plan.machine_memory import MachinePlan, Processes, machine_plan_input, plan_machine
from mrl.preflight.findings import check_machine
from mrl.preflight.node_facts import memory_bytes, usable_memory_bytes

CONFIGS = Path(__file__).parents[2] / "configs"
GIB = 1 << 30
MODEL = {"model_type": "llama", "num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9,
         "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True,
         "rms_norm_eps": 1e-5, "rope_theta": 1e5, "max_position_embeddings": 2048, "hidden_act": "silu"}  # fmt: skip
NUM_PARAMETERS = 134_515_008
THREE_RANKS = (
    "cluster.devices_per_node=3", "placement.pools={laptop: 3}", "actor.parallel.tp=3", "actor.dtype=float32",
    "actor.max_tokens_per_device=2048", "rollout.tp=1", "rollout.max_response_tokens=96", "batch.samples_per_update=32",
)  # fmt: skip
Make = Callable[..., Config]


@pytest.fixture
def config_of(tmp_path: Path) -> Make:
    """Three ranks of a model of 135 million parameters, and an engine for each, with other values."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))

    def make(*overrides: str) -> Config:
        words = [f"model.path={tmp_path}", *THREE_RANKS, *overrides]
        return load_config(str(CONFIGS / "laptop-grpo.yaml"), words).config

    return make


def plan(config: Config) -> MachinePlan:
    return plan_machine(machine_plan_input(config, 24 * GIB))


def processes(config: Config, name: str) -> Processes:
    return next(each for each in plan(config).processes if each.name == name)


@pytest.mark.parametrize(
    ("overrides", "copies"),
    [
        ((), 8),  # parameters, gradients, two moments; on the host parameters and moments, and the reference
        (("sync.offload=false",), 5),
        (("sync.offload=false", "algorithm.kl.where=none"), 4),
    ],
)
def test_a_rank_has_its_share_of_the_model_so_many_times(
    config_of: Make, overrides: tuple[str, ...], copies: int
) -> None:
    actor = processes(config_of(*overrides), "actor")
    assert actor.count == 3
    held = actor.held - ASSUMPTIONS.cpu_rank_bytes
    assert held == pytest.approx(copies * 4 * NUM_PARAMETERS / 3, rel=1e-3)


def test_work_is_what_backward_keeps_and_grows_with_the_micro_batch(config_of: Make) -> None:
    large, small = (
        processes(config_of(f"actor.max_tokens_per_device={tokens}"), "actor").work for tokens in (2048, 1024)
    )
    assert large == pytest.approx(1.556e9, rel=0.01)
    assert 0.5 * large < small < 0.6 * large  # the head's share does not shrink


def test_no_more_work_is_counted_than_an_update_has_tokens(config_of: Make) -> None:
    whole = processes(config_of("actor.max_tokens_per_device=11264"), "actor").work  # 32 samples of 352 tokens
    assert processes(config_of("actor.max_tokens_per_device=100000"), "actor").work == whole


def test_an_engine_has_weights_a_cache_and_a_process_for_each_rank(
    config_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    alone, split = config_of(), config_of("rollout.tp=3")
    held = 4 * NUM_PARAMETERS + 1_000_000_000
    assert processes(alone, "engines").count == 3
    assert processes(alone, "engines").held - ASSUMPTIONS.cpu_engine_bytes == pytest.approx(held, rel=1e-3)
    assert processes(split, "engines").count == 1
    held += 2_000_000_000 + 4 * ASSUMPTIONS.cpu_engine_bytes
    assert processes(split, "engines").held == pytest.approx(held, rel=1e-3)
    assert processes(config_of("rollout.engine=transformers"), "engines").held == pytest.approx(
        4 * NUM_PARAMETERS + ASSUMPTIONS.cpu_engine_bytes, rel=1e-3
    )
    before = processes(alone, "engines").held
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    assert processes(alone, "engines").held == before - 1_000_000_000 + 2 * GIB


def test_roles_hold_what_they_have_together_and_work_in_turns(config_of: Make) -> None:
    critic = "{parallel: {tp: 3}, dtype: float32, max_tokens_per_device: 1024}"
    both = ("algorithm.advantage=gae", f"critic={critic}", "placement.roles.critic=laptop")
    alone, together = plan(config_of()), plan(config_of(*both))
    other = processes(config_of(*both), "critic")
    assert together.fullest == alone.fullest == "actor"
    assert together.min_bytes - alone.min_bytes == 3 * other.held
    assert other.held < processes(config_of(), "actor").held, "a critic has no reference"


def test_several_machines_share(config_of: Make) -> None:
    two_ranks = ("placement.pools={laptop: 2}", "actor.parallel.tp=1")
    one = plan(config_of(*two_ranks))
    for nodes in (2, 3):  # a third node has no device of the run
        several = (f"cluster.nodes={nodes}", "cluster.devices_per_node=1", "cluster.ray_address=auto")
        assert plan(config_of(*two_ranks, *several)).min_bytes == one.min_bytes // 2


def test_too_much_is_refused_perhaps_too_much_is_warned_of_and_the_change_that_is_named_does(config_of: Make) -> None:
    found = plan(config_of())
    for usable, taken, verdict in (
        (found.min_bytes - 1, 0, "fail"),
        (found.min_bytes, 0, "warn"),
        (found.max_bytes - 1, 0, "warn"),
        (found.max_bytes, 0, "ok"),
        (found.max_bytes, 1, "warn"),
    ):
        said = check_machine(config_of(), usable, taken)
        assert said.verdict == verdict
        assert "highest in the phase of the actor" in said.what
        if verdict != "ok":
            assert "actor 3 x 1.6 GiB (at work " in said.what
            assert check_machine(config_of(*said.fix.split()), usable, taken).verdict == "ok", said.fix


def test_an_engine_that_takes_all_it_can_get_is_refused(config_of: Make) -> None:
    said = check_machine(config_of("rollout.vllm.kv_cache_memory_bytes=null"), 22 * GIB, GIB)
    assert said.verdict == "fail"
    assert said.fix.startswith("rollout.vllm.kv_cache_memory_bytes=")


def test_what_no_change_mends_is_said(config_of: Make) -> None:
    said = check_machine(config_of(), GIB, 0)
    assert (said.verdict, said.fix) == ("fail", "a smaller model, a larger machine, or fewer other programs")


def test_usable_is_what_rays_monitor_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_memory_usage_threshold", raising=False)
    monkeypatch.delenv("RAY_memory_monitor_refresh_ms", raising=False)
    assert usable_memory_bytes() == int(0.95 * memory_bytes())
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.5")
    assert usable_memory_bytes() == memory_bytes() // 2
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "0")
    assert usable_memory_bytes() == memory_bytes()
