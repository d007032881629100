"""KTO against the formula of its paper in float64, row by row, and properties that hold for all numbers."""

from __future__ import annotations

import math
import random

import pytest
import torch

from mrl.algos.kto import LabeledTokens, LabelTotals, kto_baseline, kto_losses, kto_objective
from mrl.algos.rows import Rows
from mrl.config.sft import DpoLossConfig

CONFIG = DpoLossConfig(loss="kto", beta=0.3, desirable_weight=1.2, undesirable_weight=0.7)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def make_tokens(seed: int) -> tuple[LabeledTokens, list[list[tuple[float, float]]], list[bool], float]:
    """Return random rows, their log-probs without the masked tokens, their labels, and the baseline."""
    rng = random.Random(seed)
    rows, masks = [], []
    for _ in range(rng.randint(2, 7)):
        base = [-abs(rng.gauss(0, 1)) for _ in range(rng.randint(1, 9))]
        rows.append([(x, x + rng.gauss(0, 1)) for x in base])
        masks.append([True, *(rng.random() < 0.8 for _ in base[1:])])
    labels, baseline = [rng.random() < 0.5 for _ in rows], max(0.0, rng.gauss(0.3, 1))
    mask_T = torch.tensor([is_written for mask in masks for is_written in mask])
    columns = torch.tensor([values for row in rows for values in row], dtype=torch.float64)
    columns[~mask_T] = math.nan
    tokens = LabeledTokens(
        Rows.of([len(row) for row in rows]),
        mask_T,
        columns[:, 0].clone().requires_grad_(),
        columns[:, 1].clone(),
        torch.tensor(labels),
        torch.full((len(rows),), baseline, dtype=torch.float64),
    )
    written = [[x for x, kept in zip(row, mask, strict=True) if kept] for row, mask in zip(rows, masks, strict=True)]
    return tokens, written, labels, baseline


@pytest.mark.parametrize("seed", range(40))
def test_the_loss_and_its_gradient_are_those_of_the_paper(seed: int) -> None:
    """L = mean(lambda_y - v), with v = lambda_D sigmoid(beta (r - z)) or lambda_U sigmoid(beta (z - r))."""
    tokens, written, labels, z = make_tokens(seed)
    found = kto_objective(tokens, CONFIG, LabelTotals.of(tokens.is_desirable_B))
    (grad_T,) = torch.autograd.grad(found.loss, tokens.log_probs_T)
    losses, slopes, correct = [], [], []
    for row, is_desirable in zip(written, labels, strict=True):
        r = math.fsum(mine - theirs for mine, theirs in row)
        weight, sign = (1.2, 1.0) if is_desirable else (0.7, -1.0)
        chance = sigmoid(sign * 0.3 * (r - z))
        losses.append(weight - weight * chance)
        slopes += [-sign * weight * 0.3 * chance * (1 - chance) / len(labels)] * len(row)
        correct.append(sign * (r - z) > 0)
    assert float(found.loss) == pytest.approx(math.fsum(losses) / len(labels), rel=1e-12)
    assert grad_T[tokens.mask_T].tolist() == pytest.approx(slopes, rel=1e-11)
    assert not grad_T[~tokens.mask_T].any()
    assert float(found.reports["accuracy"]) == pytest.approx(sum(correct) / len(labels))
    assert float(found.reports["kl_baseline"]) == pytest.approx(z)
    for name, label in (("desirable", True), ("undesirable", False)):
        own = [row for row, is_desirable in zip(written, labels, strict=True) if is_desirable == label]
        assert (f"reward/{name}" in found.reports) == bool(own), "no mean over no rows"
        if own:
            rewards = [0.3 * math.fsum(mine - theirs for mine, theirs in row) for row in own]
            means = [math.fsum(mine for mine, _ in row) / len(row) for row in own]
            assert float(found.reports[f"reward/{name}"]) == pytest.approx(math.fsum(rewards) / len(own))
            assert float(found.reports[f"log_prob/{name}"]) == pytest.approx(math.fsum(means) / len(own))


def test_however_rows_are_cut_the_loss_and_its_reports_are_the_same() -> None:
    tokens = next(made for made in (make_tokens(seed)[0] for seed in range(99)) if made.rows.num_rows > 4)
    totals = LabelTotals.of(tokens.is_desirable_B)
    whole = kto_objective(tokens, CONFIG, totals)
    parts = []
    for first, last in ((0, 1), (1, 4), (4, tokens.rows.num_rows)):
        cut_T = (tokens.rows.row_T >= first) & (tokens.rows.row_T < last)
        part = LabeledTokens(
            Rows.of(tokens.rows.lengths_B[first:last]),
            *(column[cut_T] for column in (tokens.mask_T, tokens.log_probs_T, tokens.ref_log_probs_T)),
            *(column[first:last] for column in (tokens.is_desirable_B, tokens.baseline_B)),
        )
        parts.append(kto_objective(part, CONFIG, totals).reports)
    for name, value in whole.reports.items():
        assert float(sum(part[name] for part in parts)) == pytest.approx(float(value)), name


def test_the_baseline_is_a_mean_that_is_never_below_0() -> None:
    assert kto_baseline(torch.tensor([3.0, -1.0, 4.0])) == 2
    assert kto_baseline(torch.tensor([3.0, -7.0, 1.0])) == 0, "each is not clamped, but their mean is"


def test_no_gradient_passes_through_the_baseline() -> None:
    baseline_B = torch.tensor([0.5, 0.5], requires_grad=True)
    ratio_B = torch.tensor([0.2, 0.1], requires_grad=True)
    losses_B = kto_losses(ratio_B, torch.tensor([True, False]), baseline_B, CONFIG)
    assert torch.autograd.grad(losses_B.sum(), [ratio_B, baseline_B], allow_unused=True)[1] is None


def test_at_the_start_each_response_loses_half_its_weight() -> None:
    zeros_B = torch.zeros(2)
    assert kto_losses(zeros_B, torch.tensor([True, False]), zeros_B, CONFIG).tolist() == pytest.approx([0.6, 0.35])


def test_extreme_log_ratios_stay_finite() -> None:
    ratio_B = torch.tensor([-1e6, 1e6, -1e6, 1e6], requires_grad=True)
    losses_B = kto_losses(ratio_B, torch.tensor([True, True, False, False]), torch.zeros(4), CONFIG)
    assert losses_B.tolist() == pytest.approx([1.2, 0, 0, 0.7])
    assert bool(torch.autograd.grad(losses_B.sum(), ratio_B)[0].isfinite().all())
