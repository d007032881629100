"""Divergences against published values and finite differences; what an advantage of distillation means."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mrl.algos.aggregate import LossNormalizer
from mrl.algos.kl import BEGINS, CONTINUES, UNTAUGHT, distilled_advantages, divergence, span_sums, token_kl
from mrl.algos.losses import PolicyTokens
from mrl.algos.objectives import ActorColumns, actor_objective
from mrl.algos.rows import Rows
from mrl.config.algorithm import DistillationConfig, LossConfig

REFERENCE: dict[str, Any] = json.loads((Path(__file__).parent / "distillation_reference.json").read_text())
F64 = torch.float64


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=F64)


@pytest.mark.parametrize("case", REFERENCE["cases"], ids=lambda case: f"{case['beta']}-{case['temperature']}")
def test_values_that_are_known_elsewhere(case: dict[str, Any]) -> None:
    student, teacher = (
        (tensor(REFERENCE[f"{whose}_logits"]) / case["temperature"]).log_softmax(1) for whose in ("student", "teacher")
    )
    parts, slopes = divergence(student, teacher, case["beta"])
    assert float(parts.sum()) == pytest.approx(case["loss"], rel=1e-12)
    d_logits = (slopes - student.exp() * slopes.sum(1, keepdim=True)) / case["temperature"]
    assert torch.allclose(d_logits, tensor(case["gradient"]), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_slopes_against_finite_differences(beta: float) -> None:
    """Of sum d_v by log pi_v, but for what is the same for all: that takes no part in a gradient of logits."""
    chance = torch.Generator().manual_seed(2)
    logits, teacher = (torch.randn(4, 9, dtype=F64, generator=chance) for _ in range(2))
    log_probs = logits.log_softmax(1)
    _, slopes = divergence(log_probs, teacher.log_softmax(1), beta)

    def whole(logits: Tensor) -> Tensor:
        return divergence(logits.log_softmax(1), teacher.log_softmax(1), beta)[0].sum()

    small = 1e-6
    for at in range(9):
        step = torch.zeros_like(logits)
        step[:, at] = small
        measured = (whole(logits + step) - whole(logits - step)) / (2 * small)
        expected = (slopes - log_probs.exp() * slopes.sum(1, keepdim=True))[:, at].sum()
        assert float(measured) == pytest.approx(float(expected), abs=1e-9)


def distributions() -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(4)
    student, teacher = (torch.randn(7, dtype=F64, generator=chance) for _ in range(2))
    return student.requires_grad_(), teacher.log_softmax(0)


def expected_gradient(of_token: Any) -> Tensor:
    """Over tokens drawn from the student, of a loss of the token's two log-probs; exactly, not by sampling."""
    logits, teacher = distributions()
    log_probs = logits.log_softmax(0)
    probs = log_probs.exp().detach()
    (found,) = torch.autograd.grad((probs * of_token(log_probs, teacher)).sum(), logits)
    return found


def gradient_of(beta: float) -> Tensor:
    logits, teacher = distributions()
    log_probs = logits.log_softmax(0)
    _, slopes = divergence(log_probs, teacher, beta)
    return (slopes - log_probs.exp() * slopes.sum()).detach()


def test_what_sampled_estimators_push_towards() -> None:
    """k1 as an advantage and k2 as a loss: the reverse KL. k3 as a loss: the forward KL. k1 as a loss: nothing."""
    mask = torch.ones(7, dtype=torch.bool)

    def advantage(log_probs: Tensor, teacher: Tensor) -> Tensor:
        return -distilled_advantages(torch.zeros_like(teacher), log_probs, teacher, mask, 1.0) * log_probs

    def loss(name: str) -> Tensor:
        return expected_gradient(lambda log_probs, teacher: token_kl(name, log_probs, teacher, mask))

    assert torch.allclose(expected_gradient(advantage), gradient_of(1.0), atol=1e-12)
    assert torch.allclose(loss("k2"), gradient_of(1.0), atol=1e-12)
    assert torch.allclose(loss("k3"), gradient_of(0.0), atol=1e-12)
    assert loss("k1").abs().max() < 1e-12


