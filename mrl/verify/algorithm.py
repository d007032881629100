"""Checks of an advantage or a policy loss, built in or the user's own, on random batches in float64.

A result must not depend on masked tokens or on the division of the batch into micro-batches and ranks. Otherwise a run
of several devices would learn something else than a run of one. If the module of `NAME` defines `NAME_oracle`,
the formula in plain Python over lists, results must equal it.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mrl.algos.advantages import ADVANTAGES, AdvantageInputs, Advantages
from mrl.algos.losses import POLICY_LOSSES, PolicyTokens, TokenLosses
from mrl.config.algorithm import CHOOSING_LOSSES, AlgorithmConfig, LossConfig
from mrl.errors import NameUnknown
from mrl.registry import load_attribute
from mrl.verify.random_batch import RandomBatch

NUM_BATCHES = 50
TOLERANCE = 1e-6
"""Relative, and absolute around 0. Advantages may be float32."""


@dataclass(frozen=True)
class Finding:
    """One property that was checked, with the first batch that contradicts it."""

    name: str
    fault: str
    """Empty if the property holds."""


def verify_policy_loss(config: LossConfig) -> list[Finding]:
    """Check the configured policy loss."""
    checks: dict[str, Callable[[RandomBatch], str]] = {
        "one loss and one value of each report per token": lambda batch: _wrong_shape(batch, config),
        "masked tokens have no influence": lambda batch: _reads_masked(batch, config),
        "only the new log-probs have a gradient": lambda batch: _other_gradients(batch, config),
        "each row is independent of the others": lambda batch: _packed_otherwise(batch, config),
    }
    if (oracle := find_oracle(config.policy)) is not None:
        checks["equal to its oracle"] = lambda batch: _loss_differs(batch, config, oracle)
    return _run(checks)


def verify_advantage(config: AlgorithmConfig) -> list[Finding]:
    """Check the configured advantage estimator."""
    checks: dict[str, Callable[[RandomBatch], str]] = {
        "one finite advantage per token, 0 on masked tokens": lambda batch: _wrong_advantages(batch, config),
        "the order of the rows has no influence": lambda batch: _ordered_otherwise(batch, config),
        "the same on one rank and on two": lambda batch: _divided_otherwise(batch, config),
    }
    if (oracle := find_oracle(config.advantage)) is not None:
        checks["equal to its oracle"] = lambda batch: _advantages_differ(batch, config, oracle)
    return _run(checks)


def find_oracle(name: str) -> Callable[..., Any] | None:
    """Return the oracle in the module of the user's own function. Return None if the module has no oracle."""
    if ":" not in name:
        return None
    load_attribute(name)  # a wrong name is an error, not a missing oracle
    try:
        oracle: Callable[..., Any] = load_attribute(f"{name}_oracle")
    except NameUnknown:
        return None
    return oracle


def _run(checks: Mapping[str, Callable[[RandomBatch], str]]) -> list[Finding]:
    findings = []
    for name, check in checks.items():
        faults = ((seed, fault) for seed in range(NUM_BATCHES) if (fault := check(RandomBatch.of(seed))))
        seed, fault = next(faults, (0, ""))
        findings.append(Finding(name, f"random batch {seed}: {fault}" if fault else ""))
    return findings


def _loss(batch: RandomBatch, config: LossConfig) -> tuple[PolicyTokens, TokenLosses]:
    tokens = batch.tokens
    if config.policy in CHOOSING_LOSSES:
        tokens = replace(tokens, selected_T=tokens.advantages_T.detach() > 0)
    return tokens, POLICY_LOSSES.resolve(config.policy)(tokens, config, **config.options)


