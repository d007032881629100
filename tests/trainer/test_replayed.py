"""A replay that is another than its run stops, and says in what."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mrl.errors import AuditFailed
from mrl.trainer.audit import ReplayedRun


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
