"""Every identity that is checked can break, and the run then stops with its name; so does a replay that differs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mrl.config.algorithm import LossConfig
from mrl.errors import AuditFailed
from mrl.trainer.audit import ReplayedRun, check_invariants


def config_of(dtype: str = "float32", old_log_probs: str = "trainer", **loss: Any) -> Any:
    return SimpleNamespace(
        actor=SimpleNamespace(dtype=dtype),
        batch=SimpleNamespace(epochs_per_step=2),
        algorithm=SimpleNamespace(loss=LossConfig(**loss), old_log_probs=old_log_probs),
        reference=None,
    )


CONFIG = config_of()
METRICS = {"reward/kl": 0.0}
FIRST = {"ppo_kl": 1e-7, "pg_clipfrac": 0.0, "tokens": 60.0}
LATER = {"ppo_kl": 0.3, "pg_clipfrac": 0.2, "tokens": 60.0}


def test_only_a_reference_that_is_another_model_differs_before_training() -> None:
    config, apart = config_of(), METRICS | {"reward/kl": 0.5}
    config.reference = SimpleNamespace(path="another/model")
    check_invariants(config, 1, apart, [FIRST, LATER], 60)
    config.reference.path = None
    with pytest.raises(AuditFailed, match="the KL to the reference is 0 before training"):
        check_invariants(config, 1, apart, [FIRST, LATER], 60)


def test_a_ratio_to_the_engine_may_differ_from_one() -> None:
    moved = FIRST | {"ppo_kl": 0.02, "pg_clipfrac": 0.1}
    check_invariants(config_of(old_log_probs="engine"), 1, METRICS, [moved, LATER], 60)
    with pytest.raises(AuditFailed, match="the loss reports ppo_kl"):
        check_invariants(config_of(old_log_probs="engine"), 1, METRICS, [{"tokens": 60.0}, LATER], 60)


def test_a_right_step_passes() -> None:
    check_invariants(CONFIG, 1, METRICS, [FIRST, LATER], 60)
    estimate = {"distill_loss": -0.01}
    check_invariants(CONFIG, 1, METRICS, [FIRST | estimate, LATER | estimate], 60)


@pytest.mark.parametrize(
    ("metrics", "first", "identity"),
    [
        ({}, {"ppo_kl": 0.01}, "the ratio is 1 in the first update"),
        ({}, {"pg_clipfrac": 0.1}, "nothing is clipped in the first update"),
        ({}, {"tokens": 59.0}, r"every response token is used once per epoch \(119 of 120"),
        ({}, {"distill_loss": -0.01, "teacher_mass": 1.0}, "no divergence from the teacher is negative"),
        ({"reward/kl": 0.01}, {}, "the KL to the reference is 0 before training"),
    ],
)
def test_each_identity_can_break(metrics: dict[str, float], first: dict[str, float], identity: str) -> None:
    with pytest.raises(AuditFailed, match=identity):
        check_invariants(CONFIG, 1, METRICS | metrics, [FIRST | first, LATER], 60)


def test_the_reference_is_left_behind_later() -> None:
    check_invariants(CONFIG, 2, METRICS | {"reward/kl": 0.5}, [FIRST, LATER], 60)


def refused(config: Any, step: int, metrics: dict[str, float], updates: list[dict[str, float]], tokens: int) -> bool:
    try:
        check_invariants(config, step, metrics, updates, tokens)
    except AuditFailed as error:
        return str(error).startswith(f"step {step}: ")
    return False


@pytest.mark.parametrize(("dtype", "within", "beyond"), [("float32", 9e-5, 1.2e-4), ("bfloat16", 0.019, 0.021)])
@pytest.mark.parametrize("sign", [1, -1])
def test_one_policy_may_differ_from_itself_as_its_dtype_rounds(
    dtype: str, within: float, beyond: float, sign: int
) -> None:
    config = config_of(dtype)
    for name in ("ppo_kl", "pg_clipfrac"):
        assert not refused(config, 1, METRICS, [FIRST | {name: within * sign}, LATER], 60)
    assert refused(config, 1, METRICS, [FIRST | {"ppo_kl": beyond * sign}, LATER], 60)
    assert refused(config, 7, METRICS, [FIRST | {"pg_clipfrac": beyond}, LATER], 60), "in every step"
    assert not refused(config, 1, METRICS | {"reward/kl": within * sign}, [], 60)
    assert refused(config, 1, METRICS | {"reward/kl": beyond * sign}, [], 60), "also where only the critic learns"


@pytest.mark.parametrize("broken", [{"ppo_kl": math.nan}, {"pg_clipfrac": math.nan}])
def test_what_is_no_number_does_not_hold(broken: dict[str, float]) -> None:
    assert refused(CONFIG, 2, METRICS, [FIRST | broken, LATER], 60)
    assert refused(CONFIG, 1, {"reward/kl": math.nan}, [], 60)


def test_a_loss_that_clips_nothing_need_not_say_so_but_its_ratio_is_needed() -> None:
    assert not refused(CONFIG, 2, METRICS, [{"ppo_kl": 0.0, "tokens": 60.0}, LATER], 60)
    with pytest.raises(AuditFailed, match="the loss reports ppo_kl, the mean log-ratio \\(tokens"):
        check_invariants(CONFIG, 2, METRICS, [{"tokens": 60.0}, LATER], 60)


def test_tokens_are_counted_over_all_updates_once_an_epoch() -> None:
    parts = [FIRST | {"tokens": 20.0}, LATER | {"tokens": 40.0}, LATER | {"tokens": 58.0}]
    assert refused(CONFIG, 2, METRICS, parts, 60)
    assert not refused(CONFIG, 2, METRICS, [*parts, LATER | {"tokens": 2.0}], 60)
    assert refused(CONFIG, 2, METRICS, [FIRST, LATER], 59)
    assert refused(CONFIG, 2, METRICS, [FIRST, LATER], 61)


def test_a_clip_as_narrow_as_rounding_may_clip_what_rounding_moves() -> None:
    """GSPO's published clips are 3e-4 and 4e-4: in bfloat16 two passes over one policy differ by more."""
    narrow = {"clip_low": 3e-4, "clip_high": 4e-4}
    clipped = [FIRST | {"pg_clipfrac": 0.3}, LATER]
    assert not refused(config_of("bfloat16", **narrow), 1, METRICS, clipped, 60)
    assert refused(config_of("float32", **narrow), 1, METRICS, clipped, 60), "float32 rounds to less"
    assert refused(config_of("bfloat16"), 1, METRICS, clipped, 60)
    moved = [FIRST | {"ppo_kl": 0.03}, LATER]
    assert refused(config_of("bfloat16", **narrow), 1, METRICS, moved, 60), "the ratio is 1 all the same"
    assert refused(config_of("bfloat16", **narrow), 1, METRICS, [FIRST | {"pg_clipfrac": math.nan}, LATER], 60)