def _wrong_shape(batch: RandomBatch, config: LossConfig) -> str:
    _, losses = _loss(batch, config)
    if not isinstance(losses, TokenLosses):
        return f"returns {type(losses).__name__} instead of TokenLosses"
    if "ppo_kl" not in losses.reports_T:
        return "reports no ppo_kl, which the audit of every step reads"
    size = batch.rows.num_tokens
    for name, values_T in {"loss_T": losses.loss_T, **losses.reports_T}.items():
        if values_T.shape != (size,):
            return f"{name} has the shape {tuple(values_T.shape)} instead of ({size},)"
    return ""


def _masked_sum(losses: TokenLosses, mask_T: Tensor) -> Tensor:
    return torch.where(mask_T, losses.loss_T, 0.0).sum()


def _reads_masked(batch: RandomBatch, config: LossConfig) -> str:
    tokens, losses = _loss(batch, config)
    loss = _masked_sum(losses, tokens.mask_T)
    (gradient_T,) = torch.autograd.grad(loss, tokens.log_probs_T)
    if not bool(torch.isfinite(loss)):
        return f"the loss is {float(loss)}, though only masked tokens are not finite"
    if not bool(torch.isfinite(gradient_T).all()) or bool(gradient_T[~tokens.mask_T].any()):
        return "the gradient at masked tokens is not 0; use tokens.log_ratio_T and apply_mask"
    return ""


def _other_gradients(batch: RandomBatch, config: LossConfig) -> str:
    tokens, losses = _loss(batch, config)
    others = {"the old log-probs": tokens.old_log_probs_T, "the advantages": tokens.advantages_T}
    gradients = torch.autograd.grad(_masked_sum(losses, tokens.mask_T), list(others.values()), allow_unused=True)
    wrong = [name for name, gradient_T in zip(others, gradients, strict=True) if gradient_T is not None]
    return f"{' and '.join(wrong)} have a gradient; use tokens.advantage_T, or detach()" if wrong else ""


def _packed_otherwise(batch: RandomBatch, config: LossConfig) -> str:
    _, together = _loss(batch, config)
    alone = [_loss(batch.take([row]), config)[1].loss_T for row in range(len(batch.mask))]
    mask_T = batch.mask_T
    return _difference("loss in one pack and row by row", together.loss_T[mask_T], torch.cat(alone)[mask_T])


def _loss_differs(batch: RandomBatch, config: LossConfig, oracle: Callable[..., Any]) -> str:
    tokens, losses = _loss(batch, config)
    columns = {name: batch.written(batch.columns[name]) for name in ("log_probs", "old_log_probs", "advantages")}
    expected = [x for row in _ask(oracle, columns, config.options) for x in row]
    values = [x[0] if isinstance(x, tuple) else x for x in expected]
    expected_T = torch.tensor(values, dtype=torch.float64)
    fault = _difference("loss of function and oracle", losses.loss_T[tokens.mask_T], expected_T)
    if fault or not isinstance(next(iter(expected), None), tuple):
        return fault
    (gradient_T,) = torch.autograd.grad(_masked_sum(losses, tokens.mask_T), tokens.log_probs_T)
    slopes_T = torch.tensor([x[1] for x in expected], dtype=torch.float64)
    return _difference("gradient of function and oracle", gradient_T[tokens.mask_T], slopes_T)


def _advantages(batch: RandomBatch, config: AlgorithmConfig) -> Tensor:
    result: Advantages = _estimate(batch.inputs(), config)
    return result.advantages_T


def _estimate(inputs: AdvantageInputs, config: AlgorithmConfig) -> Any:
    with torch.no_grad():
        return ADVANTAGES.resolve(config.advantage)(inputs, config, **config.options)


def _wrong_advantages(batch: RandomBatch, config: AlgorithmConfig) -> str:
    result = _estimate(batch.inputs(), config)
    if not isinstance(result, Advantages):
        return f"returns {type(result).__name__} instead of Advantages"
    size, values_T = batch.rows.num_tokens, result.advantages_T
    if values_T.shape != (size,):
        return f"advantages_T has the shape {tuple(values_T.shape)} instead of ({size},)"
    if not bool(torch.isfinite(values_T).all()):
        return "some advantages are not finite, though scores and rewards are"
    return "masked tokens have an advantage; use apply_mask" if bool(values_T[~batch.mask_T].any()) else ""


