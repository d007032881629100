"""The comparison with TRL detects errors beyond its tolerance, and raises no false alarms."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.algorithm_cases import packed, padded
from benchmarks.algorithms import TOLERANCE, compare
from benchmarks.preference_cases import OURS, make_case
from benchmarks.preferences import largest

CASES = [make_case(seed) for seed in range(3)]


@pytest.fixture(scope="module")
def answers() -> dict[str, NDArray[np.float64]]:
    """Return mrl's own results in the format of a peer."""
    results = {}
    for number, case in enumerate(CASES):
        for name, function in OURS.items():
            outputs = function(packed(case))
            of = "scores" if name.startswith("reward") else "logits" if name.startswith("gkd") else "log_probs"
            results[f"{number}/{name}/loss"] = padded(case, outputs["loss"], ())
            results[f"{number}/{name}/gradient"] = padded(case, outputs["gradient"], case[of].shape)
    return results


def differences(answers: dict[str, NDArray[np.float64]], path: Path) -> dict[str, float]:
    np.savez(path, **answers)
    return {row["function"]: row["max_difference"] for row in compare(OURS, CASES, path, largest)}


def test_what_is_the_same_differs_by_nothing(answers: dict[str, NDArray[np.float64]], tmp_path: Path) -> None:
    assert differences(answers, tmp_path / "same.npz") == dict.fromkeys(OURS, 0.0)
    assert all(np.abs(value).max() > 0 for name, value in answers.items() if "hinge" not in name), "nothing to compare"


def test_one_number_of_a_gradient_is_noticed(answers: dict[str, NDArray[np.float64]], tmp_path: Path) -> None:
    """The smallest gradient is changed by three times the tolerance of the largest, which may be far below 1."""
    wrong = dict(answers)
    for name in OURS:
        gradient = answers[f"1/{name}/gradient"].copy()
        at = np.unravel_index(np.abs(gradient).argmin(), gradient.shape)
        gradient[at] += 3 * TOLERANCE * np.abs(gradient).max()
        wrong[f"1/{name}/gradient"] = gradient
    differing = differences(wrong, tmp_path / "wrong.npz")
    assert differing == {name: pytest.approx(3 * TOLERANCE, rel=1e-3) for name in OURS}
