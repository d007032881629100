"""The calls of a step, and the columns that they need."""

from __future__ import annotations

import pytest

from mrl.config import step_calls
from mrl.config.resolved.load import load_config
from mrl.config.schema import Config
from mrl.preflight.findings import column_problems

KL_COLUMNS = {"old_log_probs", "ref_log_probs"}


def config_of(*overrides: str) -> Config:
    return load_config("configs/laptop-ppo.yaml", overrides).config


@pytest.mark.parametrize(
    ("where", "by_advantages", "by_actor"),
    [
        ("none", set(), set()),
        ("reward", KL_COLUMNS, set()),
        ("loss", set(), {"ref_log_probs"}),
        ("both", KL_COLUMNS, {"ref_log_probs"}),
    ],
)
def test_the_kl_is_charged_where_it_is_wanted(where: str, by_advantages: set[str], by_actor: set[str]) -> None:
    config = config_of(f"algorithm.kl.where={where}")
    made = step_calls.step_calls(config)
    assert (step_calls.REF_LOG_PROB in made) == (where != "none")
    if where != "none":
        apart = step_calls.step_calls(
            config_of(f"algorithm.kl.where={where}", "placement={pools: {laptop: 2, r: 2}, roles: {reference: r}}")
        )
        assert step_calls.REFERENCE_LOG_PROB in apart
        assert step_calls.REF_LOG_PROB not in apart
    assert {*step_calls.CRITIC_ADVANTAGES.needs(config)} == by_advantages | {"values"}
    assert {*step_calls.UPDATE_ACTOR.needs(config)} - {"old_log_probs"} == by_actor


@pytest.mark.parametrize(
    ("source", "read"),
    [
        ("trainer", {"old_log_probs", "rollout_log_probs"}),
        ("engine", {"rollout_log_probs"}),
        ("interpolated", {"rollout_log_probs", "staleness"}),
    ],
)
def test_old_log_probs_come_from_where_they_are_wanted(source: str, read: set[str]) -> None:
    correction = "null" if source == "engine" else "{}"
    config = config_of(
        *("algorithm.kl.where=none", "asynchrony.ahead=1", "batch.samples_per_update=16"),
        *(f"algorithm.old_log_probs={source}", f"algorithm.correction={correction}"),
        "placement={pools: {laptop: 2, engines: 2}, roles: {rollout: engines}}",
    )
    assert (step_calls.LOG_PROB in step_calls.step_calls(config)) == (source == "trainer")
    assert {*step_calls.UPDATE_ACTOR.needs(config)} == read


def test_online_dpo_compares_with_the_reference_without_any_kl() -> None:
    ours = ["algorithm={advantage: online_dpo, kl: {where: none}, loss: {policy: gpg, aggregation: token-sum}}"]
    ours += ["batch={prompts_per_step: 8, samples_per_prompt: 2, samples_per_update: 16}"]
    config = load_config("configs/laptop-grpo.yaml", ours).config
    made = step_calls.step_calls(config)
    assert {step_calls.LOG_PROB, step_calls.REF_LOG_PROB} < {*made}
    assert {*step_calls.ACTOR_ADVANTAGES.needs(config)} == KL_COLUMNS
    assert not step_calls.UPDATE_ACTOR.needs(config)
    apart = ["placement={pools: {laptop: 2, r: 2}, roles: {reference: r}}", "cluster.devices_per_node=4"]
    made = step_calls.step_calls(load_config("configs/laptop-grpo.yaml", [*ours, *apart]).config)
    assert step_calls.REFERENCE_LOG_PROB in made
    assert step_calls.REF_LOG_PROB not in made


def test_a_token_baseline_reads_the_norms_of_scores_and_what_corrects_them() -> None:
    ours = ["algorithm={advantage: optimal_token_baseline, kl: {where: none}}"]
    config = load_config("configs/laptop-grpo.yaml", ours).config
    made = {*step_calls.step_calls(config)}
    assert made & {*step_calls.OLD_LOG_PROBS} == {step_calls.LOG_PROB_WITH_NORMS}
    assert {*step_calls.ACTOR_ADVANTAGES.needs(config)} == {"score_norms"}
    config = load_config("configs/laptop-grpo.yaml", [*ours, "algorithm.correction.level=token"]).config
    assert {*step_calls.ACTOR_ADVANTAGES.needs(config)} == {"score_norms"}
    assert {*step_calls.LOG_PROB_WITH_NORMS.needs(config)} == {"rollout_log_probs"}


def test_masks_are_read_by_all_that_score_the_policy_and_its_reference() -> None:
    config = config_of("algorithm.keep_sampling_mask=true", "rollout.top_k=20")
    for call in (step_calls.LOG_PROB, step_calls.LOG_PROB_WITH_ROUTES, step_calls.UPDATE_ACTOR):
        assert "sampling_mask" in call.needs(config)
        assert "sampling_mask" not in call.needs(config_of())
    for of_reference in (step_calls.REF_LOG_PROB, step_calls.REFERENCE_LOG_PROB):
        assert of_reference.needs(config) == ("sampling_mask",)
    assert not column_problems(config)
    assert "sampling_mask" not in step_calls.UPDATE_CRITIC.optional


def test_a_policy_may_learn_from_itself_alone() -> None:
    own = "algorithm={kl: {where: none}, distillation: {form: top_k, context: 'Answer {prompt}'}}"
    config = load_config("configs/laptop-grpo.yaml", [own, "reward.functions.answer=null"]).config
    assert not config.reward.functions
    assert step_calls.TEACHER_TOP_K in step_calls.step_calls(config)
