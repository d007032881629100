"""Start-up check: two rows get the same scores and gradients packed together as alone in transformers' own attention.

A model whose attention does not take packed rows gives wrong numbers without any error, and its class may even claim
to support them. So every model is tried before it is used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from mrl.engine.packed_rows import SequenceSharding, TokenRows, pack
from mrl.engine.scores import ScoreRequest
from mrl.errors import ModelError
from mrl.fsdp import attention
from mrl.fsdp.model import OTHER, RowModel
from mrl.fsdp.parallel import ShardGroups

_LENGTHS = (11, 23)


@dataclass(frozen=True)
class ProbeLimits:
    """Largest difference of scores, and of all gradients as a share of their norm, that rounding explains."""

    scores: float
    gradients: float


LIMITS = {torch.float32: ProbeLimits(1e-3, 1e-2), torch.bfloat16: ProbeLimits(0.3, 0.5)}
"""Rows that see each other differ by 0.1 and more in both, in float32. In bfloat16 a router may choose other experts
for some tokens, so the median over the tokens is compared."""


def check_packing(model: RowModel, groups: ShardGroups, compute: torch.dtype) -> None:
    """Raise an error if packed rows get other scores or gradients than alone. Call this on all ranks."""
    rows = _rows(model.vocab)
    name, config, limits = model.causal.config.model_type, model.causal.config, LIMITS[compute]
    _check_masks(model, rows, groups)
    packed = _packed(model, rows, groups)
    together = _take_gradients(model)
    model.causal.set_attn_implementation("eager")
    alone = _alone(model, rows, groups, packed)
    model.causal.set_attn_implementation(attention.NAME)
    apart = _take_gradients(model)
    differences = (packed - alone).abs()
    score = float(differences.max() if compute == torch.float32 else differences.median())
    gradient, worst = _difference(together, apart, groups)
    if not (score <= limits.scores and gradient <= limits.gradients):
        raise ModelError(
            f"{name} does not take packed rows: two rows of {_LENGTHS[0]} and {_LENGTHS[1]} tokens get log-probs that "
            f"differ by {score:.2g} packed and alone (limit {limits.scores:g}), and gradients by {gradient:.2g} of "
            f"their norm (limit {limits.gradients:g}), most in {worst}",
            where=str(config._name_or_path),
            fix=OTHER,
        )


@torch.no_grad()
def _check_masks(model: RowModel, rows: TokenRows, groups: ShardGroups) -> None:
    """Compare the masks that the model asks for with what its layers ask of the attention."""
    config = model.causal.config
    config.looks_at_masks = True
    try:
        model(pack(rows.take([0]), SequenceSharding(), groups.device), None)
    except (AttributeError, TypeError) as error:  # it computes with the mark, as it would with a mask
        what = f"{config.model_type} does more with its mask than to hand it to its attention: {error}"
        raise ModelError(what, where=str(config._name_or_path), fix=OTHER) from error
    model.reshard()  # type: ignore[operator]  # torch's method
    config.looks_at_masks = False


def _rows(vocab: int) -> TokenRows:
    random = torch.Generator().manual_seed(11)
    lengths = np.array(_LENGTHS)
    tokens = torch.randint(0, vocab, (int(lengths.sum()),), generator=random)
    return TokenRows(tokens, lengths, lengths - 1, {})


def _packed(model: RowModel, rows: TokenRows, groups: ShardGroups) -> Tensor:
    batch = pack(rows, groups.sequence_sharding, groups.device)
    is_scored = model.head == "score"
    values: Tensor = model(batch, ScoreRequest(hidden=is_scored))["hidden_TH" if is_scored else "log_probs_T"]
    (values.float() * _weights(values)).sum().backward()  # type: ignore[no-untyped-call]
    return values.detach().float()


def _alone(model: RowModel, rows: TokenRows, groups: ShardGroups, packed: Tensor) -> Tensor:
    """Return the same numbers from the model's own forward, with a row at a time.

    One backward pass for both rows would keep the whole gradients of all layers until its end.
    """
    alone, counts = [], [length - 1 for length in _LENGTHS]
    weights = torch.split(_weights(packed) / groups.cp.size(), counts)
    for tokens, weight in zip(torch.split(rows.tokens.to(groups.device), list(_LENGTHS)), weights, strict=True):
        values = model.alone(tokens[None])
        (values.float() * weight).sum().backward()  # type: ignore[no-untyped-call]
        alone.append(values.detach().float())
    return torch.cat(alone)


def _weights(values: Tensor) -> Tensor:
    """Return a different weight for every value."""
    weights = torch.linspace(0.5, 1.5, values.numel(), device=values.device).view_as(values)
    return weights / math.sqrt(values.numel())


def _take_gradients(model: RowModel) -> dict[str, Tensor]:
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[name] = cast(DTensor, parameter.grad).to_local().clone()
        parameter.grad = None
    return gradients


def _difference(one: dict[str, Tensor], other: dict[str, Tensor], groups: ShardGroups) -> tuple[float, str]:
    """Return the difference of the gradients as a share of their norm, and the parameter with the largest one."""
    names = sorted(one.keys() & other.keys())
    parts = [
        torch.stack([(one[name] - other[name]).float().square().sum(), other[name].float().square().sum()])
        for name in names
    ]
    sums = torch.stack(parts)
    dist.all_reduce(sums, group=groups.shard)
    difference, size = sums.sum(0).tolist()
    worst = names[int(sums[:, 0].argmax())].removeprefix("causal.")
    return math.sqrt(difference / size) if size else math.inf, worst
