"""`mrl algorithms`: the list is complete, and every entry has what the page promises."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mrl.cli.main import main
from mrl.config import algorithm
from mrl.config.catalog import algorithms
from mrl.config.proofs import find_proof
from mrl.config.sft import PREFERENCE_LOSSES, UNPAIRED_LOSSES

KNOWN = {
    "advantage": algorithm.ADVANTAGES,
    "policy loss": algorithm.POLICY_LOSSES,
    "aggregation": algorithm.AGGREGATIONS,
    "KL estimator": algorithm.KL_ESTIMATORS,
    "preference loss": (*PREFERENCE_LOSSES, *UNPAIRED_LOSSES),
    "correction": algorithm.RATIO_LEVELS,
}


def test_every_name_of_a_configuration_is_listed_once() -> None:
    for kind, known in KNOWN.items():
        assert sorted(name for entry in algorithms() if entry.kind == kind for name in entry.names) == sorted(known)


def test_every_entry_has_a_formula_and_each_method_its_paper() -> None:
    for entry in algorithms():
        assert entry.formula.endswith("."), entry
        assert entry.paper or entry.kind not in ("advantage", "policy loss"), entry


def test_options_are_the_keys_that_the_function_reads() -> None:
    options = {(entry.kind, entry.names[0]): set(entry.options) for entry in algorithms()}
    assert options["policy loss", "ppo"] == {"clip_low", "clip_high", "dual_clip"}
    assert options["policy loss", "clip_cov"] == {"clip_low", "clip_high", "cov_share", "cov_low", "cov_high"}
    assert options["policy loss", "kl_cov"] == {"cov_share", "cov_kl_coef"}
    assert options["policy loss", "gpg"] == set()
    assert options["advantage", "gae"] == {"gamma", "lam", "lam_critic", "lam_length", "whiten"}


def test_one_algorithm_by_any_of_its_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["algorithms", "geo_mean"]) == 0
    assert capsys.readouterr().out.splitlines()[:4] == [
        "policy loss (algorithm.loss.policy)",
        "  gmpo, geo_mean  [GMPO, 2507.20673]",
        "      l = -A exp(mean_t x_t), one loss per row, with A the row's mean advantage.",
        "      options: clip_high, clip_low",
    ]


def test_an_algorithm_says_what_it_was_compared_with(capsys: pytest.CaptureFixture[str]) -> None:
    proof = find_proof(next(entry for entry in algorithms() if entry.names[0] == "gspo"))
    assert proof is not None
    assert main(["algorithms", "gspo"]) == 0
    printed = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert printed[-2:] == [*proof.lines()]
    assert printed[-2].startswith("largest differences: formula ")
    assert replace(proof, scores=[0.5]).score() == "50.0 % (1 seed)"
    assert replace(proof, scores=[0.5, 0.25, 0.75]).score() == "50.0 % (25.0 to 75.0, 3 seeds)"


def test_each_method_is_compared_with_its_formula() -> None:
    """Online DPO is compared with the derivative of its loss, in tests/algos/test_against_float64.py. Preference losses
    are compared with TRL's."""
    missing = set()
    for entry in algorithms():
        proof = find_proof(entry)
        differences = {} if proof is None else proof.differences
        assert all(difference <= 1e-6 for difference in differences.values()), entry
        expected = "TRL" if entry.kind == "preference loss" else "formula"
        missing |= {entry.names[0]} if expected not in differences else set()
    assert missing == {"online_dpo", "none"}


def test_an_unknown_algorithm_is_named_with_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["algorithms", "gsop"]) == 2
    assert 'no algorithm is called "gsop"' in (message := capsys.readouterr().err)
    assert 'did you mean "gspo"?' in message
