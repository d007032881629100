"""Answers to verl's keys: each key of a plain file gets mrl's key or a reason, and the answer follows the values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from mrl.config.resolved.load import load_config, load_config_of
from mrl.errors import ConfigError, Problem

PLAIN = Path(__file__).with_name("verl_0_4.yaml").read_text()
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def problems_of(path: str, overrides: Sequence[str] = ()) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return list(caught.value.problems)


def test_every_key_of_a_plain_verl_file_is_answered(write: Callable[..., str]) -> None:
    fixes = {problem.key: problem.fix for problem in problems_of(write(PLAIN)) if problem.what == "unknown key"}
    assert len(fixes) > 170
    names = {key for key, fix in fixes.items() if fix.startswith("verl's; here it is ")}
    reasons = {key for key, fix in fixes.items() if fix.startswith("verl's; mrl has none: ")}
    assert fixes.keys() - names - reasons == set()
    assert len(names) > 90


ANSWERS = {
    "algorithm.use_kl_in_reward": "algorithm.kl.where=none",
    f"{ACTOR}.use_kl_loss": "algorithm.kl.where=none",
    f"{ACTOR}.ppo_mini_batch_size": ("batch.samples_per_update=1280, which is ppo_mini_batch_size 256 x rollout.n 5"),
    f"{ACTOR}.optim.lr_warmup_steps": "actor.schedule.warmup_steps=0",
    f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size": "actor.parallel.vpp=1",
    f"{ACTOR}.megatron.override_transformer_config.recompute_granularity": (
        "actor.megatron.recompute_granularity=selective"
    ),
    f"{ROLLOUT}.top_k": "rollout.top_k=0",
    f"{ROLLOUT}.val_kwargs.top_k": "validation.top_k=0",
    f"{ROLLOUT}.val_kwargs.temperature": "validation.temperature, which is not needed: validation.greedy=true",
    f"{ROLLOUT}.val_kwargs.do_sample": "validation.greedy=true",
    f"{ROLLOUT}.val_kwargs.n": "validation.samples_per_prompt=1",
    f"{ROLLOUT}.tensor_model_parallel_size": "rollout.tp=1",
    "critic.optim.lr": "critic.optimizer.lr=1e-05",
    "actor_rollout_ref.ref.megatron.tensor_model_parallel_size": (
        "reference.parallel.tp=2, which defaults to the actor's unless placement.roles.reference has a pool"
    ),
    "data.truncation": "data.overlong=error",
    "algorithm.kl_ctrl.target_kl": "algorithm.kl.target=null, because kl_ctrl.type is fixed",
    "trainer.test_freq": "validation.every=0",
    "trainer.save_freq": "training.save_every=0",
    "trainer.logger": "training.trackers=[wandb], in addition to the terminal and metrics.jsonl",
}


def test_answer_converts_the_value(write: Callable[..., str]) -> None:
    fixes = {problem.key: problem.fix.removeprefix("verl's; here it is ") for problem in problems_of(write(PLAIN))}
    assert {key: fixes[key] for key in ANSWERS} == ANSWERS


KL = ("algorithm.use_kl_in_reward", f"{ACTOR}.use_kl_loss")


@pytest.mark.parametrize(
    ("overrides", "answers"),
    [
        ([f"{KL[0]}=true"], dict.fromkeys(KL, "algorithm.kl.where=reward")),
        ([f"{KL[1]}=true"], dict.fromkeys(KL, "algorithm.kl.where=loss")),
        ([f"{key}=true" for key in KL], dict.fromkeys(KL, "algorithm.kl.where=both")),
        (
            [f"{KL[1]}=true", "algorithm.kl_ctrl.kl_coef=0.01"],
            {
                f"{ACTOR}.kl_loss_coef": "algorithm.kl.coef=0.001",
                "algorithm.kl_ctrl.kl_coef": (
                    "algorithm.kl.coef, but use_kl_in_reward is false: this value has no effect"
                ),
            },
        ),
        (
            ["algorithm.kl_ctrl.type=adaptive"],
            {
                "algorithm.kl_ctrl.type": "algorithm.kl.target=0.1",
                "algorithm.kl_ctrl.horizon": "algorithm.kl.horizon_samples=10000",
            },
        ),
        (
            ["algorithm.adv_estimator=grpo", "algorithm.norm_adv_by_std_in_grpo=false"],
            {
                "algorithm.adv_estimator": "algorithm.advantage=dr_grpo",
                "algorithm.norm_adv_by_std_in_grpo": "algorithm.advantage=dr_grpo",
            },
        ),
        (
            ["algorithm.adv_estimator=tir_optimal_token_baseline"],
            {"algorithm.adv_estimator": "algorithm.advantage=optimal_token_baseline"},
        ),
        ([f"{ACTOR}.optim.lr_warmup_steps=10"], {
            f"{ACTOR}.optim.lr_warmup_steps": "actor.schedule.warmup_steps=40, with 4 updates per step"
        }),
        (["data.filter_overlong_prompts=true"], {"data.truncation": "data.overlong=drop"}),
        (
            ["algorithm.adv_estimator=grpo_passk", "algorithm.norm_adv_by_std_in_grpo=false"],
            {
                "algorithm.adv_estimator": "algorithm.advantage=grpo_passk",
                "algorithm.norm_adv_by_std_in_grpo": (
                    "algorithm.advantage, but mrl's grpo_passk always divides by the standard deviation"
                ),
            },
        ),
        (
            [f"{ACTOR}.policy_loss={{loss_mode: kl_cov, kl_cov_ratio: 0.002, clip_cov_ratio: 0.1}}"],
            {
                f"{ACTOR}.policy_loss.loss_mode": "algorithm.loss.policy=kl_cov",
                f"{ACTOR}.policy_loss.kl_cov_ratio": "algorithm.loss.cov_share=0.002",
                f"{ACTOR}.policy_loss.clip_cov_ratio": (
                    "algorithm.loss.cov_share, but loss_mode is kl_cov: this value has no effect"
                ),
            },
        ),


        ([f"{ROLLOUT}.val_kwargs.do_sample=true", f"{ROLLOUT}.val_kwargs.temperature=0.6"], {
            f"{ROLLOUT}.val_kwargs.temperature": "validation.temperature=0.6"
        }),
    ],
)  # fmt: skip
def test_answer_follows_the_switches(overrides: list[str], answers: dict[str, str], write: Callable[..., str]) -> None:
    fixes = {problem.key: problem.fix for problem in problems_of(write(PLAIN), overrides)}
    assert {key: fixes[key] for key in answers} == {
        key: f"verl's; here it is {answer}" for key, answer in answers.items()
    }


def test_unknown_estimator_of_verl_is_said_to_be_unknown(valid: str, write: Callable[..., str]) -> None:
    (problem,) = problems_of(write(valid), ["algorithm.adv_estimator=of_next_year"])
    assert problem.fix.startswith(
        "verl's; here it is algorithm.advantage, which does not support of_next_year (known: gae"
    )


@pytest.mark.parametrize("value", ["{}", "null", "text", "-3", "9e99"])
def test_any_value_of_any_key_gets_an_answer(value: str, write: Callable[..., str]) -> None:
    """An override of a key with an answer may have any value."""
    keys = [problem.key for problem in problems_of(write(PLAIN)) if problem.what == "unknown key"]
    answered = problems_of(write("{}"), [f"{key}={value}" for key in keys])
    assert {problem.key for problem in answered if problem.fix.startswith("verl's; ")} >= {*keys}


def test_mini_batch_as_an_override_counts_the_samples_of_the_file(valid: str, write: Callable[..., str]) -> None:
    (problem,) = problems_of(write(valid), [f"{ACTOR}.ppo_mini_batch_size=8"])
    assert problem.fix == (
        "verl's; here it is batch.samples_per_update=32, which is ppo_mini_batch_size 8 x rollout.n 4"
    )


def test_search_r1_keys_are_answered_with_those_of_its_environment(valid: str, write: Callable[..., str]) -> None:
    answers = {
        "max_turns=4": "agent.environments.NAME.max_turns=5, the turn of the answer included",
        "do_search=true": "agent.environments.NAME.name=search_r1",
        "retriever.topk=3": "agent.environments.NAME.options.topk=3",
        "data.max_obs_length=500": "agent.environments.NAME.max_observation_tokens=500",
        f"{ROLLOUT}.n_agent=5": "batch.samples_per_prompt=5",
        f"{ACTOR}.use_kl_loss=false": "algorithm.kl.where=none, or reward if this verl has no use_kl_in_reward",
    }
    fixes = {problem.key: problem.fix for problem in problems_of(write(valid), [*answers])}
    assert fixes == {key.partition("=")[0]: f"verl's; here it is {answer}" for key, answer in answers.items()}


def test_key_that_another_verb_lacks_is_left_to_the_page(write: Callable[..., str]) -> None:
    """`mrl sft` has a section `batch`, but no samples per update."""
    text = "batch: {rows_per_update: 8}\nmodel: {path: tiny/model}\n"
    with pytest.raises(ConfigError) as caught:
        load_config_of("sft", write(text), [f"{ACTOR}.ppo_mini_batch_size=8", "trainer.nnodes=2"])
    fixes = {problem.key: problem.fix for problem in caught.value.problems}
    assert fixes["trainer.nnodes"] == "verl's; here it is cluster.nodes=2"
    assert "samples_per_update" not in fixes.get(f"{ACTOR}.ppo_mini_batch_size", "")
