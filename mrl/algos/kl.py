"""KL between the policy and its reference or teacher: estimators, divergences, and the coefficient's controller.

With d = log pi - log pi_ref of the sampled token, an estimator is a function of d alone. As a *value* (KL in the
reward), k1, k2 and k3 all estimate KL(pi

pi_ref), k1 and k3 without bias. As a *loss*, their gradients differ: on samples of pi, the gradient of k2 is an
unbiased gradient of the KL, that of k3 is biased, and that of k1 is 0 on average. `k1+`, `k3+` and `abs+` have the
value of their namesake and the gradient of k2.

In distillation, pi is the policy's and nu the teacher's distribution of the next token after the same tokens, both at
the sampling temperature. log pi(y) and log nu(y) of each token are enough for an advantage or an estimate; the
divergences use the whole vocabulary, or its likeliest tokens with all others as one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mrl.algos.rows import Reduce, Rows, apply_mask, at_least_float32, identity
from mrl.errors import ConfigError, MrlError, Problem
from mrl.registry import Registry

KlEstimator = Callable[[Tensor], Tensor]
KL_ESTIMATORS: Registry[KlEstimator] = Registry("KL estimator")

K3_LOG_BOUND = 20.0
K3_VALUE_BOUND = 10.0


def token_kl(name: str, log_probs_T: Tensor, ref_log_probs_T: Tensor, mask_T: Tensor) -> Tensor:
    """Return the KL of each token with the named estimator, 0 on masked tokens."""
    difference_T = apply_mask(log_probs_T, mask_T) - apply_mask(ref_log_probs_T, mask_T)
    return KL_ESTIMATORS.resolve(name)(difference_T)


@KL_ESTIMATORS.register("kl")
@KL_ESTIMATORS.register("k1")
def k1(d: Tensor) -> Tensor:
    """d = log pi - log pi_ref."""
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
    """exp(-d) + d - 1, with d limited to +-20 and the value to at most 10. The gradient is 0 beyond a limit."""
    d = d.clamp(-K3_LOG_BOUND, K3_LOG_BOUND)
    return (torch.exp(-d) + d - 1).clamp(max=K3_VALUE_BOUND)


def with_gradient_of_k2(estimator: KlEstimator) -> KlEstimator:
    """Return an estimator with the same value, but with k2's gradient d."""

    def straight_through(d: Tensor) -> Tensor:
        backward = k2(d)
        return estimator(d).detach() + backward - backward.detach()

    return straight_through


for _name, _estimator in (("k1", k1), ("abs", absolute), ("k3", k3)):
    KL_ESTIMATORS.register(f"{_name}+")(with_gradient_of_k2(_estimator))


def mean_row_kl(kl_T: Tensor, rows: Rows, mask_T: Tensor, sum_over_ranks: Reduce = identity) -> float:
    """Return the mean over all ranks' rows of the mean over a row's unmasked tokens, the controller's input."""
    count_B = rows.count(mask_T)
    local = torch.stack([rows.mean(kl_T.detach().to(torch.float64), mask_T).sum(), (count_B > 0).sum().double()])
    total, num_rows = sum_over_ranks(local).tolist()
    return float(total / max(num_rows, 1.0))


@dataclass
class KLController:
    """The coefficient of the KL penalty. Without a target, it always has the configured value, also after a resume.
    With a target, it controls the KL: coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * num_rows / horizon_rows."""

    coef: float
    target: float | None = None
    horizon_rows: float = 1.0

    def __post_init__(self) -> None:
        settings = (("coef", self.coef), ("target", self.target), ("horizon_rows", self.horizon_rows))
        problems = [
            Problem("kl", key, f"must be above 0, not {value}")
            for key, value in settings
            if self.target is not None and not (value is not None and value > 0)
        ]
        if problems:
            raise ConfigError(problems)

    @property
    def _kind(self) -> str:
        return "fixed" if self.target is None else "adaptive"

    def update(self, kl: float, num_rows: int) -> None:
        """Update the coefficient with one step's KL. Reject a KL that is not finite, which would stay in `coef`
        forever."""
        if self.target is None:
            return
        if not math.isfinite(kl):
            raise MrlError(f"the measured KL is {kl}", where="adaptive KL controller", fix="check the log-probs")
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.coef *= 1.0 + error * num_rows / self.horizon_rows

    def state_dict(self) -> dict[str, Any]:
        """Return the coefficient as JSON if it is adaptive. Target and horizon come from the configuration."""
        return {"kind": self._kind} | ({} if self.target is None else {"coef": self.coef})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("kind") != self._kind:
            raise MrlError(
                f"the checkpoint's KL controller is {state.get('kind')!r}, the configuration's is {self._kind!r}",
                fix="resume with the original kind, or start a new run from the weights",
            )
        if self.target is not None:
            self.coef = float(state["coef"])