# --- replays ---


@pytest.fixture
def run(tmp_path: Path) -> Path:
    lines = [{"step": 1, "actor/loss": 0.1, "perf/mfu": 0.5}, {"step": 2, "actor/loss": None, "timing_s/step": 3.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_equal_figures_pass_whatever_the_clock_says(run: Path) -> None:
    replayed = ReplayedRun(run)
    assert replayed.num_steps == 2
    replayed.compare(1, {"actor/loss": 0.1, "perf/mfu": 0.7})
    replayed.compare(2, {"actor/loss": float("nan")})
    replayed.compare(3, {"actor/loss": 7.0})  # a step that the run has not done


@pytest.mark.parametrize(
    ("step", "metrics", "says"),
    [
        (1, {"actor/loss": 0.1 + 5e-18}, ""),
        (
            1,
            {"actor/loss": 0.10000000000000002},
            r"1 of 2 figures differ, the first is actor/loss: 0.10000000000000002 in",
        ),
        (1, {}, "the first is actor/loss: None instead of 0.1"),
        (1, {"actor/loss": 0.1, "more": 1.0}, "the first is more: 1.0 instead of None"),
        (2, {"actor/loss": 0.0}, "the first is actor/loss: 0.0 instead of None"),
    ],
)
def test_the_first_figure_that_differs_in_its_last_bit_is_named(
    run: Path, step: int, metrics: dict[str, float], says: str
) -> None:
    if not says:
        ReplayedRun(run).compare(step, metrics)
        return
    with pytest.raises(AuditFailed, match=says):
        ReplayedRun(run).compare(step, metrics)
