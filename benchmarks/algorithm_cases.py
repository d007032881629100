"""Random cases for `algorithms.py`.

A case is the peers' input: padded arrays [rows, width] with `mask`, arrays per row, and numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mrl.algos.aggregate import LossNormalizer
from mrl.algos.groups import Outcomes
from mrl.algos.rows import Rows

Outputs = dict[str, Tensor | float | list[float]]
Function = Callable[["Packed"], Outputs]
VOCABULARY = 11


def make_case(seed: int) -> dict[str, Any]:
    """Create groups of 2 to 4 rows in shuffled order, with observation tokens and some extreme log-ratios.

    No row is masked.
    """
    rng = np.random.default_rng(seed)
    uids = [f"prompt-{group}" for group in range(rng.integers(2, 4)) for _ in range(rng.integers(2, 5))]
    rng.shuffle(uids)
    num_rows, width = len(uids), 9
    lengths = rng.integers(1, width + 1, num_rows)
    inside = np.arange(width) < lengths[:, None]
    mask = inside & (rng.random((num_rows, width)) < 0.8)
    mask[np.arange(num_rows), 0] = True
    last = width - 1 - np.argmax(mask[:, ::-1], axis=1)
    # Odd eighths: exact in the float32 of verl's vectorized GRPO, never 0, all different.
    scores = rng.permutation(np.arange(-31, 32, 2))[:num_rows] / 8
    log_probs = -np.abs(rng.normal(size=mask.shape))

    def near(scale: float, far: float = 20.0) -> NDArray[np.float64]:
        factor = np.where(rng.random(mask.shape) < 0.1, far, 1.0)
        return np.asarray(log_probs + rng.normal(size=mask.shape) * scale * factor)

    noise = {name: rng.normal(size=mask.shape) for name in ("advantages", "values", "old_values", "returns")}
    on_last = np.zeros(mask.shape)
    on_last[np.arange(num_rows), last] = scores
    case: dict[str, Any] = {
        **noise,
        "lengths": lengths,
        "mask": mask.astype(np.float64),
        "log_probs": log_probs,
        "old": near(0.3),
        "ref": near(0.8),
        "rollout": near(0.3),
        "old_near": near(0.3, far=1.0),
        "ref_near": near(0.3, far=1.0),
        "rewards": rng.normal(size=mask.shape) * mask,
        "scores": scores,
        "scores_on_last": on_last,
        "row_advantages": rng.normal(size=num_rows),
        "baselines": rng.normal(size=num_rows),
        "weights": rng.uniform(0.1, 2.0, mask.shape),
        "logits": rng.normal(size=(*mask.shape, VOCABULARY)) * 2,
        "uids": uids,
        "long_lengths": rng.integers(60, 140, 8).tolist(),
        "gamma": float(rng.choice([1.0, 0.9])),
        "lam": float(rng.choice([1.0, 0.8])),
        "clip_low": 0.15,
        "clip_high": 0.28,
        "dual_clip": 3.0,
        "horizon": 17,
    }
    return case | _later_columns(case, np.random.default_rng([seed, 1]))


def _later_columns(case: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Return columns that were added later, from random numbers of a separate generator: the others stay the same."""
    logits = case["logits"] / 2
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    tokens = rng.integers(VOCABULARY, size=(*case["mask"].shape, 1))
    return {
        "old_below": np.minimum(case["old"], -1e-3),  # log-probs of probabilities below 1
        "drawn": np.take_along_axis(log_p, tokens, -1)[..., 0],
        "sum_squared": np.exp(2 * log_p).sum(-1),
        "more_scores": rng.permutation(np.arange(-31, 32, 2))[: len(case["scores"])] / 8,
        "inside": (np.arange(case["mask"].shape[1]) < case["lengths"][:, None]).astype(np.float64),
    }


class Packed:
    """A case in mrl's format."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case = case
        self.rows = Rows.of(case["lengths"].tolist())
        self.mask_T = self.column("mask").bool()

    def column(self, name: str) -> Tensor:
        """Return a padded array's tokens, concatenated row by row."""
        array = self.case[name]
        inside = np.arange(array.shape[1]) < self.case["lengths"][:, None]
        return torch.from_numpy(array[inside])

    def per_row(self, name: str) -> Tensor:
        """Return an array with one number per row."""
        return torch.from_numpy(self.case[name])

    @property
    def entropy_T(self) -> Tensor:
        """Entropy of the whole distribution, from the logits."""
        log_p = self.column("logits").log_softmax(-1)
        return -(log_p.exp() * log_p).sum(-1)

    def norm(self, mode: str) -> LossNormalizer:
        """Return the normalizer of the case as the whole batch."""
        return LossNormalizer.of(mode, self.rows, self.mask_T, self.case["horizon"])

    def outcomes(self) -> Outcomes:
        """Return the outcomes with the case's scores."""
        return Outcomes(self.per_row("scores"), self.case["uids"], self.rows.count(self.mask_T), self.rewards())

    def rewards(self) -> list[tuple[float, Tensor]]:
        """Return two rewards with their weights, which are exact in float32."""
        return [(0.75, self.per_row("scores")), (-0.25, self.per_row("more_scores"))]


packed = Packed


def padded(case: dict[str, Any], value: Tensor | float | list[float], shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Return mrl's packed tokens in a peer's padded shape, and anything else unchanged."""
    array = np.asarray(value.detach().numpy() if isinstance(value, Tensor) else value, dtype=np.float64)
    if array.shape == shape:
        return array
    wide = np.zeros(shape)
    wide[np.arange(shape[1]) < case["lengths"][:, None]] = array
    return wide
