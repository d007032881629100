"""Log-probs and entropies over a sampling mask equal a masked softmax, gradients too, on one rank or several."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mrl.engine.masked_head import masked_log_probs
from mrl.engine.scores import MASK, ScoreRequest, score
from mrl.engine.vocab_head import HeadOptions
from mrl.verify.spawn import run_distributed
from tests.engine.test_vocab_head import NAMES, VOCAB, Case, H, Results, T, V, worst

WIDTH = 6


class MaskedCase(Case):
    """A case with masks of 1 to 6 tokens in any order, and results of a softmax with all other logits at -inf."""

    def __init__(self, temperature: float = 0.7) -> None:
        super().__init__(temperature)
        chance = torch.Generator().manual_seed(3)
        self.mask = torch.stack([torch.randperm(VOCAB, generator=chance)[:WIDTH] for _ in range(T)])
        for place in range(T):
            self.mask[place, 1 + place % WIDTH :] = -1
            if not (self.mask[place] == self.labels[place]).any():
                self.mask[place, place % (1 + place % WIDTH)] = self.labels[place]
        self.mask = self.mask.int()

    def expected(self, *, entropy_has_gradient: bool = True) -> Results:
        hidden, weight = self.hidden.clone().requires_grad_(), self.weight.clone().requires_grad_()
        is_in = torch.zeros(T, V, dtype=torch.bool)
        for place, ids in enumerate(self.mask.tolist()):
            is_in[place, [token for token in ids if token >= 0]] = True
        probs = torch.where(is_in, (hidden @ weight.t() / self.temperature).exp(), 0.0)
        probs = probs / probs.sum(1, keepdim=True)
        log_probs = probs[torch.arange(T), self.labels].log()
        entropy = -torch.where(is_in, probs * torch.where(is_in, probs, 1.0).log(), 0.0).sum(1)
        loss = log_probs @ self.d_log_probs
        if entropy_has_gradient:
            loss = loss + entropy @ self.d_entropy
        return dict(zip(NAMES, (log_probs, entropy, *torch.autograd.grad(loss, (hidden, weight))), strict=True))

    def found(self, options: HeadOptions, dtype: torch.dtype = torch.float64, rows: slice = slice(None)) -> Results:
        hidden = self.hidden.to(dtype).requires_grad_()
        weight = self.weight[rows].to(dtype).requires_grad_()
        log_probs, entropy = masked_log_probs(hidden, weight, self.labels, self.mask, options)
        loss = log_probs @ self.d_log_probs.to(log_probs.dtype)
        if entropy is not None and entropy.requires_grad:
            loss = loss + entropy @ self.d_entropy.to(entropy.dtype)
        gradients = torch.autograd.grad(loss, (hidden, weight))
        results = zip(NAMES, (log_probs, entropy, *gradients), strict=True)
        return {name: tensor.detach() for name, tensor in results if tensor is not None}


@pytest.mark.parametrize(("tile_columns", "temperature"), [(1, 1.0), (7, 0.6), (37, 1.3), (None, 0.6)])
def test_equals_a_softmax_over_the_mask_whatever_the_tiles(tile_columns: int | None, temperature: float) -> None:
    case = MaskedCase(temperature)
    assert worst(case.found(case.options(tile_columns=tile_columns)), case.expected()) < 1e-12


@pytest.mark.parametrize("entropy", ["none", "value"])
def test_entropy_over_the_mask_without_gradient(entropy: str) -> None:
    case = MaskedCase()
    found = case.found(case.options(entropy=entropy, tile_columns=7))
    assert ("entropy" in found) == (entropy == "value")
    assert worst(found, case.expected(entropy_has_gradient=False)) < 1e-12


def test_float32_and_bfloat16() -> None:
    case = MaskedCase()
    case.hidden, case.weight = (x.to(torch.bfloat16).double() for x in (case.hidden, case.weight))
    assert worst(case.found(case.options(tile_columns=7), torch.float32), case.expected()) < 2e-5
    found, expected = case.found(case.options(tile_columns=7), torch.bfloat16), case.expected()
    assert worst({name: found[name] for name in NAMES[:2]}, expected) < 2e-5
    for name in NAMES[2:]:  # rounded once, to 8 bits
        assert worst({name: found[name]}, expected) < 2**-7 * expected[name].abs().max()


def test_a_mask_of_the_whole_vocabulary_changes_nothing() -> None:
    case = MaskedCase()
    case.mask = torch.arange(VOCAB).expand(T, VOCAB)
    assert worst(case.found(case.options(tile_columns=7)), Case().expected()) < 1e-12


def test_a_token_outside_the_mask_gets_no_gradient_and_does_not_count() -> None:
    case = MaskedCase()
    (unused,) = next({token} for token in range(VOCAB) if not (case.mask == token).any())
    before = case.found(case.options(tile_columns=7))
    case.weight[unused] = 1e3
    after = case.found(case.options(tile_columns=7))
    assert all(torch.equal(before[name], after[name]) for name in NAMES)
    assert not after["d_weight"][unused].any()


def test_a_label_outside_its_mask_has_no_chance() -> None:
    case = MaskedCase()
    case.mask[3] = torch.tensor([case.labels[3] + 1, -1, -1, -1, -1, -1]) % VOCAB
    case.mask[3, 1:] = -1
    log_probs, _ = masked_log_probs(case.hidden, case.weight, case.labels, case.mask, case.options())
    assert log_probs[3] == -torch.inf
    assert log_probs.isfinite().sum() == T - 1


def test_no_tokens() -> None:
    case = MaskedCase()
    hidden = torch.zeros(0, H, requires_grad=True)
    log_probs, _ = masked_log_probs(hidden, case.weight.float(), case.labels[:0], case.mask[:0], case.options())
    log_probs.sum().backward()
    assert log_probs.shape == (0,)


def compare_rank() -> None:
    """One of two or four ranks, each with a part of the vocabulary."""
    torch.set_num_threads(1)
    shard = V // dist.get_world_size()
    rows = slice(dist.get_rank() * shard, (dist.get_rank() + 1) * shard)
    for tile_columns in (4, None):
        case = MaskedCase()
        found = case.found(case.options(group=dist.group.WORLD, tile_columns=tile_columns), rows=rows)
        dist.all_reduce(found["d_hidden"])
        expected = case.expected()
        expected["d_weight"] = expected["d_weight"][rows]
        assert worst(found, expected) < 1e-12, f"{worst(found, expected)}"


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_tensor_parallel_ranks_get_what_one_rank_gets(num_ranks: int) -> None:
    run_distributed(num_ranks, compare_rank, timeout_s=120)


def test_each_context_rank_reads_the_masks_of_its_own_tokens() -> None:
    """Scored places are not in the order of the response tokens."""
    case = MaskedCase()
    order = torch.randperm(T, generator=torch.Generator().manual_seed(1))
    alone = SimpleNamespace(size=lambda: 1)
    head: Any = SimpleNamespace(
        head="lm",
        vocab=VOCAB,
        pg_collection=SimpleNamespace(tp=alone, cp=alone),
        head_input=lambda hidden, places: hidden[0][places],
        vocabulary_weight=lambda: case.weight,
    )

    def scored(columns: dict[str, Tensor]) -> Any:
        batch: Any = SimpleNamespace(
            score_at=order, score_to=order, labels=case.labels[order], rows=SimpleNamespace(columns=columns)
        )
        return score(head, batch, case.hidden.unsqueeze(0), ScoreRequest(case.temperature, "value"))

    found, expected = scored({MASK: case.mask}), case.expected()
    assert (found.log_probs_T - expected["log_probs"][order]).abs().max() < 1e-12
    assert found.entropy_T is not None
    assert (found.entropy_T - expected["entropy"][order]).abs().max() < 1e-12
    assert (scored({}).log_probs_T - Case().expected()["log_probs"][order]).abs().max() < 1e-12
