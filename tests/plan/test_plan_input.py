"""Variations of a configuration: what they leave alone, which are refused, and how they are typed."""

from __future__ import annotations

import json

from mrl.config.resolved.load import load_config
from mrl.plan.memory import plan_memory
from mrl.plan.plan_input import make_plan_input, not_modeled
from mrl.plan.search import advise
from tests.plan.planning import CONFIGS, subject_of

PRESET = "grpo-qwen3-32b-4n8g"


def test_a_variation_leaves_the_rest_and_the_original_alone() -> None:
    subject = subject_of(PRESET)
    before = subject.config
    varied = subject.with_changes_unchecked(
        {"actor.parallel.tp": 2, "rollout.vllm.max_num_seqs": 7, "cluster.nodes": 9}
    )
    assert (varied.config.actor.parallel.tp, varied.config.rollout.vllm["max_num_seqs"]) == (2, 7)
    assert varied.config.cluster.nodes == 9
    assert subject.config is before
    assert before.rollout.vllm.get("max_num_seqs") != 7
    assert varied.config.algorithm == before.algorithm
    assert (
        varied.with_changes_unchecked({"cluster.nodes": before.cluster.nodes}).config.actor.parallel.pp
        == before.actor.parallel.pp
    )


def test_a_variation_that_a_rule_or_the_model_is_against_is_none() -> None:
    subject = subject_of(PRESET)
    assert subject.with_changes({}) is not None
    assert subject.with_changes({"batch.samples_per_update": 7}) is None, "a rule"
    assert subject.with_changes({"actor.parallel.pp": 3}) is None, "64 layers"
    assert subject.with_changes({"rollout.tp": 3}) is None, "64 heads"


def test_changes_are_typed_without_those_that_change_nothing() -> None:
    subject = subject_of(PRESET)
    same = {"cluster.nodes": subject.config.cluster.nodes, "placement.pools": dict(subject.config.placement.pools)}
    assert subject.overrides(same) == ""
    changes = {
        **same,
        "rollout.replicas": 3,
        "actor.parallel.sequence_parallel": not subject.config.actor.parallel.sequence_parallel,
        "actor.megatron.recompute_granularity": None,
        "placement.pools": {"train": 16, "engines": 16},
    }
    said = subject.overrides(changes)
    flag = str(not subject.config.actor.parallel.sequence_parallel).lower()
    assert said == (
        '"placement.pools={all: null, train: 16, engines: 16}" '
        f"rollout.replicas=3 actor.parallel.sequence_parallel={flag} actor.megatron.recompute_granularity=null"
    )


def test_settings_that_are_not_counted_are_named() -> None:
    overrides = ["rollout.vllm={kv_cache_dtype: fp8_ds_mla, quantization: mxfp4}", "algorithm.correction={}"]
    config = load_config(str(CONFIGS / f"{PRESET}.yaml"), overrides)
    subject = make_plan_input(config, "h100")
    assert list(not_modeled(subject.config)) == ["rollout.vllm.quantization", "rollout.vllm.kv_cache_dtype"]
    fp8 = {"rollout__vllm__kv_cache_dtype": "fp8", "rollout__vllm__quantization": "fp8_per_block"}
    counted = subject_of(PRESET, algorithm__correction="{}", **fp8)
    for known in (subject_of(PRESET), counted):
        assert list(not_modeled(known.config)) == []


def test_advice_is_the_first_step_of_its_kind_that_fits_and_no_more_kinds_than_needed() -> None:
    subject = subject_of(PRESET, rollout__vllm__gpu_memory_utilization=0.99)
    found = advise(subject)
    ((lower, plan),) = (one for one in found if "rollout.vllm.gpu_memory_utilization" in one[0])
    share = lower["rollout.vllm.gpu_memory_utilization"]
    above = subject.with_changes_unchecked({"rollout.vllm.gpu_memory_utilization": round(share + 0.05, 2)})
    assert plan_memory(above).shortages, "a smaller step would not do"
    assert plan == plan_memory(subject.with_changes_unchecked(lower))
    assert len(advise(subject, max_found=1)) == 1


def test_a_reward_model_with_a_name_of_its_own_is_planned_on_gpus() -> None:
    """A role with a dot is no attribute of the configuration."""
    added = {"path": "meta-llama/Llama-3.1-8B", "max_tokens_per_device": 16384, "parallel": {"tp": 2}}
    planned = make_plan_input(
        load_config(
            str(CONFIGS / "ppo-llama3.1-8b-1n8g.yaml"),
            [f"reward_models.help={json.dumps(added)}", 'placement.roles={"reward_models.help": "all"}'],
        ),
        None,
    )
    assert planned.config.reward_models["help"].megatron, "the kernels that Transformer Engine fuses"
    roles = {item.role for phase in plan_memory(planned).phases for item in phase.items}
    assert "reward_models.help" in roles
