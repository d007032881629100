"""The model of time: which term moves with which setting, and how far it is from published runs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks import plan as published
from mrl.plan.engine_memory import engine_memory
from mrl.plan.timing import Lengths, TimedPhase, TimePlan, assumed_lengths, decode_step, engine_link_s, plan_time
from tests.plan.planning import PRESETS, REWARD_MODEL, subject_of

LENGTHS = Lengths(prompt=512, response=2048)
DENSE, EXPERTS = "grpo-qwen3-32b-4n8g", "grpo-qwen3-30b-a3b-2n8g"
NO_FULL = {"recompute_method": "null", "recompute_num_layers": "null"}


def phase(plan: TimePlan, name: str) -> TimedPhase:
    (found,) = (phase for phase in plan.phases if phase.name == name)
    return found


def timed(preset: str = DENSE, lengths: Lengths = LENGTHS, **changes: object) -> TimePlan:
    chunks = {"actor__parallel__vpp": 1} if preset == DENSE else {}
    return plan_time(subject_of(preset, **chunks | changes), lengths)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_step_is_the_sum_of_its_phases(preset: str) -> None:
    subject = subject_of(preset)
    plan = plan_time(subject, assumed_lengths(subject.config))
    assert plan.seconds == pytest.approx(sum(sum(phase.parts.values()) for phase in plan.phases))
    assert all(seconds >= 0 for phase in plan.phases for seconds in phase.parts.values())
    samples = subject.config.batch.prompts_per_step * subject.config.batch.samples_per_prompt
    tokens = samples * assumed_lengths(subject.config).whole
    assert plan.tokens_per_device_and_s * plan.seconds * plan.num_devices == pytest.approx(tokens)


def test_training_is_three_forward_passes_and_a_fourth_that_recomputes() -> None:
    def passes(preset: str, **megatron: object) -> float:
        plan = timed(preset, **{f"actor__megatron__{name}": value for name, value in megatron.items()})
        forward, train = (phase(plan, name).parts["matrix products"] for name in ("reference", "train actor"))
        return train / forward

    assert passes(DENSE, recompute_granularity="null") == pytest.approx(3)
    assert passes(DENSE, recompute_granularity="full", recompute_modules="null") == pytest.approx(4)
    # Qwen3-32B: hidden 5120, MLP 25600, 64 heads and 8 for keys of 128, 64 layers, a vocabulary of 151936.
    mlp, attention = 3 * 5120 * 25600, 5120 * 128 * (64 + 2 * 8 + 64)
    share = 64 * mlp / (64 * (mlp + attention) + 151936 * 5120)
    selective = {"recompute_granularity": "selective"}
    assert passes(DENSE, **selective, recompute_modules="[mlp]") == pytest.approx(3 + share)
    assert passes(EXPERTS, **selective, recompute_modules="[moe_act]", **NO_FULL) == pytest.approx(3)
    assert passes(EXPERTS, **selective, recompute_modules="[moe]", **NO_FULL) > 3.5


def test_the_bubble_shrinks_with_chunks_and_micro_batches() -> None:
    def bubble(**changes: object) -> float:
        at = {"actor__parallel__tp": 4, "actor__parallel__pp": 4, "actor__parallel__sequence_parallel": "true"}
        parts = phase(timed(**at | changes), "train actor").parts
        return parts["pipeline bubble"] / sum(parts[name] for name in ("matrix products", "launches", "links"))

    per_update = -(-1024 * 2560 // 2 // 16384)
    assert bubble() == pytest.approx(3 / per_update)
    assert bubble(actor__parallel__vpp=2) == pytest.approx(3 / per_update / 2)
    assert bubble(actor__max_tokens_per_device=8192) == pytest.approx(3 / (2 * per_update))
    assert phase(timed(actor__parallel__pp=1), "train actor").parts["pipeline bubble"] == 0


def test_what_need_not_be_computed_takes_no_time() -> None:
    names = [each.name for each in timed(algorithm__kl__where="none", batch__samples_per_update=2048).phases]
    assert names == ["weights", "rollout", "train actor"]


def test_an_engine_over_two_machines_adds_up_through_all_their_network_cards() -> None:
    large, layers, hidden = "grpo-llama3.1-405b-18n8g", 126, 16384
    of_two, of_one = (subject_of(large, rollout__tp=tp) for tp in (16, 8))
    sums = 2 * layers * 2 * 2 * hidden * 15 / 16  # two sums per layer, each sent twice in bfloat16
    assert engine_link_s(of_two) == pytest.approx(sums / (8 * 50e9 * 0.7))
    assert engine_link_s(of_one) == 0
    slow = timed(large, rollout__tp=16)
    fast = timed(large, rollout__tp=16, cluster__devices_per_node=16, cluster__nodes=9)
    prefill = [phase(plan, "rollout").parts["prefill"] for plan in (slow, fast)]
    prompts = 512 * 256 / 8  # each of an engine's prompts is read once for its samples
    assert prefill[0] - prefill[1] == pytest.approx(prompts * engine_link_s(of_two))
    engine = engine_memory(of_two.config, of_two.specs["actor"], of_two.hardware)
    at_once = replace(of_two.hardware, network_bytes_per_s=math.inf, link_bytes_per_s=math.inf)
    steps = [decode_step(subject, engine)(100, 2048) for subject in (of_two, replace(of_two, hardware=at_once))]
    assert steps[0] - steps[1] == pytest.approx(100 * engine_link_s(of_two))


def test_a_reward_model_goes_forward_once() -> None:
    plan = timed("ppo-llama3.1-8b-1n8g", **REWARD_MODEL)
    scoring, values = phase(plan, "reward model"), phase(plan, "values")
    assert scoring.parts["matrix products"] == values.parts["matrix products"], "the same model on the same devices"
    assert "train reward_model" not in {phase.name for phase in plan.phases}


def test_published_runs_are_predicted_as_well_as_the_benchmark_says() -> None:
    errors = [abs(line["error"]) for line in published.predictions()]
    assert len(errors) == 9
    assert sum(error <= published.TOLERANCE for error in errors) >= published.MIN_WITHIN