def test_an_advantage_over_spans_has_the_gradient_of_the_kl_of_spans() -> None:
    """All spans of one token, or of two: 0 ends a span, 1 and 2 need a second token. Exactly, not by sampling."""
    chance = torch.Generator().manual_seed(5)
    first, second = (torch.randn(*shape, dtype=F64, generator=chance).requires_grad_() for shape in ((3,), (3, 3)))
    spans = [(0,), *((a, b) for a in (1, 2) for b in range(3))]
    teacher = torch.randn(len(spans), dtype=F64, generator=chance).log_softmax(0)

    def of_tokens(span: tuple[int, ...]) -> Tensor:
        return torch.stack([first.log_softmax(0)[span[0]], *(second[span[0]].log_softmax(0)[b] for b in span[1:])])

    kl, estimate = torch.zeros((), dtype=F64), torch.zeros((), dtype=F64)
    for span, log_prob in zip(spans, teacher, strict=True):
        own = of_tokens(span)
        kl = kl + own.sum().exp() * (own.sum() - log_prob)
        shares, mask = torch.full((len(span),), float(log_prob) / len(span), dtype=F64), torch.ones(len(span)).bool()
        places = torch.tensor([BEGINS, CONTINUES][: len(span)])
        advantages = distilled_advantages(torch.zeros_like(own), own, shares, mask, 1.0, places)
        estimate = estimate - own.sum().exp().detach() * (advantages * own).sum()
    expected, found = (torch.autograd.grad(loss, (first, second), retain_graph=True) for loss in (kl, estimate))
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-12)
        assert b.abs().max() > 0.01


def test_a_span_does_not_reach_into_the_next_row_or_over_a_token_without_a_teacher() -> None:
    values, places = tensor([1.0, 2.0, 4.0, 8.0, 16.0]), torch.tensor([BEGINS, CONTINUES, UNTAUGHT, BEGINS, CONTINUES])
    assert span_sums(values, places).tolist() == [3, 3, 4, 24, 24]
    whole = torch.tensor([True, True, False, True, True])
    advantages = distilled_advantages(tensor([0.0] * 5), values, tensor([0.0] * 5), whole, 0.5, places)
    assert advantages.tolist() == [-1.5, -1.5, 0, -12, -12]


def test_a_sample_that_the_teacher_cannot_read_is_no_better_than_the_mean_of_the_others() -> None:
    """Otherwise a policy learns to write what its teacher cannot read."""
    chance = torch.Generator().manual_seed(6)
    own, of_teacher = (torch.randn(6, 4, dtype=F64, generator=chance).log_softmax(1)[:, 0] for _ in range(2))
    places, mask = torch.tensor([BEGINS] * 6 + [UNTAUGHT] * 2), torch.tensor([True] * 6 + [False] * 2)
    log_probs, teacher = (torch.cat([x, tensor([y] * 2)]) for x, y in ((own, -7.0), (of_teacher, of_teacher.mean())))
    advantages = distilled_advantages(tensor([0.0] * 8), log_probs, teacher, mask, 0.5, places)
    assert advantages[6:].tolist() == [0.5 * float(of_teacher.mean())] * 2, "for each log-prob of the policy"
    assert advantages[6] < advantages[:6].mean()


def test_an_advantage_of_distillation_changes_nothing_on_masked_tokens() -> None:
    mask = torch.tensor([True, False, True])
    found = distilled_advantages(
        tensor([1.0, 2.0, 3.0]), tensor([-1.0, torch.nan, -2.0]), tensor([-3.0, 0.0, -0.5]), mask, 0.5
    )
    assert found.tolist() == [0.0, 2.0, 3.75]


