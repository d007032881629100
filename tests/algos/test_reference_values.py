"""Numbers that other trainers' functions give for small inputs, known before mrl was written.

Where mrl means something else, the row says so (`INTENDED`): a group of one has advantage 0 here, where verl hands out
its raw score (and its two RLOO versions disagree).
"""

from __future__ import annotations

import pytest
import torch

from mrl.algos.advantages import AdvantageInputs, estimate_advantages, whiten
from mrl.algos.aggregate import LossNormalizer
from mrl.algos.groups import Outcomes
from mrl.algos.kl import KLController, token_kl
from mrl.algos.losses import PolicyTokens, ValueTokens
from mrl.algos.objectives import actor_objective, critic_objective
from mrl.algos.rows import Rows
from mrl.config.algorithm import AlgorithmConfig, LossConfig

F64 = torch.float64
LOG_PROBS = [-0.5, -1.2, -0.3, -2.0, -0.9, -0.1, -1.5, -0.7]
OLD = [-0.6, -1.0, -0.35, -2.4, -0.7, -0.15, -1.5, -0.2]
REF = [-0.4, -1.5, -0.3, -1.8, -1.0, -0.2, -1.1, -0.7]
MASK = torch.tensor([1, 1, 1, 0, 1, 1, 1, 1], dtype=torch.bool)
ADVANTAGES = [1.0, 1.0, 1.0, 0.0, -0.5, -0.5, -0.5, -0.5]
TWO_ROWS = Rows.of([4, 4])
INTENDED = 0.0
"""Replaces the raw score that verl gives for a group of one."""


def tensor(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


def policy_tokens() -> PolicyTokens:
    return PolicyTokens(TWO_ROWS, MASK, tensor(LOG_PROBS).requires_grad_(), tensor(OLD), tensor(ADVANTAGES))


def objective(name: str, mode: str, tokens: PolicyTokens):  # type: ignore[no-untyped-def]
    norm = LossNormalizer.of(mode, tokens.rows, tokens.mask_T)
    return actor_objective(tokens, LossConfig(policy=name), norm)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("k1", [-0.1, 0.3, 0.0, -0.2, 0.1, 0.1, -0.4, 0.0]),
        ("k2", [0.005, 0.045, 0.0, 0.02, 0.005, 0.005, 0.08, 0.0]),
        ("k3", [0.0051709, 0.0408182, 0.0, 0.0214028, 0.0048374, 0.0048374, 0.0918247, 0.0]),
        ("k3+", [0.0051709, 0.0408182, 0.0, 0.0214028, 0.0048374, 0.0048374, 0.0918247, 0.0]),
    ],
)
def test_kl(name: str, expected: list[float]) -> None:
    found = token_kl(name, tensor(LOG_PROBS), tensor(REF), torch.ones(8, dtype=torch.bool))
    assert found.tolist() == pytest.approx(expected, abs=5e-8)


@pytest.mark.parametrize(("kl", "expected"), [(9.0, 0.201024), (3.0, 0.1999948)])
def test_adaptive_kl(kl: float, expected: float) -> None:
    controller = KLController(0.2, target=6.0, horizon_rows=10_000)
    controller.update(9.0, 256)
    if kl == 3.0:
        controller.update(3.0, 256)
    assert controller.coef == pytest.approx(expected, abs=5e-8)


@pytest.mark.parametrize(
    ("name", "mode", "expected"),
    [
        ("ppo", "token-mean", -0.1628817),
        ("gspo", "seq-mean-token-mean", -0.2792317),
        ("cispo", "token-mean", 0.0570645),
        ("gpg", "token-mean", 0.0571429),
        ("gmpo", "seq-mean-token-mean", -0.262681),
    ],
)
def test_policy_losses(name: str, mode: str, expected: float) -> None:
    found = objective(name, mode, policy_tokens())
    assert found.loss.item() == pytest.approx(expected, abs=5e-8)


