"""Every layout scores and trains over sampling masks as one rank does, and one rank scores as transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from mrl.config.schema import ParallelConfig as Layout
from mrl.engine.packed_rows import TokenRows
from mrl.engine.scores import MASK
from mrl.models.families import read_spec
from mrl.models.spec import ModelSpec
from mrl.verify import parity
from mrl.verify.parity import TEMPERATURE, Difference, Floats, ParityCase, RankResult, merge_ranks
from mrl.verify.spawn import run_distributed

LIMIT_S, WIDTH = 300.0, 5
LAYOUTS = [Layout(tp=2, cp=2, sequence_parallel=True), Layout(tp=2, pp=2)]
make_plain_rows = parity.make_rows


def masked_rows(spec: ModelSpec, case: ParityCase) -> TokenRows:
    """Return the rows with masks of 1 to 5 tokens, one of which is the response token."""
    rows, random = make_plain_rows(spec, case), np.random.default_rng(8)
    sequences = torch.split(rows.tokens, rows.lengths.tolist())
    responses = [part[len(part) - num :] for part, num in zip(sequences, rows.response_lengths.tolist(), strict=True)]
    mask = np.full((int(rows.response_lengths.sum()), WIDTH), -1, np.int32)
    for place, token in enumerate(torch.cat(responses).tolist()):
        others = (token + 1 + random.permutation(spec.vocab - 1)[: random.integers(0, WIDTH)]) % spec.vocab
        mask[place, : len(others) + 1] = random.permutation([token, *others])
    return replace(rows, columns={**rows.columns, MASK: torch.from_numpy(mask)})


def measure(cases: list[ParityCase]) -> list[RankResult]:
    with patch.object(parity, "make_rows", masked_rows):
        return parity.measure(cases)


def transformers_scores(case: ParityCase) -> tuple[Floats, Floats]:
    """Return log-probs and entropies by transformers in float64."""
    from transformers import AutoModelForCausalLM

    spec = read_spec(case.model)
    rows, log_probs, entropies = masked_rows(spec, case), [], []
    model = AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.float64)
    masks = iter(rows.columns[MASK].tolist())
    for tokens, num in zip(
        torch.split(rows.tokens, rows.lengths.tolist()), rows.response_lengths.tolist(), strict=True
    ):
        with torch.no_grad():
            logits = model(tokens[None]).logits[0] / TEMPERATURE
        for at in range(len(tokens) - num, len(tokens)):
            ids = [token for token in next(masks) if token >= 0]
            left = logits[at - 1, ids].log_softmax(0)
            log_probs.append(float(left[ids.index(int(tokens[at]))]))
            entropies.append(float(-(left.exp() * left).sum()))
    return np.asarray(log_probs), np.asarray(entropies)


@pytest.mark.slow
def test_every_layout_reads_the_masks_as_one_rank_does(tmp_path: Path) -> None:
    from tests.models.tiny_models import make_tiny

    case = ParityCase(str(make_tiny("qwen3", tmp_path)), "lm", Layout(), 1000)
    sharded = replace(case, strategy="fsdp", max_tokens=64)
    (results,) = run_distributed(1, both, case, timeout_s=LIMIT_S)
    one, whole = (merge_ranks(of_case) for of_case in results)
    log_probs, entropies = transformers_scores(case)
    assert np.abs(one.scores - log_probs).max() < 1e-5
    assert np.abs(one.entropies - entropies).max() < 1e-5
    assert Difference.between(one, whole).scores > 0.1, "masks change the log-probs"
    cases = [*(replace(case, parallel=layout, max_tokens=64) for layout in LAYOUTS), sharded]
    by_rank = run_distributed(4, measure, cases, timeout_s=LIMIT_S)
    for of_layout, ranks in zip(cases, zip(*by_rank, strict=True), strict=True):
        difference = Difference.between(one, merge_ranks(list(ranks)))
        assert max(difference.scores, difference.entropy) < 2e-5, (of_layout, difference)
        assert max(difference.loss, difference.grad_norm, difference.parameters) < 2e-5, (of_layout, difference)


def both(case: ParityCase) -> tuple[list[RankResult], list[RankResult]]:
    """Return the results with and without masks on this rank."""
    return measure([case]), parity.measure([case])
