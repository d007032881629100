"""Compare three steps of trainer, workers and Megatron with the reference, for every pair of options."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mrl.config.resolved.load import load_config
from mrl.verify.spawn import run_distributed
from tests.reference.compare import hold, too_large
from tests.reference.judge import Judge
from tests.reference.matrix import all_cases, record
from tests.reference.models import make_models
from tests.reference.rewards import FUNCTION

LIMIT_S = 500.0
NAMES = [
    pytest.param(name, marks=[] if name == "1-quick" else [pytest.mark.slow, pytest.mark.on_demand])
    for name in ("1-quick", "2-quick", "1-0", "1-1", "2-0", "2-1")
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    make_models(directory)
    return directory


@pytest.mark.parametrize("part", NAMES)
def test_every_quantity_is_the_reference_s(part: str, models: Path, tmp_path: Path) -> None:
    ranks, cases = all_cases(models)[part]
    recordings = run_distributed(ranks, record, cases, str(tmp_path), timeout_s=LIMIT_S)[0]
    seen: Counter[str] = Counter()
    for case, recording in zip(cases, recordings, strict=True):
        recorded: dict[str, Any] = json.loads(recording)
        config = dataclasses.asdict(load_config(str(tmp_path / "rank-0" / f"{case.name}.yaml")).config)
        differences = hold(config, recorded, FUNCTION)
        off = too_large(differences)
        assert not off, f"{case.name}: {off}\n{describe(config)}"
        if not (case.failures or case.mask):
            Judge(config).judge(recorded)
        seen.update(name for line in recorded["metrics"] for name, value in line.items() if value)
    for name in BITE if part.endswith("quick") else ():  # the halves draw their cases at random
        assert seen[name], f"{name} is 0 in every step of every case, so no case tests its option"


BITE = (
    *("actor/pg_clipfrac", "actor/pg_clipfrac_lower", "critic/vf_clipfrac", "reward/kl", "actor/kl_loss"),
    *("actor/entropy", "reward/failed/raised", "sampling/uniform_prompts", "reward/overlong_penalty"),
    *("reward/model/mean", "reward/greedy/mean", "response_length/clip_ratio", "groups/uniform_share"),
    *("online_dpo/pairs", "online_dpo/samples_without_pair", "online_dpo/margin"),
    *("actor/distill_loss", "actor/taught_share", "actor/teacher_kl"),
    "actor/m2_masked",
    *("actor/taught_tokens", "teacher/untaught/no_success", "teacher/untaught/too_long"),
    *("mismatch/rollout_is_ratio_fraction_high", "mismatch/rollout_is_ratio_fraction_low"),
)
"""Metrics that are 0 if their option has no effect."""


def describe(config: dict[str, Any]) -> str:
    """Return a short description of a case."""
    names = ("algorithm", "batch", "training")
    return "\n".join(f"  {name}: {json.dumps(config[name])}" for name in names)
