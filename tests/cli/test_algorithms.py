"""`mrl algorithms`: the list is complete, and every entry has what the page promises."""

from __future__ import annotations

import pytest

from mrl.cli.main import main
from mrl.config import algorithm
from mrl.config.catalog import algorithms

KNOWN = {
    "advantage": algorithm.ADVANTAGES,
    "policy loss": algorithm.POLICY_LOSSES,
    "aggregation": algorithm.AGGREGATIONS,
    "KL estimator": algorithm.KL_ESTIMATORS,
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
    assert capsys.readouterr().out.splitlines() == [
        "policy loss (algorithm.loss.policy)",
        "  gmpo, geo_mean  [GMPO, 2507.20673]",
        "      l = -A exp(mean_t x_t), one loss per row, with A the row's mean advantage.",
        "      options: clip_high, clip_low",
    ]


def test_an_unknown_algorithm_is_named_with_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["algorithms", "gsop"]) == 2
    assert 'no algorithm is called "gsop"' in (message := capsys.readouterr().err)
    assert 'did you mean "gspo"?' in message
