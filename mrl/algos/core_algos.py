"""The algorithms on one page, under the name that verl gave it: what the trainer and the engine import from here."""

from __future__ import annotations

from mrl.algos.advantages import ADVANTAGES, AdvantageInputs, Advantages, AdvantageSettings, estimate_advantages
from mrl.algos.aggregate import AGGREGATIONS, BatchTotals, Normaliser
from mrl.algos.dynamic_sampling import GroupFilter, filter_groups
from mrl.algos.groups import Groups, Outcomes, scores_of
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
from mrl.algos.rows import Reduce, Rows, alone
from mrl.algos.token_rewards import overlong_penalty, penalise, penalised_scores, place_scores
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
    "Groups",
    "KLController",
    "Normaliser",
    "Objective",
    "Outcomes",
    "PolicySettings",
    "PolicyTokens",
    "Reduce",
    "RolloutPair",
    "Rows",
    "ValueTokens",
    "actor_objective",
    "alone",
    "correction_metrics",
    "correction_weights",
    "critic_objective",
    "estimate_advantages",
    "filter_groups",
    "global_moments",
    "mean_row_kl",
    "mismatch_metrics",
    "overlong_penalty",
    "penalise",
    "penalised_scores",
    "place_scores",
    "scores_of",
    "token_kl",
    "value_loss",
    "whiten",
]
