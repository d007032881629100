"""The algorithms on one page, under the name that verl gave it: what the trainer and the engine import from here."""

from __future__ import annotations

from mrl.algos.advantages import ADVANTAGES, AdvantageInputs, Advantages, AdvantageSettings, estimate_advantages
from mrl.algos.aggregate import AGGREGATIONS, BatchTotals, LossNormalizer
from mrl.algos.dynamic_sampling import GroupFilter, filter_groups
from mrl.algos.groups import Outcomes, PromptGroups, scores_of
from mrl.algos.kl import KL_ESTIMATORS, AdaptiveKLController, FixedKLController, KLController, mean_row_kl, token_kl
from mrl.algos.objectives import ActorColumns, ActorSettings, Objective, actor_objective, critic_objective
from mrl.algos.policy_losses import POLICY_LOSSES, PolicySettings, PolicyTokens
from mrl.algos.rollout_correction import (
    RATIO_LEVELS,
    CorrectionSettings,
    RolloutPair,
    correction_metrics,
    correction_weights,
    mismatch_metrics,
)
from mrl.algos.rows import Reduce, Rows, identity
from mrl.algos.token_rewards import apply_kl_penalty, kl_penalized_scores, overlong_penalty, scores_to_token_rewards
from mrl.algos.value_loss import ValueTokens, value_loss
from mrl.algos.whitening import global_moments, whiten

__all__ = [
    "ADVANTAGES",
    "AGGREGATIONS",
    "KL_ESTIMATORS",
    "POLICY_LOSSES",
    "RATIO_LEVELS",
    "ActorColumns",
    "ActorSettings",
    "AdaptiveKLController",
    "AdvantageInputs",
    "AdvantageSettings",
    "Advantages",
    "BatchTotals",
    "CorrectionSettings",
    "FixedKLController",
    "GroupFilter",
    "KLController",
    "LossNormalizer",
    "Objective",
    "Outcomes",
    "PolicySettings",
    "PolicyTokens",
    "PromptGroups",
    "Reduce",
    "RolloutPair",
    "Rows",
    "ValueTokens",
    "actor_objective",
    "apply_kl_penalty",
    "correction_metrics",
    "correction_weights",
    "critic_objective",
    "estimate_advantages",
    "filter_groups",
    "global_moments",
    "identity",
    "kl_penalized_scores",
    "mean_row_kl",
    "mismatch_metrics",
    "overlong_penalty",
    "scores_of",
    "scores_to_token_rewards",
    "token_kl",
    "value_loss",
    "whiten",
]