def _ordered_otherwise(batch: RandomBatch, config: AlgorithmConfig) -> str:
    order = list(range(len(batch.mask)))[::-1]
    lengths = [len(row) for row in batch.mask]
    turned = torch.split(_advantages(batch.take(order), config), [lengths[row] for row in order])
    return _difference("advantages in two orders", _advantages(batch, config), torch.cat(turned[::-1]))


def _divided_otherwise(batch: RandomBatch, config: AlgorithmConfig) -> str:
    """Compare one rank with two, which wait for each other in every reduction."""
    shares = [list(range(len(batch.mask)))[rank::2] for rank in range(2)]
    barrier, sent, results = threading.Barrier(2, timeout=60), [torch.empty(0)] * 2, [torch.empty(0)] * 2

    def work(rank: int) -> None:
        def sum_over_ranks(x: Tensor) -> Tensor:
            sent[rank] = x
            barrier.wait()
            total = sent[0] + sent[1]
            barrier.wait()
            return total

        try:
            results[rank] = _estimate(batch.share(shares[rank], sum_over_ranks), config).advantages_T
        finally:
            if not results[rank].numel():
                barrier.abort()  # an error on this rank: the other must not wait

    ranks = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    lengths = [len(row) for row in batch.mask]
    by_row: list[Tensor] = [torch.empty(0)] * len(lengths)
    for share, result in zip(shares, results, strict=True):
        if result.numel() != sum(lengths[row] for row in share):
            return "a rank with some of the rows returns another number of advantages, or raised an error"
        for row, values in zip(share, torch.split(result, [lengths[row] for row in share]), strict=True):
            by_row[row] = values
    return _difference("advantages on one rank and on two", _advantages(batch, config), torch.cat(by_row))


def _advantages_differ(batch: RandomBatch, config: AlgorithmConfig, oracle: Callable[..., Any]) -> str:
    columns = {
        "scores": batch.scores,
        "uids": batch.uids,
        "baselines": batch.baselines,
        "num_tokens": [sum(row) for row in batch.mask],
        "rewards": batch.written(batch.rewards),
        "values": batch.written(batch.columns["values"]),
    }
    expected = []
    for row, answer in zip(batch.mask, _ask(oracle, columns, config.options), strict=True):
        expected += [answer] * sum(row) if isinstance(answer, int | float) else list(answer)
    expected_T = torch.tensor(expected, dtype=torch.float64)
    return _difference("advantages of function and oracle", _advantages(batch, config)[batch.mask_T], expected_T)


def _ask(oracle: Callable[..., Any], columns: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Call an oracle with the columns that its parameters name, and the options."""
    parameters = inspect.signature(oracle).parameters.values()
    wanted = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    if unknown := [name for name in wanted if name not in columns]:
        what = f"the oracle {oracle.__name__} has the parameter {unknown[0]}, which is no column"
        raise NameUnknown(what, fix=f"known columns: {', '.join(columns)}; options are keyword-only")
    return oracle(*(columns[name] for name in wanted), **options)


def _difference(of: str, one_T: Tensor, other_T: Tensor) -> str:
    one_T, other_T = one_T.detach().double(), other_T.detach().double()
    if one_T.shape != other_T.shape:
        return f"{of}: {one_T.numel()} and {other_T.numel()} values"
    wrong_T = ~torch.isclose(one_T, other_T, rtol=TOLERANCE, atol=TOLERANCE)
    if not bool(wrong_T.any()):
        return ""
    at = int(wrong_T.nonzero()[0])
    return f"{of} differ at {int(wrong_T.sum())} of {wrong_T.numel()} tokens; first: {one_T[at]:g} and {other_T[at]:g}"
