"""Rules of a teacher, and of what is learned from it."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.arithmetic import updates_per_step
from mrl.config.rules import problem
from mrl.config.schema import Config
from mrl.errors import Problem

KEY = "algorithm.distillation"
_COMPARING = ("grpo", "dr_grpo", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline")


def check_distillation_rules(config: Config) -> Iterator[Problem]:
    """Yield every problem between a teacher, the form of distillation, and how samples are drawn and used."""
    distillation, rollout = config.algorithm.distillation, config.rollout
    if distillation is None:
        if config.teacher is not None:
            yield problem("teacher", "nothing is learned from it", f"{KEY}.form=top_k, or teacher=null")
        return
    if config.teacher is None:
        yield problem(KEY, "there is no teacher section", f"add one, or {KEY}=null")
    if distillation.form in ("advantage", "sampled") and (rollout.top_p < 1 or rollout.top_k):
        what = f"{distillation.form} is a mean over the policy's own tokens; top_p and top_k draw from others"
        yield problem(f"{KEY}.form", what, f"{KEY}.form=top_k, or rollout.top_p=1 and rollout.top_k=0")
    if config.batch.samples_per_prompt == 1 and (advantage := config.algorithm.advantage) in _COMPARING:
        what = f"{advantage} compares the samples of a prompt, and there is one"
        fix = "algorithm.advantage=reinforce_plus_plus, or batch.samples_per_prompt=8"
        yield problem("algorithm.advantage", what, fix)
    if distillation.form == "sampled":
        yield from _sampled(config, distillation.estimator)
    if not _scores(config):
        for key, is_set, fix in (
            ("algorithm.dynamic_sampling", config.algorithm.dynamic_sampling is not None, "null"),
            ("data.sampler", config.data.sampler == "difficulty", "shares"),
        ):
            if is_set:
                yield problem(key, "goes by scores, and the teacher alone says what is learned", f"{key}={fix}")


def _sampled(config: Config, estimator: str) -> Iterator[Problem]:
    """Yield why an estimate on sampled tokens would not be one."""
    if estimator in ("k1", "kl"):
        what = f"as a loss {estimator} exerts no force on average"
        yield problem(f"{KEY}.estimator", what, f"{KEY}.estimator=k2, or {KEY}.form=advantage")
    if (updates := updates_per_step(config.batch)) > 1:
        what = f"of {updates} updates a step, all but the first meet tokens that another policy drew"
        yield problem(f"{KEY}.form", what, f"{KEY}.form=advantage, which is clipped, or one update a step")


def _scores(config: Config) -> bool:
    return bool(config.reward.functions or config.reward_model or config.agent.environments)