def test_later_updates_weigh_what_the_teacher_said_as_the_policy_loss_weighs_all() -> None:
    """The advantage and the ratio both use the policy that drew the tokens, and the ratio is clipped."""
    old, teacher, mask = tensor([-1.0, -1.0, -2.0]), tensor([-0.5, -2.5, -1.0]), torch.ones(3, dtype=torch.bool)
    moved = tensor([0.1, -0.15, 0.7]).requires_grad_()
    rows = Rows.of([2, 1])
    norm = LossNormalizer.of("token-mean", rows, mask)
    tokens = PolicyTokens(rows, mask, old + moved, old, tensor([0.0, 0.5, 0.0]))
    config = DistillationConfig(form="advantage", coef=0.5)
    extra = ActorColumns(teacher_log_probs_T=teacher)
    found = actor_objective(tokens, LossConfig(clip_high=0.2), norm, extra, None, config)
    advantages = tensor([0.25, -0.25, 0.5])
    ratios = tensor([math.exp(0.1), math.exp(-0.15), 1.2])
    assert float(found.loss) == pytest.approx(float(-(ratios * advantages).mean()), rel=1e-12)
    (slopes,) = torch.autograd.grad(found.loss, moved)
    assert slopes.tolist() == pytest.approx([-0.25 * math.exp(0.1) / 3, 0.25 * math.exp(-0.15) / 3, 0.0], rel=1e-12)


@pytest.mark.parametrize("form", ["advantage", "sampled", "top_k"])
def test_tokens_without_a_teacher_learn_from_rewards_alone(form: Any) -> None:
    old, mask, taught = tensor([-1.0, -1.5, -2.0]), torch.ones(3, dtype=torch.bool), torch.tensor([True, False, False])
    rows = Rows.of([1, 2])
    norm, config = LossNormalizer.of("token-mean", rows, mask), DistillationConfig(form=form, estimator="k3", coef=0.5)

    def slopes(teacher: Tensor, divergence_T: Tensor, of: DistillationConfig | None, is_taught: Any) -> list[float]:
        moved = old.clone().requires_grad_()
        tokens = PolicyTokens(rows, mask, moved, old, tensor([0.3, -0.4, 0.7]))
        extra = ActorColumns(teacher_log_probs_T=teacher, divergence_T=divergence_T * moved, taught_T=is_taught)
        (found,) = torch.autograd.grad(actor_objective(tokens, LossConfig(), norm, extra, None, of).loss, moved)
        numbers: list[float] = found.tolist()
        return numbers

    some = slopes(tensor([-0.2, torch.nan, 400.0]), tensor([2.0, 3.0, 4.0]), config, taught)
    everywhere = slopes(tensor([-0.2, -0.3, -0.4]), tensor([2.0, 3.0, 4.0]), config, None)
    nowhere = slopes(tensor([0.0, 0.0, 0.0]), tensor([0.0, 0.0, 0.0]), None, None)
    assert some[0] == everywhere[0] != nowhere[0]
    assert some[1:] == nowhere[1:]
    assert everywhere[1] != nowhere[1]


def test_without_advantages_from_rewards_the_policy_learns_from_the_teacher_alone() -> None:
    old, teacher, mask = tensor([-1.0, -2.0]), tensor([-0.5, -1.0]), torch.ones(2, dtype=torch.bool)
    rows = Rows.of([2])
    norm = LossNormalizer.of("token-mean", rows, mask)
    tokens = PolicyTokens(rows, mask, old, old, tensor([4.0, -8.0]))
    extra = ActorColumns(teacher_log_probs_T=teacher)
    for share, advantages in ((0.0, [0.5, 1.0]), (0.25, [1.5, -1.0])):
        config = DistillationConfig(form="advantage", reward_coef=share)
        found = actor_objective(tokens, LossConfig(), norm, extra, None, config)
        assert float(found.loss) == pytest.approx(-sum(advantages) / 2, rel=1e-12)
