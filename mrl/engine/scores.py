"""Scores at each response token, from hidden states: log-probs, entropy, greedy tokens, or values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mrl.engine.masked_head import masked_log_probs
from mrl.engine.packed_rows import Lengths, MicroBatch, concat
from mrl.engine.vocab_divergence import LikeliestTokens, TeacherHead, likeliest_tokens, token_divergence
from mrl.engine.vocab_head import EntropyUse, HeadOptions, greedy_tokens, token_log_probs

MASK = "sampling_mask"
"""Column of the tokens that each response token was drawn from. Rows with it are scored over these tokens only."""


@dataclass(frozen=True)
class DivergenceRequest:
    """A divergence from a teacher, whose likeliest tokens or hidden states are in the columns of the rows."""

    beta: float
    teacher_VH: Tensor | None = None
    """For hidden states: the rows of the teacher's output matrix for this rank's columns."""


@dataclass(frozen=True)
class ScoreRequest:
    """Which scores to compute. The temperature is the one used for sampling."""

    temperature: float = 1.0
    entropy: EntropyUse = "none"
    greedy: bool = False
    """Compute the likeliest tokens instead of log-probs."""
    vocab: int | None = None
    """Number of the model's tokens that count; None for all."""
    top_k: int = 0
    """Number of likeliest tokens whose log-probs to return as well."""
    hidden: bool = False
    """Whether to return hidden states as well."""
    divergence: DivergenceRequest | None = None
    norms: bool = False
    """Whether to return the squared norm of the gradient of each log-prob by the logits as well."""


@dataclass(frozen=True)
class Scores:
    """Scores of each response token of a micro-batch, in row order, identical on all context ranks.

    A policy returns log-probs (and entropy if requested) or greedy tokens; a value model returns values.
    """

    log_probs_T: Tensor | None = None
    entropy_T: Tensor | None = None
    values_T: Tensor | None = None
    greedy_T: Tensor | None = None
    top_ids_TK: Tensor | None = None
    top_log_probs_TK: Tensor | None = None
    """Log-probs of the likeliest tokens and, in the last column, of all other tokens together."""
    hidden_TH: Tensor | None = None
    divergence_T: Tensor | None = None
    teacher_mass_T: Tensor | None = None
    """Probability of the teacher's likeliest tokens."""
    norms_T: Tensor | None = None
    """Squared norm of d log pi / d logits, which is 1 - 2 pi + sum_v pi_v^2."""


@dataclass(frozen=True)
class LossInput:
    """Input of a loss function: the model's scores of a micro-batch, and the columns of its rows."""

    scores: Scores
    response_lengths: npt.NDArray[np.int64]
    columns: Mapping[str, Tensor]


@dataclass(frozen=True)
class LossOutput:
    """This micro-batch's share of the update's loss and metrics.

    Shares are summed over all micro-batches, without division.
    """

    loss: Tensor
    reports: Mapping[str, Tensor]


LossFunction = Callable[[LossInput], LossOutput]


class HeadGroups(Protocol):
    """Groups that share the rows of the output matrix (`tp`) and the tokens of a sequence (`cp`)."""

    @property
    def tp(self) -> torch.distributed.ProcessGroup: ...

    @property
    def cp(self) -> torch.distributed.ProcessGroup: ...


class ModelHead(Protocol):
    """The end of a model, which turns hidden states into scores."""

    @property
    def head(self) -> str: ...

    @property
    def vocab(self) -> int: ...

    @property
    def pg_collection(self) -> HeadGroups: ...

    @property
    def score(self) -> Callable[[Tensor], Tensor]: ...

    def head_input(self, hidden_1TH: Tensor, places: Tensor) -> Tensor: ...

    def vocabulary_weight(self) -> Tensor: ...


