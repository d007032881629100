"""Divergences computed in vocabulary tiles equal those of whole distributions, gradients too, on one rank or many."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mrl.engine.vocab_divergence import Teacher, TeacherHead, likeliest_tokens, token_divergence
from mrl.engine.vocab_head import HeadOptions
from mrl.verify.spawn import run_distributed

T, H, HT, V, VOCAB, K = 11, 8, 6, 40, 37, 5  # the last three columns of the weights are padding
BETAS = [0.0, 0.1, 0.5, 0.9, 1.0]
Results = tuple[Tensor, Tensor, Tensor, Tensor]


class Case:
    """Inputs in float64, and results from whole distributions."""

    def __init__(self, temperature: float = 0.7, scale: float = 1.0) -> None:
        chance = torch.Generator().manual_seed(0)
        self.temperature = temperature
        shapes = ((T, H), (V, H), (T, HT), (V, HT))
        made = [scale * torch.randn(shape, dtype=torch.float64, generator=chance) for shape in shapes]
        self.hidden, self.weight, self.teacher_hidden, self.teacher_weight = made
        self.d_divergence = torch.randn(T, dtype=torch.float64, generator=chance)

    def options(self, tile_columns: int | None = 7, group: dist.ProcessGroup | None = None) -> HeadOptions:
        return HeadOptions(VOCAB, self.temperature, "none", group, tile_columns)

    def log_probs(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return torch.log_softmax((hidden @ weight.t())[:, :VOCAB] / self.temperature, dim=1)

    def expected(self, beta: float, k: int | None) -> Results:
        """Compute the definition, over the vocabulary or over k tokens and the rest; then gradients by autograd."""
        hidden, weight = self.hidden.clone().requires_grad_(), self.weight.clone().requires_grad_()
        student, teacher = self.log_probs(hidden, weight), self.log_probs(self.teacher_hidden, self.teacher_weight)
        mass = torch.ones(T, dtype=torch.float64)
        if k is not None:
            ids = teacher.topk(k, dim=1).indices
            student, teacher = coarse(student, ids), coarse(teacher, ids)
            mass = student[:, :k].exp().sum(1).detach()
        p, q = student.exp(), teacher.exp()
        if beta == 0:
            found = torch.xlogy(q, q / p).sum(1)
        elif beta == 1:
            found = torch.xlogy(p, p / q).sum(1)
        else:
            m = beta * q + (1 - beta) * p
            found = (beta * torch.xlogy(q, q / m) + (1 - beta) * torch.xlogy(p, p / m)).sum(1)
        gradients = torch.autograd.grad(found @ self.d_divergence, (hidden, weight))
        return found.detach(), mass, *gradients

    def teacher(self, k: int | None, rows: slice, options: HeadOptions) -> Teacher:
        head = TeacherHead(self.teacher_hidden, self.teacher_weight[rows])
        return head if k is None else likeliest_tokens(head.hidden_TH, head.weight_VH, k, options)

    def found(self, beta: float, k: int | None, options: HeadOptions, rows: slice = slice(None)) -> Results:
        hidden, weight = self.hidden.clone().requires_grad_(), self.weight[rows].clone().requires_grad_()
        found, mass = token_divergence(hidden, weight, self.teacher(k, rows, options), beta, options)
        return found.detach(), mass, *torch.autograd.grad(found @ self.d_divergence, (hidden, weight))


def coarse(log_probs: Tensor, ids: Tensor) -> Tensor:
    """Return log-probs of these tokens, and of all others together if there are any."""
    chosen, others = log_probs.gather(1, ids), log_probs.scatter(1, ids, -torch.inf)
    return chosen if ids.shape[1] == VOCAB else torch.cat([chosen, others.logsumexp(1, keepdim=True)], 1)


def worst(found: Results, expected: Results) -> float:
    return max((one - other).abs().max().item() for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("beta", "k", "tile_columns"),
    [
        (beta, k, (1, 7, 37, None)[(row + column) % 4])
        for row, beta in enumerate(BETAS)
        for column, k in enumerate((None, 1, K, VOCAB))
    ],
)
def test_equals_the_definition_whatever_the_tiles(beta: float, k: int | None, tile_columns: int | None) -> None:
    case = Case()
    assert worst(case.found(beta, k, case.options(tile_columns)), case.expected(beta, k)) < 1e-12


@pytest.mark.parametrize(("beta", "k"), [(0.0, K), (0.5, None), (0.5, K), (1.0, None)])
def test_gradients_against_finite_differences(beta: float, k: int | None) -> None:
    case = Case()
    for name in ("hidden", "teacher_hidden", "d_divergence"):
        setattr(case, name, getattr(case, name)[:3])
    teacher = case.teacher(k, slice(None), case.options())

    def of_student(hidden: Tensor, weight: Tensor) -> Tensor:
        return token_divergence(hidden, weight, teacher, beta, case.options())[0]

    assert torch.autograd.gradcheck(of_student, (case.hidden.requires_grad_(), case.weight.requires_grad_()))


@pytest.mark.parametrize(("beta", "k"), [(0.0, K), (0.1, None), (0.5, VOCAB), (0.9, K), (1.0, None)])
def test_who_equals_the_teacher_has_nothing_to_learn(beta: float, k: int | None) -> None:
    """Loss and gradient are zero. A divergence over the likeliest tokens is never larger than over all."""
    case = Case()
    apart = case.found(beta, k, case.options())
    assert (apart[0] >= 0).all()
    assert (apart[0] <= case.found(beta, None, case.options())[0] + 1e-12).all()
    case.teacher_hidden, case.teacher_weight = case.hidden, case.weight
    found, _, d_hidden, d_weight = case.found(beta, k, case.options())
    assert max(float(each.abs().max()) for each in (found, d_hidden, d_weight)) < 1e-12


def test_a_student_that_is_surer_than_the_teacher_of_its_likeliest_still_learns() -> None:
    """Without the remaining tokens this forward KL is negative, and clamping it at 0 would remove its gradient."""
    weight = torch.eye(3, dtype=torch.float64)
    student = torch.tensor([[4.0, 4.0, 0.0]], dtype=torch.float64).requires_grad_()
    options = HeadOptions(3, 1.0, "none", None)
    teacher = likeliest_tokens(torch.tensor([[1.0, 1.0, 0.0]], dtype=torch.float64), weight, 2, options)
    mine = student.detach().log_softmax(1)[:, :2]
    assert (teacher.log_probs_TK.exp() * (teacher.log_probs_TK - mine)).sum() < 0
    found, mass = token_divergence(student, weight, teacher, 0.0, options)
    found.sum().backward()
    assert found > 0.05
    assert mass == pytest.approx(float(mine.exp().sum()))
    assert student.grad is not None
    assert student.grad[0, 2] < -0.1, "the rest grows"


def test_the_rest_is_found_where_it_is_lost_in_rounding() -> None:
    """In float32, 1 - P is 0 for a teacher that is certain to within 1e-9."""
    hidden = torch.tensor([[20.7, 0.0, 0.0, 0.0]])
    teacher = likeliest_tokens(hidden, torch.eye(4), 1, HeadOptions(4, 1.0, "none", None))
    exact = torch.log_softmax(hidden.double(), 1)[0, 1:].logsumexp(0)
    assert float(teacher.rest_T[0]) == pytest.approx(float(exact), abs=1e-5)
    for beta in BETAS:
        student = hidden.clone().requires_grad_()
        found, _ = token_divergence(student, torch.eye(4), teacher, beta, HeadOptions(4, 1.0, "none", None))
        found.sum().backward()
        assert student.grad is not None
        assert found.abs() < 1e-6
        assert student.grad.abs().max() < 1e-6


def test_no_tokens() -> None:
    case = Case()
    for name in ("hidden", "teacher_hidden", "d_divergence"):
        setattr(case, name, getattr(case, name)[:0])
    for k in (None, K):
        found, mass, d_hidden, d_weight = case.found(0.5, k, case.options())
        assert found.shape == mass.shape == (0,)
        assert d_hidden.shape == (0, H)
        assert not d_weight.any()


def test_no_matrix_of_all_logits_ever_stands() -> None:
    """The largest tensor has the columns of one tile."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        columns = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            made = func(*args, **(kwargs or {}))
            for each in made if isinstance(made, tuple) else (made,):
                if isinstance(each, Tensor) and each.ndim == 2 and each.shape[0] == T:
                    self.columns = max(self.columns, each.shape[1])
            return made

    case = Case()
    for k in (None, K):
        hidden = case.hidden.clone().requires_grad_()
        with Largest() as seen:
            teacher = case.teacher(k, slice(None), case.options(9))
            found, _ = token_divergence(hidden, case.weight, teacher, 0.5, case.options(9))
            found.sum().backward()
        assert 9 <= seen.columns <= 9 + K


def compare_rank() -> None:
    torch.set_num_threads(1)
    rank = dist.get_rank()
    case, rows = Case(), V // dist.get_world_size()
    mine = slice(rank * rows, (rank + 1) * rows)
    group = dist.group.WORLD
    for k in (None, K, VOCAB):
        for beta in BETAS:
            found, mass, d_hidden, d_weight = case.found(beta, k, case.options(7, group), mine)
            dist.all_reduce(d_hidden)
            expected = case.expected(beta, k)
            assert worst((found, mass, d_hidden, d_weight), (*expected[:3], expected[3][mine])) < 1e-12, (k, beta)


def test_ranks_that_share_the_vocabulary_say_the_same() -> None:
    run_distributed(4, compare_rank, timeout_s=60)


def test_float32_rounds_as_it_must() -> None:
    case = Case()
    expected = case.expected(1.0, K)
    for name in ("hidden", "weight", "teacher_hidden", "teacher_weight", "d_divergence"):
        setattr(case, name, getattr(case, name).float())
    assert worst(case.found(1.0, K, case.options()), expected) < 2e-4
