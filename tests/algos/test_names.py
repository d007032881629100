"""The names that a configuration may give, and what is registered under them: neither has more than the other."""

from __future__ import annotations

from mrl.algos.advantages import ADVANTAGES
from mrl.algos.aggregate import AGGREGATIONS
from mrl.algos.kl import KL_ESTIMATORS
from mrl.algos.losses import POLICY_LOSSES
from mrl.algos.preference import PREFERENCE_LOSSES
from mrl.algos.rollout_correction import RATIO_LEVELS
from mrl.config import algorithm, data, sft
from mrl.data.prompt_loader import SAMPLERS
from mrl.data.sources import DATASETS
from mrl.data.toy import TOY_TASKS


def test_every_name_is_registered_and_every_registered_one_is_known() -> None:
    assert sorted(algorithm.ADVANTAGES) == sorted(ADVANTAGES)
    assert sorted(algorithm.AGGREGATIONS) == sorted(AGGREGATIONS)
    assert sorted(algorithm.KL_ESTIMATORS) == sorted(KL_ESTIMATORS)
    assert sorted(algorithm.POLICY_LOSSES) == sorted(POLICY_LOSSES)
    assert sorted(sft.PREFERENCE_LOSSES) == sorted(PREFERENCE_LOSSES)
    assert not {*sft.UNPAIRED_LOSSES, *sft.OF_A_BATCH} & set(PREFERENCE_LOSSES)
    assert sorted(algorithm.RATIO_LEVELS) == sorted(RATIO_LEVELS)
    assert sorted(data.DATASETS) == sorted(DATASETS)
    assert sorted(data.SAMPLERS) == sorted(SAMPLERS)
    assert sorted(data.TOY_TASKS) == sorted(TOY_TASKS)
