"""The names that a configuration may give, and what is registered under them: neither has more than the other."""

from __future__ import annotations

from mrl.algos.advantages import ADVANTAGES
from mrl.algos.aggregate import AGGREGATIONS
from mrl.algos.kl import KL_ESTIMATORS
from mrl.algos.losses import POLICY_LOSSES
from mrl.algos.preference import PREFERENCE_LOSSES
from mrl.algos.rollout_correction import RATIO_LEVELS
from mrl.config import names
from mrl.data.prompt_loader import SAMPLERS
from mrl.data.sources import DATASETS
from mrl.data.toy import TOY_TASKS
from tests.reference import matrix


def test_every_name_is_registered_and_every_registered_one_is_known() -> None:
    assert sorted(names.ADVANTAGES) == sorted(ADVANTAGES)
    assert sorted(names.AGGREGATIONS) == sorted(AGGREGATIONS)
    assert sorted(names.KL_ESTIMATORS) == sorted(KL_ESTIMATORS)
    assert sorted(names.POLICY_LOSSES) == sorted(POLICY_LOSSES)
    assert sorted(names.PREFERENCE_LOSSES) == sorted(PREFERENCE_LOSSES)
    assert sorted(names.RATIO_LEVELS) == sorted(RATIO_LEVELS)
    assert sorted(names.DATASETS) == sorted(DATASETS)
    assert sorted(names.SAMPLERS) == sorted(SAMPLERS)
    assert sorted(names.TOY_TASKS) == sorted(TOY_TASKS)


def test_every_word_is_a_factor_of_the_runs_that_are_held_against_formulas() -> None:
    assert set(names.AGGREGATIONS) == set(matrix.COMMON["aggregation"])
    assert set(names.POLICY_LOSSES) - {"vanilla", "geo_mean"} == set(matrix.COMMON["policy"])
    assert set(names.ADVANTAGES) == {*matrix.GROUPS["advantage"], *matrix.VALUES["advantage"]}
    estimators = {*matrix.COMMON["in_reward"], *matrix.COMMON["in_loss"]}
    assert set(names.KL_ESTIMATORS) - {"kl", "mse", "low_var_kl"} == estimators
