"""Every identity that is checked can break, and the run then stops with its name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mrl.config.training import SyncConfig
from mrl.errors import AuditFailed
from mrl.trainer.audit import audit_step

CONFIG: Any = SimpleNamespace(
    actor=SimpleNamespace(dtype="float32"),
    batch=SimpleNamespace(epochs_per_step=2),
    rollout=SimpleNamespace(top_p=1.0, top_k=0),
    sync=SyncConfig(),
)
METRICS = {"reward/kl": 0.0, "mismatch/log_prob_abs_diff_mean": 1e-6}
FIRST = {"ppo_kl": 1e-7, "pg_clipfrac": 0.0, "tokens": 60.0}
LATER = {"ppo_kl": 0.3, "pg_clipfrac": 0.2, "tokens": 60.0}


def test_a_right_step_passes() -> None:
    audit_step(CONFIG, 1, METRICS, [FIRST, LATER], 60)


@pytest.mark.parametrize(
    ("metrics", "first", "identity"),
    [
        ({}, {"ppo_kl": 0.01}, "the ratio is 1 in the first update"),
        ({}, {"pg_clipfrac": 0.1}, "nothing is clipped in the first update"),
        ({}, {"tokens": 58.0}, "every response token is learnt from once: 59 of 60"),
        ({"reward/kl": 0.01}, {}, "the KL to the reference is 0 before training"),
        ({"mismatch/log_prob_abs_diff_mean": 0.1}, {}, "the engines sample from the trainer's weights"),
    ],
)
def test_each_identity_can_break(metrics: dict[str, float], first: dict[str, float], identity: str) -> None:
    with pytest.raises(AuditFailed, match=identity):
        audit_step(CONFIG, 1, METRICS | metrics, [FIRST | first, LATER], 60)


def test_the_reference_is_left_behind_later() -> None:
    audit_step(CONFIG, 2, METRICS | {"reward/kl": 0.5}, [FIRST, LATER], 60)