def score(model: ModelHead, batch: MicroBatch, hidden_1TH: Tensor, request: ScoreRequest) -> Scores:
    """Return the scores of a micro-batch's response tokens, complete on every context rank."""
    hidden_SH = model.head_input(hidden_1TH, batch.score_at)
    if model.head == "score":
        values_T = _gather_context_parallel(model.score(hidden_SH), batch, model)
        hidden_TH = _gather_context_parallel(hidden_SH, batch, model) if request.hidden else None
        return Scores(values_T=values_T, hidden_TH=hidden_TH)
    tp = model.pg_collection.tp
    options = HeadOptions(
        vocab=request.vocab or model.vocab,
        group=tp if tp.size() > 1 else None,
        temperature=request.temperature,
        entropy=request.entropy,
    )
    if request.greedy:
        tokens_S = greedy_tokens(hidden_SH, model.vocabulary_weight(), options)
        return Scores(greedy_T=_gather_context_parallel(tokens_S, batch, model))
    if MASK in batch.rows.columns:
        needs_whole = request.top_k or request.norms or request.divergence is not None
        assert not needs_whole, "a sampling mask leaves no whole distributions"
        mask_SM = _here(batch, MASK)
        log_probs_S, entropy_S = masked_log_probs(hidden_SH, model.vocabulary_weight(), batch.labels, mask_SM, options)
    else:
        log_probs_S, entropy_S = token_log_probs(hidden_SH, model.vocabulary_weight(), batch.labels, options)
    parts = {"log_probs_T": log_probs_S, "entropy_T": entropy_S, "hidden_TH": hidden_SH if request.hidden else None}
    if request.top_k:
        top = likeliest_tokens(hidden_SH, model.vocabulary_weight(), request.top_k, options)
        parts["top_ids_TK"] = top.ids_TK
        parts["top_log_probs_TK"] = torch.cat([top.log_probs_TK, top.rest_T.unsqueeze(1)], 1)
    if request.divergence is not None:
        teacher, beta = _teacher_scores(request.divergence, batch), request.divergence.beta
        divergence_S, mass_S = token_divergence(hidden_SH, model.vocabulary_weight(), teacher, beta, options)
        parts |= {"divergence_T": divergence_S, "teacher_mass_T": mass_S}
    if request.norms:
        parts["norms_T"] = _score_norms(hidden_SH, model.vocabulary_weight(), batch.labels, log_probs_S, options)
    named = {name: _gather_context_parallel(local, batch, model) for name, local in parts.items() if local is not None}
    return Scores(**named)


def _score_norms(
    hidden_SH: Tensor, weight_VH: Tensor, labels_S: Tensor, log_probs_S: Tensor, options: HeadOptions
) -> Tensor:
    """Return 1 - 2 pi + sum_v pi_v^2, at the temperature of pi.

    A label's log-prob is z - lse(z), and 2 z - lse(2 z) at half the temperature. Twice the first minus the second is
    lse(2 z) - 2 lse(z), the logarithm of sum_v pi_v^2.
    """
    halved = replace(options, temperature=options.temperature / 2, entropy="none")
    sharper_S, _ = token_log_probs(hidden_SH, weight_VH, labels_S, halved)
    return 1 - 2 * log_probs_S.exp() + (2 * log_probs_S - sharper_S).exp()


def merged(parts: Sequence[Scores], micro_batches: Sequence[Lengths], lengths: Lengths) -> Scores:
    """Return the scores of all micro-batches, in the order of all rows."""
    values: dict[str, Tensor] = {}
    for name in Scores.__dataclass_fields__:
        if tensors := [x for part in parts if (x := getattr(part, name)) is not None]:
            values[name] = concat(tensors, micro_batches, lengths)
    return Scores(**values)


def _here(batch: MicroBatch, name: str) -> Tensor:
    """Return the column's values at the places that this context rank scores."""
    return batch.rows.columns[name].to(batch.score_to.device)[batch.score_to]


def _teacher_scores(request: DivergenceRequest, batch: MicroBatch) -> LikeliestTokens | TeacherHead:
    """Return the teacher's scores for the places that this context rank scores."""
    if request.teacher_VH is not None:
        return TeacherHead(_here(batch, "teacher_hidden"), request.teacher_VH)
    log_probs = _here(batch, "teacher_top_log_probs")
    return LikeliestTokens(_here(batch, "teacher_top_ids"), log_probs[:, :-1], log_probs[:, -1])


def _gather_context_parallel(local: Tensor, batch: MicroBatch, model: ModelHead) -> Tensor:
    """Return the values of all context ranks in row order. Each token is scored by one rank."""
    context = model.pg_collection.cp
    if context.size() == 1:
        return local
    whole = local.new_zeros(batch.num_scores, *local.shape[1:]).index_copy(0, batch.score_to, local)
    added: Tensor = _AllReduceSum.apply(whole, context)  # type: ignore[no-untyped-call]
    return added


class _AllReduceSum(torch.autograd.Function):
    """Sum over context ranks. All have the same loss, so the gradient of a rank's own part equals that of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
        x = x.clone()
        torch.distributed.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
