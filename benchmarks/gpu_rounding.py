"""Part of `gpu.py` that measures the effect of rounding on log-probs, which the limits of audits must allow.

The weights are random, so the distribution of each token is flat. Hidden states are scaled until the mean entropy
equals that of a trained policy, and labels are sampled.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks.gpu_session import ON_GPU, GpuBenchmark
from benchmarks.gpu_training import SIZE, TRAINED, Trainer, make_model
from mrl.config.schema import ParallelConfig
from mrl.engine.vocab_head import HeadOptions, token_log_probs

ENTROPIES = (0.1, 0.3, 0.5, 1.0, 2.0)
BUDGETS = (SIZE.longest, 3 * SIZE.longest + 1)
MOST_TOKENS = 4_096 if ON_GPU else 256
FAR = 0.2
"""Smallest difference of log-probs that reaches common clip ranges."""


def rounding(bench: GpuBenchmark, directory: Path) -> None:
    """Compare two packings of one policy, and a float32 head with logits in bfloat16, at the entropies of policies."""
    model = str(make_model(TRAINED[0], directory))
    for row in bench.on_rank(differences, model):
        bench.row(**row)
        if row["what"].startswith("two packings"):
            bench.goal(f"{row['what']}: share beyond {FAR}", row["share_beyond"], at_most=0.02)


def differences(model: str) -> list[dict[str, Any]]:
    """Return the rows of every entropy. Called on one rank."""
    from mrl.engine.parallel import model_parallel

    with model_parallel(ParallelConfig(), seed=1) as groups:
        trainer = Trainer(model, groups, {})
        return _differences(trainer)


@torch.no_grad()
def _differences(trainer: Trainer) -> list[dict[str, Any]]:
    from mrl.engine.scores import ScoreRequest

    packed = []
    for budget in BUDGETS:
        scores = trainer.engine.forward(trainer.rows, trainer.cut(budget), ScoreRequest(hidden=True))
        assert scores is not None, "a single stage must return scores"
        assert scores.hidden_TH is not None, "hidden states were requested"
        packed.append(scores.hidden_TH)
    ends = np.cumsum(trainer.rows.response_lengths)
    num_tokens = int(ends[ends <= MOST_TOKENS].max())  # whole rows
    first_TH, second_TH = (hidden_TH[:num_tokens].float() for hidden_TH in packed)
    weight_VH = trainer.engine.models[-1].vocabulary_weight()
    options = HeadOptions(trainer.spec.vocab, 1.0, "value")
    rows: list[dict[str, Any]] = []
    for target in ENTROPIES:
        scale = scale_of(first_TH[:64], weight_VH, target)
        first, second = ((scale * hidden_TH).bfloat16() for hidden_TH in (first_TH, second_TH))
        labels_T = sampled(first, weight_VH)
        (one_T, entropy_T), (other_T, _) = (token_log_probs(x, weight_VH, labels_T, options) for x in (first, second))
        assert entropy_T is not None, "the entropy was requested"
        narrow_T = narrow_log_probs(first, weight_VH, labels_T)
        entropy = float(entropy_T.mean())
        rows.append({"what": f"two packings, {target} nats", "entropy": entropy} | spread(one_T, other_T, ends))
        rows.append({"what": f"logits in bfloat16, {target} nats", "entropy": entropy} | spread(one_T, narrow_T, ends))
    return rows


def spread(one_T: Tensor, other_T: Tensor, ends: npt.NDArray[np.int64]) -> dict[str, float]:
    """Return the differences by token and by sequence."""
    difference_T = (one_T - other_T).double()
    sequences = [
        part.mean().abs() for part in torch.tensor_split(difference_T, ends[ends < len(difference_T)].tolist())
    ]
    return {
        "mean": float(difference_T.abs().mean()),
        "largest": float(difference_T.abs().max()),
        "share_beyond": float((difference_T.abs() > FAR).double().mean()),
        "sequence_mean": float(torch.stack(sequences).mean()),
        "largest_sequence_mean": float(torch.stack(sequences).max()),
    }


def scale_of(hidden_TH: Tensor, weight_VH: Tensor, entropy: float) -> float:
    """Return the factor of hidden states that gives their distributions this mean entropy."""
    logits_TV = hidden_TH @ weight_VH.float().t()
    low, high = 1e-3, 1e5
    for _ in range(60):
        scale = (low * high) ** 0.5
        all_TV = torch.log_softmax(scale * logits_TV, 1)
        is_flat = float(-(all_TV.exp() * all_TV).sum(1).mean()) > entropy
        low, high = (scale, high) if is_flat else (low, scale)
    return low


def sampled(hidden_TH: Tensor, weight_VH: Tensor) -> Tensor:
    """Return a token for each position, drawn from the model's distribution."""
    torch.manual_seed(0)
    wide_HV = weight_VH.float().t()
    return torch.cat(
        [torch.multinomial(torch.softmax(x.float() @ wide_HV, 1), 1)[:, 0] for x in torch.split(hidden_TH, 1024)]
    )


def narrow_log_probs(hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor) -> Tensor:
    """Return log-probs of logits in bfloat16, which an engine's head computes by default."""
    parts = zip(torch.split(hidden_TH, 1024), torch.split(labels_T, 1024), strict=True)
    return torch.cat(
        [
            torch.log_softmax((part @ weight_VH.bfloat16().t()).float(), 1).gather(1, labels[:, None])[:, 0]
            for part, labels in parts
        ]
    )
