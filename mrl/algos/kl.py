"""KL between the policy and its reference: estimators per token, and the controller of its coefficient.

With d = log pi - log pi_ref of the sampled token, an estimator is a function of d alone. As a *value* (KL in the
reward) k1, k2 and k3 all estimate KL(pi || pi_ref), k1 and k3 without bias. As a *loss* their gradients differ:
on samples of pi the gradient of k2 is the gradient of the KL without bias, that of k3 is biased, and that of k1 is 0 on
average. `k1+`, `k3+` and `abs+` have the value of their namesake and the gradient of k2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mrl.algos.rows import Reduce, Rows, apply_mask, identity
from mrl.errors import ConfigError, MrlError, Problem
from mrl.registry import Registry

KlEstimator = Callable[[Tensor], Tensor]
KL_ESTIMATORS: Registry[KlEstimator] = Registry("KL estimator")

K3_LOG_BOUND = 20.0
K3_VALUE_BOUND = 10.0


def token_kl(name: str, log_probs_T: Tensor, ref_log_probs_T: Tensor, mask_T: Tensor) -> Tensor:
    """Return the KL of each token by the estimator of that name; 0 on masked tokens."""
    difference_T = apply_mask(log_probs_T, mask_T) - apply_mask(ref_log_probs_T, mask_T)
    return KL_ESTIMATORS.resolve(name)(difference_T)


@KL_ESTIMATORS.register("kl")
@KL_ESTIMATORS.register("k1")
def k1(d: Tensor) -> Tensor:
    """d."""
    return d


@KL_ESTIMATORS.register("abs")
def absolute(d: Tensor) -> Tensor:
    """|d|."""
    return d.abs()


@KL_ESTIMATORS.register("mse")
@KL_ESTIMATORS.register("k2")
def k2(d: Tensor) -> Tensor:
    """d^2 / 2."""
    return 0.5 * d.square()


@KL_ESTIMATORS.register("low_var_kl")
@KL_ESTIMATORS.register("k3")
def k3(d: Tensor) -> Tensor:
    """exp(-d) + d - 1, with d within +-20 and the value at most 10; where a bound holds the gradient is 0."""
    d = d.clamp(-K3_LOG_BOUND, K3_LOG_BOUND)
    return (torch.exp(-d) + d - 1).clamp(max=K3_VALUE_BOUND)


def with_gradient_of_k2(estimator: KlEstimator) -> KlEstimator:
    """Return the estimator's value, with k2's gradient d."""

    def straight_through(d: Tensor) -> Tensor:
        backward = k2(d)
        return estimator(d).detach() + backward - backward.detach()

    return straight_through


for _name, _estimator in (("k1", k1), ("abs", absolute), ("k3", k3)):
    KL_ESTIMATORS.register(f"{_name}+")(with_gradient_of_k2(_estimator))


def mean_row_kl(kl_T: Tensor, rows: Rows, mask_T: Tensor, sum_over_ranks: Reduce = identity) -> float:
    """Return the mean over all ranks' rows of the mean over a row's unmasked tokens, which steers the controller."""
    count_B = rows.count(mask_T)
    local = torch.stack([rows.mean(kl_T.detach().to(torch.float64), mask_T).sum(), (count_B > 0).sum().double()])
    total, num_rows = sum_over_ranks(local).tolist()
    return float(total / max(num_rows, 1.0))


class KLController(Protocol):
    """Holds the coefficient of the KL penalty; its state belongs in the checkpoint."""

    coef: float

    def update(self, kl: float, num_rows: int) -> None:
        """Take one step's measured KL over `num_rows` rows into account."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, as JSON values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""


@dataclass
class FixedKLController:
    """The coefficient stays what the configuration says, on resume too."""

    coef: float

    def update(self, kl: float, num_rows: int) -> None:
        """Nothing to learn."""

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "fixed"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        _check_kind(state, "fixed")


@dataclass
class AdaptiveKLController:
    """Steers the KL towards `target`: coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * num_rows / horizon_rows."""

    coef: float
    target: float
    horizon_rows: float

    def __post_init__(self) -> None:
        settings = (("coef", self.coef), ("target", self.target), ("horizon_rows", self.horizon_rows))
        problems = [Problem("kl", key, f"must be above 0, not {value}") for key, value in settings if not value > 0]
        if problems:
            raise ConfigError(problems)

    def update(self, kl: float, num_rows: int) -> None:
        """One step of the rule above; a KL that is no number is refused, it would stay in `coef` for ever."""
        if not math.isfinite(kl):
            raise MrlError(f"the measured KL is {kl}", where="adaptive KL controller", fix="look at the log-probs")
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.coef *= 1.0 + error * num_rows / self.horizon_rows

    def state_dict(self) -> dict[str, Any]:
        """Return the coefficient; target and horizon are the configuration's."""
        return {"kind": "adaptive", "coef": self.coef}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        _check_kind(state, "adaptive")
        self.coef = float(state["coef"])


def _check_kind(state: Mapping[str, Any], kind: str) -> None:
    if state.get("kind") != kind:
        raise MrlError(
            f"the checkpoint's KL controller is {state.get('kind')!r}, the configuration's is {kind!r}",
            fix="resume with the kind that the run began with, or start a new run from the weights",
        )
