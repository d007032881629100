"""The calls of a training step in order: the role, the method, its columns, and when it is called.

Workers register their methods from this table, the trainer makes its calls from it, `mrl check` uses it to prove that
each column is written before it is read, and the documentation lists it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from mrl.config.algorithm import BASELINE_ADVANTAGES, CHOOSING_LOSSES, NORM_ADVANTAGES, REFERENCE_ADVANTAGES
from mrl.config.arithmetic import has_reference, needs_old_log_probs, updates_per_step
from mrl.config.schema import Config

Columns = tuple[str, ...]
SAMPLE_COLUMNS: Columns = ("prompts", "responses", "rollout_log_probs", "scores")
OPTIONAL_SAMPLE_COLUMNS: Columns = ("baseline_scores", "response_mask", "staleness", "sampling_mask", "routes")


@dataclass(frozen=True)
class StepCall:
    """A method of a role's workers that a step calls."""

    role: Literal["actor", "critic", "reference", "reward_model", "teacher"]
    method: str
    when: str
    """Description of `is_made`."""
    is_made: Callable[[Config], bool]
    reads: Columns = ("prompts", "responses")
    writes: Columns = ()
    optional: Columns = ()
    """Columns that it reads if they exist."""
    needs: Callable[[Config], Columns] = lambda config: ()
    """Optional columns that the configuration makes necessary."""


def _charges_kl(config: Config, where: str) -> bool:
    return config.algorithm.kl.where in (where, "both")


def _needed_for_advantages(config: Config) -> Columns:
    estimator: dict[str, Columns] = {"gae": ("values",)}
    estimator |= dict.fromkeys(BASELINE_ADVANTAGES, ("baseline_scores",))
    estimator |= dict.fromkeys(REFERENCE_ADVANTAGES, ("old_log_probs", "ref_log_probs"))
    estimator |= dict.fromkeys(NORM_ADVANTAGES, ("score_norms",))
    kl = ("old_log_probs", "ref_log_probs") if _charges_kl(config, "reward") else ()
    return estimator.get(config.algorithm.advantage, ()) + kl


def _reads_norms(config: Config) -> bool:
    return config.algorithm.advantage in NORM_ADVANTAGES


def _routes(config: Config) -> Columns:
    return ("routes",) if config.algorithm.router_replay != "none" else ()


def _mask(config: Config) -> Columns:
    return ("sampling_mask",) if config.algorithm.keep_sampling_mask else ()


def _needed_by_actor(config: Config) -> Columns:
    algorithm = config.algorithm
    is_chosen, of_trainer = algorithm.loss.policy in CHOOSING_LOSSES, algorithm.old_log_probs == "trainer"
    reads_engines = algorithm.correction is not None or algorithm.loss.policy == "m2po"
    needed = {
        "old_log_probs": of_trainer and (updates_per_step(config.batch) > 1 or is_chosen),
        "ref_log_probs": _charges_kl(config, "loss"),
        "rollout_log_probs": reads_engines or not of_trainer,
        "staleness": algorithm.old_log_probs == "interpolated",
    }
    own = tuple(name for name, is_needed in needed.items() if is_needed)
    return own + _taught(config) + _mask(config) + _routes(config)


TEACHER_COLUMNS: Columns = ("teacher_log_probs", "teacher_top_ids", "teacher_top_log_probs", "teacher_hidden")
TEACHER_SPANS = "teacher_spans"
"""Column that the trainer writes if a teacher has another tokenizer than the policy."""


def _taught(config: Config) -> Columns:
    """Return the columns that the form of distillation needs."""
    of_sampled, *rest = TEACHER_COLUMNS
    more: dict[str, Columns] = {"top_k": tuple(rest[:2]), "full": tuple(rest[2:])}
    distillation = config.algorithm.distillation
    return () if distillation is None else (of_sampled, *more.get(distillation.form, ()))


_ADVANTAGES_READ: Columns = ("responses", "scores", "position")
_ADVANTAGES_OPTIONAL: Columns = (
    *("response_mask", "values", "old_log_probs", "ref_log_probs", "baseline_scores"),
    "score_norms",
)

