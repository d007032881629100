"""Is a role's layout the same model as one rank, and as transformers? Asked of a small model of the same shape.

Everything but the sizes is the user's: the family, the layout, the settings that are passed on to Megatron (of the
model, of data parallelism, of the optimizer). It runs over gloo on this machine, a process a rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mrl.config.schema import MegatronModelConfig, ParallelConfig, TrainedModelConfig
from mrl.engine.local_world import run_on_ranks
from mrl.engine.parity import (
    OPTIMIZER,
    Difference,
    ParityCase,
    RankResult,
    measure,
    together,
    transformers_scores,
)
from mrl.models.small import small_config
from mrl.models.table import Head

SCORES_GOAL, RELATIVE_GOAL = 2e-5, 1e-5
"""Largest difference of log-probs or values, and largest relative one of loss and gradient norm, in float32."""
BUDGETS = (64, 1000)
"""Tokens of the first step's micro-batches: many of them, and one that holds the batch whole."""
_LIMIT_S = 900.0


@dataclass(frozen=True)
class Verified:
    """How far a layout is from what it should be, the worse of both budgets."""

    num_ranks: int
    transformers: float
    loss: float
    grad_norm: float
    parameters: float

    @property
    def is_right(self) -> bool:
        """Whether every difference is within its goal."""
        return self.transformers <= SCORES_GOAL and max(self.loss, self.grad_norm) <= RELATIVE_GOAL


def fewest_ranks(parallel: ParallelConfig, dp: int) -> int:
    """The ranks that show a layout whole, with two data-parallel ones where there are more."""
    dense, experts = parallel.tp * parallel.cp * parallel.pp, parallel.etp * parallel.ep * parallel.pp
    return next(size for copies in range(min(dp, 2), dp + 1) if not (size := copies * dense) % experts)


def verify_layout(
    model: Mapping[str, Any], head: Head, settings: MegatronModelConfig, num_ranks: int, directory: Path
) -> Verified:
    """Measure a role; `model` is what the `config.json` of its model holds."""
    parallel = settings.parallel
    path = make_random(small_config(model, parallel), head, directory)
    ddp, optimizer = (settings.ddp, settings.optimizer) if isinstance(settings, TrainedModelConfig) else ({}, {})
    # What an update is (Adam's numbers, clipping) is the user's on both sides, but for a rate at which mistakes show.
    optimizer = {**optimizer, "lr": OPTIMIZER["lr"]}
    alone = ParityCase(str(path), head, ParallelConfig(), BUDGETS[0], optimizer=optimizer)
    oracle = transformers_scores(path, alone)
    one = together([run_on_ranks(1, _measure, [alone], timeout_s=_LIMIT_S)[0][0]])
    own = replace(alone, parallel=parallel, megatron=settings.megatron, ddp=ddp)
    cases = [replace(own, max_tokens=budget) for budget in BUDGETS]
    by_rank = run_on_ranks(num_ranks, _measure, cases, timeout_s=_LIMIT_S)
    results = [together(list(ranks)) for ranks in zip(*by_rank, strict=True)]
    differences = [Difference.between(one, result) for result in results]
    return Verified(
        num_ranks=num_ranks,
        transformers=max(float(np.abs(result.scores - oracle).max()) for result in results),
        loss=max(difference.loss for difference in differences),
        grad_norm=max(difference.grad_norm for difference in differences),
        parameters=max(difference.parameters for difference in differences),
    )


def _measure(cases: list[ParityCase]) -> list[RankResult]:
    """On one rank, without torch's word on every call of Megatron that it has a newer name for."""
    warnings.simplefilter("ignore", FutureWarning)
    return measure(cases)


def make_random(values: Mapping[str, Any], head: Head, directory: Path) -> Path:
    """Random weights by transformers; norms and biases are random too, so that a mix-up shows."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    options = {name: value for name, value in values.items() if name not in ("model_type", "architectures", "dtype")}
    config = AutoConfig.for_model(values["model_type"], **options)
    config.num_labels = 1
    kind = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = kind.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in _vectors(made):
                parameter.add_(0.1 * torch.randn_like(parameter))
    made.save_pretrained(directory)
    return directory


def _vectors(model: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    yield from (parameter for parameter in model.parameters() if parameter.ndim == 1)