def test_ppo_gradient_and_reports() -> None:
    tokens = policy_tokens()
    found = objective("ppo", "token-mean", tokens)
    (gradient_T,) = torch.autograd.grad(found.loss, tokens.log_probs_T)
    expected = [-0.1578816, -0.1169615, -0.1501816, 0.0, 0.0584808, 0.0750908, 0.0714286, 0.0]
    assert gradient_T.tolist() == pytest.approx(expected, abs=5e-8)
    assert found.reports["pg_clipfrac"].item() == pytest.approx(1 / 7)
    assert found.reports["ppo_kl"].item() == pytest.approx(0.1)


def test_dual_clip() -> None:
    one = Rows.of([1])
    log_probs_T = tensor([-0.5]).requires_grad_()
    tokens = PolicyTokens(one, torch.ones(1, dtype=torch.bool), log_probs_T, tensor([-3.0]), tensor([-1.0]))
    found = objective("ppo", "token-mean", tokens)
    assert found.loss.item() == pytest.approx(3.0)
    assert torch.autograd.grad(found.loss, log_probs_T)[0].item() == 0.0


def test_value_loss() -> None:
    mask_T = torch.tensor([1, 1, 1, 0], dtype=torch.bool)
    tokens = ValueTokens(mask_T, tensor([0.5, 0.9, 0.1, 0]), tensor([0.4] * 4), tensor([1, 1, 0, 0]))
    rows = Rows.of([4])
    found = critic_objective(tokens, rows, LossNormalizer.of("token-mean", rows, mask_T), clip=0.2)
    assert found.loss.item() == pytest.approx(0.075)
    assert found.reports["vf_clipfrac"].item() == pytest.approx(2 / 3)


def test_gae() -> None:
    mask_T = torch.tensor([1, 1, 1, 0, 1, 1, 1, 1], dtype=torch.bool)
    # verl's vector has V = .4 on the masked fourth token and a reward of 1 on the third.
    rewards_T, values_T = tensor([0, 0, 1, 0, 0, 0, 0, 0.5]), tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.4, 0.3, 0.2])
    found = estimate_advantages(
        AdvantageInputs(TWO_ROWS, mask_T, rewards_T, values_T), AlgorithmConfig(advantage="gae", gamma=0.99, lam=0.95)
    )
    assert found.returns_T is not None
    returns = [0.9084067, 0.95535, 1.0, 0.4584784, 0.4664311, 0.48015, 0.5]
    advantages = [1.1697199, 1.0193996, 0.8625819, -1.2382982, -0.9324466, -0.6102579, -0.2706987]
    assert found.returns_T[mask_T].tolist() == pytest.approx(returns, abs=5e-8)
    assert found.advantages_T[mask_T].tolist() == pytest.approx(advantages, abs=1e-7)


def test_gae_over_observations() -> None:
    mask_T = torch.tensor([0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 0], dtype=torch.bool)
    rewards_T = tensor([0, 0, 0.1, 0.1, 0.1, 0, 0, 0.1, 1.0, 0, 0])
    values_T = tensor([7, 7, 4, 5, 6, -3, 2, 7, 9, 0, 0])
    found = estimate_advantages(
        AdvantageInputs(Rows.of([11]), mask_T, rewards_T, values_T),
        AlgorithmConfig(advantage="gae", gamma=0.9, lam=0.8),
    )
    assert found.returns_T is not None
    assert found.returns_T[mask_T].tolist() == pytest.approx([3.4653491, 3.424096, 3.1168, 2.44, 1.0], abs=5e-8)


UIDS = ["x", "x", "x", "y", "y", "z"]
SCORES = [1.0, 0.0, 0.5, 1.0, 2.0, 0.25]
LENGTHS = [4, 4, 3, 4, 2, 4]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", [0.999998, -0.999998, 0.0, -0.7071058, 0.7071058, INTENDED]),
        ("dr_grpo", [0.5, -0.5, 0.0, -0.5, 0.5, INTENDED]),
        ("rloo", [0.75, -0.75, 0.0, -1.0, 1.0, INTENDED]),
        ("opo", [0.5, -0.5, 0.0, -0.3333333, 0.6666667, INTENDED]),
        ("gpg", [0.6, -0.6, 0.0, -0.6, 0.6, INTENDED]),
    ],
)
def test_group_advantages(name: str, expected: list[float]) -> None:
    rows = Rows.of(LENGTHS)
    outcomes = Outcomes(tensor(SCORES), UIDS, rows.lengths_B)
    inputs = AdvantageInputs(rows, torch.ones(rows.num_tokens, dtype=torch.bool), batch=outcomes)
    found_T = estimate_advantages(inputs, AlgorithmConfig(advantage=name)).advantages_T
    assert found_T[rows.starts_B].tolist() == pytest.approx(expected, abs=1e-6)
    assert torch.equal(found_T, rows.expand(found_T[rows.starts_B]))


