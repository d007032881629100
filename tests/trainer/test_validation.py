"""mean@k, pass@k and maj@k of known answers."""

from __future__ import annotations

import pytest

from mrl.trainer.validation import figures

ANSWERS = {
    "a": [("12", 1.0), ("12", 1.0), ("13", 0.0), ("14", 0.0)],  # the commonest answer is right
    "b": [("7", 0.0), ("7", 0.0), ("8", 1.0), ("9", 0.0)],  # it is wrong, another is right
    "c": [("1", 0.0), ("2", 0.0), ("3", 0.0), ("4", 0.0)],  # nothing is right
}


def test_figures() -> None:
    assert figures("val", ANSWERS, 4, solved_at=1.0) == pytest.approx(
        {
            "val/prompts": 3,
            "val/score/mean@4": (0.5 + 0.25) / 3,
            "val/solved/mean@4": (0.5 + 0.25) / 3,
            "val/solved/pass@4": 2 / 3,
            "val/solved/maj@4": 1 / 3,
        }
    )


def test_partial_scores_solve_nothing_unless_they_reach_the_mark() -> None:
    answers = {"a": [("x", 0.4), ("y", 0.6)]}
    assert figures("val", answers, 2, solved_at=1.0)["val/solved/pass@2"] == 0
    assert figures("val", answers, 2, solved_at=0.5)["val/solved/mean@2"] == 0.5


def test_one_sample_has_no_majority() -> None:
    assert "val/solved/maj@1" not in figures("val", {"a": [("x", 1.0)]}, 1, solved_at=1.0)