def divergence(log_probs: Tensor, teacher_log_probs: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return each outcome's part d_v of the divergence, and g_v, its derivative by log pi_v with the other pi constant.

    beta 0 is the forward KL(nu

    pi), 1 the reverse KL(pi

    nu). Values between give the generalized Jensen-Shannon divergence beta KL(nu

    m) + (1 - beta) KL(pi

    m) with m = beta nu + (1 - beta) pi. The gradient of a logit is g_v - pi_v sum(g).
    """
    if beta == 0:
        teacher = teacher_log_probs.exp()
        return teacher * (teacher_log_probs - log_probs), -teacher
    if beta == 1:
        probs = log_probs.exp()
        parts = probs * (log_probs - teacher_log_probs)
        return parts, parts + probs
    mixed = torch.logaddexp(teacher_log_probs + math.log(beta), log_probs + math.log1p(-beta))
    own = (1 - beta) * log_probs.exp() * (log_probs - mixed)
    return own + beta * teacher_log_probs.exp() * (teacher_log_probs - mixed), own


def distilled_advantages(
    advantages_T: Tensor,
    log_probs_T: Tensor,
    teacher_log_probs_T: Tensor,
    mask_T: Tensor,
    coef: float,
    spans_T: Tensor | None = None,
) -> Tensor:
    """Return A_t - coef (log pi(y_t) - log nu(y_t)): k1 of the reverse KL as a reward of the token, without a gradient.

    Its expected policy gradient is that of the KL at each position separately: a token is not charged for later tokens.

    With spans, each token gets D_s, the sum of the difference over its span s. A span is one action with the log-prob
    sum_t log pi(y_t), so the gradient of its KL is E[D_s grad log pi(s)] = E[sum_t D_s grad log pi(y_t)]. D_s / n for
    each of n tokens would weigh a span by 1 / n, and D_s for the last token would leave out the gradient of the others.

    Whether a sample has such a teacher depends on the sample. If it had no term, the policy would learn to avoid the
    teacher, because D_s is above 0 on average. Its tokens get -c, where c is the mean of sum_s log nu over the tokens
    of the others. This is at least their mean D_s, because log pi is at most 0.
    """
    log_ratio_T = apply_mask(log_probs_T, mask_T) - apply_mask(teacher_log_probs_T, mask_T)
    if spans_T is not None:
        log_ratio_T = span_differences(log_ratio_T, teacher_log_probs_T, spans_T)
    return at_least_float32(advantages_T) - coef * log_ratio_T.detach()


UNTAUGHT, CONTINUES, BEGINS = 0, 1, 2
"""Values of the column `teacher_spans`: a token without a teacher, a later token of a span, its first token."""


def span_differences(log_ratio_T: Tensor, teacher_log_probs_T: Tensor, spans_T: Tensor) -> Tensor:
    """Return the difference for which each token is charged: its span's, or -c without a teacher."""
    return span_sums(log_ratio_T, spans_T) - torch.where(spans_T == UNTAUGHT, teacher_log_probs_T, 0.0)


def span_sums(values_T: Tensor, spans_T: Tensor) -> Tensor:
    """Return for each token the sum over its span. A token without a teacher is a separate span."""
    number_T = (spans_T != CONTINUES).long().cumsum(0) - 1
    values64_T = values_T.double()  # in which sums of a few values do not depend on their order on a GPU
    return torch.zeros_like(values64_T).index_add(0, number_T, values64_T)[number_T].to(values_T.dtype)