def test_optimal_token_baseline() -> None:
    rows = Rows.of(LENGTHS)
    mask_T = torch.ones(rows.num_tokens, dtype=torch.bool)
    norms = [0.5, 0.25, 0.0, 1.25, 0.75, 0.5, 1.0, 0.25, 0.25, 0.25, 0.5]
    norms += [1.0, 0.5, 0.25, 0.25, 0.5, 1.5, 1.0, 1.0, 1.0, 1.0]
    outcomes, rewards_T = Outcomes(tensor(SCORES), UIDS, rows.lengths_B), torch.zeros(rows.num_tokens, dtype=F64)
    rewards_T[rows.last_token(mask_T)] = tensor(SCORES)
    inputs = AdvantageInputs(rows, mask_T, rewards_T, batch=outcomes, score_norms_T=tensor(norms))
    found_T = estimate_advantages(inputs, AlgorithmConfig(advantage="optimal_token_baseline")).advantages_T
    expected = [0.5833333, 0.6, 0.6875, 0.5555556, -0.4166667, -0.4, -0.3125, -0.4444444, 0.0833333, 0.1, 0.1875]
    expected += [-0.3333333, -0.5714286, 0.0, 0.0, 0.6666667, 0.4285714, *[INTENDED] * 4]
    assert found_T.tolist() == pytest.approx(expected, abs=1e-6)


def test_reinforce_plus_plus_baseline() -> None:
    # The reference's batch has a group of one, centered to its raw .25: take its centered scores as given.
    rows = Rows.of(LENGTHS)
    centered_T = rows.expand(tensor([0.5, -0.5, 0.0, -0.5, 0.5, 0.25]))
    found_T = whiten(centered_T, torch.ones(rows.num_tokens, dtype=torch.bool))
    expected = [1.1547005, -1.1547005, 0.0, -1.1547005, 1.1547005, 0.5773503]
    assert found_T[rows.starts_B].tolist() == pytest.approx(expected, abs=5e-7)


def test_reinforce_plus_plus_returns() -> None:
    rows = Rows.of([4, 2])
    inputs = AdvantageInputs(rows, torch.ones(6, dtype=torch.bool), tensor([0, 0, 0, 1, 0, 2]))
    found = estimate_advantages(inputs, AlgorithmConfig(advantage="reinforce_plus_plus", gamma=0.9))
    assert found.returns_T is not None
    assert found.returns_T.tolist() == pytest.approx([0.729, 0.81, 0.9, 1.0, 1.8, 2.0])


def test_reinforce_plus_plus_over_observations() -> None:
    mask_T = torch.tensor([1, 0, 0, 1, 1], dtype=torch.bool)
    inputs = AdvantageInputs(Rows.of([5]), mask_T, tensor([1.5, 0, 0, 0.75, 0.5]))
    found = estimate_advantages(inputs, AlgorithmConfig(advantage="reinforce_plus_plus", gamma=0.5))
    assert found.returns_T is not None
    assert found.returns_T.tolist() == pytest.approx([2.0, 0.0, 0.0, 1.0, 0.5])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 4.8333333),
        ("seq-mean-token-sum", 14.5),
        ("seq-mean-token-mean", 4.0),
        ("seq-mean-token-sum-norm", 3.625),
        ("token-sum", 29.0),
    ],
)
def test_aggregation(mode: str, expected: float) -> None:
    rows = Rows.of([4, 4, 4])
    mask_T = torch.tensor([1, 1, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0], dtype=torch.bool)
    norm = LossNormalizer.of(mode, rows, mask_T, horizon_tokens=4)
    loss = norm.aggregate(tensor([1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9]), rows, mask_T)
    assert loss.item() == pytest.approx(expected, abs=5e-8)