RM_SCORE = StepCall(
    role="reward_model",
    method="compute_rm_score",
    when="there is a reward model; after each generation, outside the order of the other calls",
    is_made=lambda config: bool(config.scoring_models()),
    writes=("rm_scores",),
)
TEACHER_LOG_PROB = StepCall(
    role="teacher",
    method="compute_teacher_log_prob",
    when="`algorithm.distillation.form` is `advantage` or `sampled`; the actor, if it is its own teacher",
    is_made=lambda config: len(_taught(config)) == 1,
    writes=TEACHER_COLUMNS[:1],
)
TEACHER_TOP_K = StepCall(
    role="teacher",
    method="compute_teacher_top_k",
    when="`algorithm.distillation.form` is `top_k`; the actor, if it is its own teacher",
    is_made=lambda config: "teacher_top_ids" in _taught(config),
    writes=TEACHER_COLUMNS[:3],
)
TEACHER_HIDDEN = StepCall(
    role="teacher",
    method="compute_teacher_hidden",
    when="`algorithm.distillation.form` is `full`",
    is_made=lambda config: "teacher_hidden" in _taught(config),
    writes=("teacher_log_probs", "teacher_hidden"),
)
LOG_PROB = StepCall(
    role="actor",
    method="compute_log_prob",
    when="`algorithm.old_log_probs` is `trainer`, and there are several updates a step, a KL in the reward, a "
    "correction, `online_dpo`, or the loss `clip_cov`, `kl_cov` or `m2po`",
    is_made=lambda config: (
        needs_old_log_probs(config) and config.algorithm.router_replay != "R2" and not _reads_norms(config)
    ),
    writes=("old_log_probs",),
    optional=("response_mask", "rollout_log_probs", "staleness", "sampling_mask", "routes"),
    needs=lambda config: _mask(config) + _routes(config),
)
LOG_PROB_WITH_NORMS = StepCall(
    role="actor",
    method="compute_log_prob_with_norms",
    when="`algorithm.advantage` is `optimal_token_baseline`",
    is_made=_reads_norms,
    writes=("old_log_probs", "score_norms"),
    optional=LOG_PROB.optional,
    needs=lambda config: _routes(config) + (("rollout_log_probs",) if config.algorithm.correction is not None else ()),
)
LOG_PROB_WITH_ROUTES = StepCall(
    role="actor",
    method="compute_log_prob_with_routes",
    when="`algorithm.router_replay` is `R2`",
    is_made=lambda config: config.algorithm.router_replay == "R2",
    writes=("old_log_probs", "routes"),
    optional=LOG_PROB.optional[:-1],
    needs=_mask,
)
OLD_LOG_PROBS = (LOG_PROB, LOG_PROB_WITH_NORMS, LOG_PROB_WITH_ROUTES)
"""Of these, a step makes at most one."""
REF_LOG_PROB = StepCall(
    role="actor",
    method="compute_ref_log_prob",
    when="`algorithm.kl.where` is not `none`, or `online_dpo`; and the reference is the actor's frozen copy",
    is_made=has_reference,
    writes=("ref_log_probs",),
    optional=("sampling_mask",),
    needs=_mask,
)
REFERENCE_LOG_PROB = StepCall(
    role="reference",
    method="compute_ref_log_prob",
    when="`algorithm.kl.where` is not `none`, or `online_dpo`; and the reference has a pool",
    is_made=lambda config: config.reference is not None,
    writes=("ref_log_probs",),
    optional=("sampling_mask",),
    needs=_mask,
)
VALUES = StepCall(
    role="critic",
    method="compute_values",
    when="there is a critic",
    is_made=lambda config: config.critic is not None,
    writes=("values",),
)
CRITIC_ADVANTAGES = StepCall(
    role="critic",
    method="compute_advantages",
    when="there is a critic, whose values are on its ranks",
    is_made=lambda config: config.critic is not None,
    reads=_ADVANTAGES_READ,
    writes=("advantages", "returns"),
    optional=_ADVANTAGES_OPTIONAL,
    needs=_needed_for_advantages,
)
ACTOR_ADVANTAGES = StepCall(
    role="actor",
    method="compute_advantages",
    when="there is no critic",
    is_made=lambda config: config.critic is None,
    reads=_ADVANTAGES_READ,
    writes=("advantages",),
    optional=_ADVANTAGES_OPTIONAL,
    needs=_needed_for_advantages,
)
UPDATE_CRITIC = StepCall(
    role="critic",
    method="update_critic",
    when="there is a critic; once per update",
    is_made=lambda config: config.critic is not None,
    reads=("prompts", "responses", "values", "returns"),
    optional=("response_mask",),
)
UPDATE_ACTOR = StepCall(
    role="actor",
    method="update_actor",
    when="always, after `training.critic_warmup_steps`; once per update",
    is_made=lambda config: True,
    reads=("prompts", "responses", "advantages"),
    optional=(
        *("response_mask", "old_log_probs", "ref_log_probs", "rollout_log_probs", "staleness"),
        *(*TEACHER_COLUMNS, TEACHER_SPANS, "sampling_mask", "routes"),
    ),
    needs=_needed_by_actor,
)
STEP = (
    RM_SCORE,
    TEACHER_LOG_PROB,
    TEACHER_TOP_K,
    TEACHER_HIDDEN,
    *OLD_LOG_PROBS,
    REF_LOG_PROB,
    REFERENCE_LOG_PROB,
    VALUES,
    CRITIC_ADVANTAGES,
    ACTOR_ADVANTAGES,
    UPDATE_CRITIC,
    UPDATE_ACTOR,
)


def step_calls(config: Config) -> tuple[StepCall, ...]:
    """Return the calls that a step of this configuration makes."""
    return tuple(call for call in STEP if call.is_made(config))
