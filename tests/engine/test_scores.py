"""Norms of scores that the head computes from log-probs at two temperatures equal those of whole distributions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mrl.engine.scores import ScoreRequest, score
from mrl.verify.spawn import run_distributed
from tests.engine.test_vocab_head import VOCAB, Case, V


def scores_of(case: Case, rank: int, num_ranks: int, request: ScoreRequest) -> Any:
    """Score a case with a head whose rows are divided over ranks."""
    alone = SimpleNamespace(size=lambda: 1)
    tp: Any = dist.group.WORLD if num_ranks > 1 else alone
    size = V // num_ranks
    weight = case.weight[rank * size : (rank + 1) * size]
    head: Any = SimpleNamespace(
        head="lm",
        vocab=VOCAB,
        pg_collection=SimpleNamespace(tp=tp, cp=alone),
        head_input=lambda hidden, places: hidden[0][places],
        vocabulary_weight=lambda: weight,
    )
    rows = SimpleNamespace(columns={})
    batch: Any = SimpleNamespace(score_at=torch.arange(len(case.labels)), labels=case.labels, rows=rows)
    return score(head, batch, case.hidden.unsqueeze(0), request)


def compare(num_ranks: int) -> None:
    rank = dist.get_rank() if num_ranks > 1 else 0
    case = Case(temperature=0.7)
    found = scores_of(case, rank, num_ranks, ScoreRequest(case.temperature, "value", norms=True))
    probs = torch.softmax((case.hidden @ case.weight.t())[:, :VOCAB] / case.temperature, dim=1)
    expected = (torch.nn.functional.one_hot(case.labels, VOCAB) - probs).square().sum(1)
    assert (found.norms_T - expected).abs().max() < 1e-12
    assert (found.log_probs_T - probs.gather(1, case.labels.unsqueeze(1)).squeeze(1).log()).abs().max() < 1e-12
    assert scores_of(case, rank, num_ranks, ScoreRequest(case.temperature)).norms_T is None


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_norms_are_those_of_the_gradient_by_the_logits(num_ranks: int) -> None:
    if num_ranks == 1:
        compare(num_ranks)
    else:
        run_distributed(num_ranks, compare, num_ranks, timeout_s=120)
