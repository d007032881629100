"""Rows of a step, and the expected results of the workers by the formulas of `tests/reference`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from mrl.config.algorithm import AlgorithmConfig, CorrectionConfig, LossConfig
from tests.reference import formulas

Reports = dict[str, float]


@dataclass
class Row:
    """One sample. `columns` have a value per response token, masked ones included."""

    uid: str
    prompt: list[int]
    response: list[int]
    mask: list[bool]
    score: float
    baseline: float
    columns: dict[str, Tensor] = field(default_factory=dict)

    def written(self, name: str) -> Tensor:
        """Return a column without the tokens that the model did not write."""
        return self.columns[name][torch.tensor(self.mask, dtype=torch.bool)]

    def whole(self, values: Sequence[float]) -> list[float]:
        """Return values of the written tokens, and 0 on the others."""
        left = iter(values)
        return [next(left) if is_written else 0.0 for is_written in self.mask]


def plain_row(row: Row, **columns: Tensor) -> formulas.Row:
    """Return the row as the formulas take it: without the tokens that the model did not write.

    `columns` replace those of the row.
    """
    written = torch.tensor(row.mask, dtype=torch.bool)
    own = {name.removesuffix("_log_probs") if "rollout" in name else name: row.written(name) for name in row.columns}
    given = {name: values[written] for name, values in columns.items()}
    rollout = own.get("rollout", torch.empty(0))
    return formulas.Row(
        0,
        row.uid,
        "",
        row.prompt,
        row.response,
        rollout,
        row.score,
        written,
        row.baseline,
        own | given,
        rewards_of(row),
    )


def rewards_of(row: Row) -> list[tuple[float, float]]:
    """Return weight and score of two reward functions; all answers to the prompt "a" have the same second score."""
    return [(2.0, row.score), (-0.5, 0.25 if row.uid == "a" else float(len(row.response) % 3))]


def advantages_of(
    rows: Sequence[Row], config: AlgorithmConfig, kl_coef: float
) -> tuple[list[list[float]], list[list[float]] | None, float]:
    """Return advantages and, with a critic, returns of the written tokens of each row, and the mean KL."""
    plain = [plain_row(row) for row in rows]
    kl, _ = formulas.add_advantages(plain, asdict(config), kl_coef)
    returns = [row.columns["returns"].tolist() for row in plain] if config.advantage == "gae" else None
    return [row.columns["advantages"].tolist() for row in plain], returns, kl


def actor_loss(
    rows: Sequence[Row], config: AlgorithmConfig, horizon_tokens: int, given: Mapping[str, list[Tensor]]
) -> tuple[Tensor, Reports]:
    """Return the loss of an update of these rows, and its reports.

    `given` are the model's outputs for each row's tokens.
    """
    algorithm = asdict(config)
    plain = [plain_row(row) for row in rows]
    num_tokens = sum(row.num_written for row in plain)
    terms, reports = dict[str, Tensor](), Counter[str]()
    for number, plain_one in enumerate(plain):
        plain_one.row_id = number
    formulas.select_tokens(algorithm["loss"], plain)
    weights = formulas.token_weights(_config(algorithm, horizon_tokens), plain)
    for row, weight, log_probs, entropy in zip(plain, weights, given["log_probs"], given["entropy"], strict=True):
        if not row.num_written:
            continue
        log_probs, entropy = log_probs[row.written], entropy[row.written]
        row.columns.setdefault("old_log_probs", log_probs.detach())
        loss = algorithm["loss"] | {"old_log_probs": config.old_log_probs}
        tokens, figures = formulas.policy_loss(loss, None, log_probs, row)
        corrected: Any = 1.0 if config.correction is None else formulas.correction(algorithm["correction"], row)
        summed = {"pg_loss": weight * (corrected * tokens).sum()}
        if config.kl.where in ("loss", "both"):
            estimate = formulas.kl_estimate(config.kl.in_loss, log_probs, row.columns["ref_log_probs"])
            summed["kl_loss"] = weight * (corrected * estimate).sum()
        if config.loss.entropy_coef:
            summed["entropy"] = weight * entropy.sum()
        terms = {name: terms.get(name, 0.0) + value for name, value in summed.items()}
        figures["entropy_mean"] = entropy.detach()
        if "rollout" in row.columns:
            figures["rollout_diff"] = (log_probs.detach() - row.columns["rollout"]).abs()
        reports.update({name: float(values.sum()) / num_tokens for name, values in figures.items()})
    coefficients = {"pg_loss": 1.0, "kl_loss": config.kl.coef, "entropy": -config.loss.entropy_coef}
    total = torch.stack([coefficients[name] * term for name, term in terms.items()]).sum()
    named = {name: float(term.detach()) for name, term in terms.items()}
    return total, {**reports, **named, "loss": float(total.detach()), "tokens": float(num_tokens)}


def critic_loss(
    rows: Sequence[Row], loss: LossConfig, horizon_tokens: int, given: Sequence[Tensor]
) -> tuple[Tensor, Reports]:
    """Return the loss of an update of these rows, and its reports. `given` are the values of each row's tokens."""
    plain = [plain_row(row) for row in rows]
    num_tokens = sum(row.num_written for row in plain)
    total, reports = torch.zeros((), dtype=torch.float64), Counter[str]()
    weights = formulas.token_weights(_config({"loss": asdict(loss)}, horizon_tokens), plain)
    for row, weight, values in zip(plain, weights, given, strict=True):
        of_tokens, figures = formulas.value_loss(loss.value_clip, values[row.written], row)
        total = total + weight * of_tokens.sum()
        reports.update({name: float(figure.sum()) / num_tokens for name, figure in figures.items()})
    return total, {**reports, "loss": float(total.detach()), "vf_loss": float(total.detach())}


def correction_reports(rows: Sequence[Row], log_probs: Sequence[Tensor], config: CorrectionConfig) -> Reports:
    """Return figures of the correction over the written tokens of all rows."""
    return _unprefixed(formulas.correction_figures(asdict(config), _with_log_probs(rows, log_probs)))


def mismatch_of(rows: Sequence[Row], log_probs: Sequence[Tensor]) -> Reports:
    """Return how much engine and trainer differ: means over written tokens, or over rows that have any."""
    return _unprefixed(formulas.mismatch(_with_log_probs(rows, log_probs)))


def _with_log_probs(rows: Sequence[Row], log_probs: Sequence[Tensor]) -> list[formulas.Row]:
    pairs = zip(rows, log_probs, strict=True)
    return [plain_row(row, old_log_probs=of_row.double()) for row, of_row in pairs]


def _config(algorithm: dict[str, Any], horizon_tokens: int) -> dict[str, Any]:
    return {"algorithm": algorithm, "rollout": {"max_response_tokens": horizon_tokens}}


def _unprefixed(figures: Reports) -> Reports:
    return {name.removeprefix("mismatch/"): value for name, value in figures.items()}
