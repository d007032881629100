"""Seeds depend only on the sample's identity, digests detect changes, and invalid distributions are rejected."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mrl.errors import RolloutError
from mrl.rollout.requests import Generated, GenerationRequest, Sampling, request_seed, wrong_answer
from mrl.weight_sync.digest import digest, weighted_sums


def test_seeds_are_stable_and_differ_in_every_part() -> None:
    assert request_seed(1, 2, "gsm8k-17", 3) == 4040688844697111917
    seeds = {request_seed(*identity) for identity in [(1, 2, "a", 3), (2, 1, "a", 3), (1, 2, "b", 3), (1, 2, "a", 4)]}
    # Parts do not run into each other.
    seeds |= {request_seed(1, 12, "a", 3), request_seed(11, 2, "a", 3), request_seed(1, 2, "a1", 3)}
    assert len(seeds) == 7
    assert all(0 <= seed < 1 << 63 for seed in seeds)


@pytest.mark.parametrize("wrong", [{"temperature": 0.001}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -1}])
def test_what_vllm_would_change_in_silence_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(RolloutError):
        Sampling(**wrong)  # type: ignore[arg-type]


def on_a_gpu(tensor: torch.Tensor) -> tuple[object, ...]:
    """Compute the parts of a GPU tensor's digest on the CPU."""
    return tensor.dtype, tensor.shape, *weighted_sums(tensor.contiguous().view(-1)).tolist()


@pytest.mark.parametrize("of", [digest, on_a_gpu])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_digest_is_of_every_bit(dtype: torch.dtype, of: Callable[[torch.Tensor], object]) -> None:
    noise = torch.Generator().manual_seed(0)
    tensor = torch.randn(1100, 1001, generator=noise).to(dtype)  # more than one chunk, and not a whole number of them
    seen = {of(tensor)}
    assert of(tensor.clone()) in seen

    def changed() -> torch.Tensor:
        return tensor.clone()

    flipped = changed()
    flipped.view(torch.uint8)[-1, -1] ^= 1
    negative_zero = torch.where(tensor == tensor[5, 5], -0.0, tensor)
    zero = torch.where(tensor == tensor[5, 5], 0.0, tensor)
    swapped = changed()
    swapped[[3, 900]] = swapped[[900, 3]]
    exchanged = changed()
    exchanged[0, [0, 1]] = exchanged[0, [1, 0]]
    others = [flipped, negative_zero, zero, swapped, exchanged, tensor.flip(0), tensor.t(), tensor.view(-1), tensor[1:]]
    seen |= {of(other) for other in others}
    assert len(seen) == 1 + len(others)


def test_a_digest_of_half_a_tensor_is_that_of_the_half() -> None:
    tensor = torch.arange(64.0).view(8, 8)
    assert digest(tensor[:, 2:4]) == digest(tensor[:, 2:4].contiguous())
    assert digest(torch.zeros(4)) != digest(torch.zeros(4, dtype=torch.int32))


ASKED = {key: GenerationRequest(key, key, np.ones(3, np.int32), 0, 4) for key in ("a", "b")}


def answer(key: str = "b", tokens: object = (3, 9), log_probs: object = (-1.0, 0.0), **changes: Any) -> Generated:
    made = Generated(key, np.asarray(tokens, np.int32), np.asarray(log_probs, np.float32), "stop", 1)
    return replace(made, **changes)


WRONG = {
    "a token beyond the vocabulary": ([answer("a"), answer(tokens=(3, 10))], "token 10 with log-prob 0.0 in b"),
    "a negative token": ([answer("a", (-1, 2)), answer()], "token -1 with log-prob -1.0 in a"),
    "a log-prob that is not a number": ([answer(log_probs=(np.nan, -1))], "token 3 with log-prob nan in b"),
    "a log-prob of minus infinity": ([answer(log_probs=(-1, -np.inf))], "token 9 with log-prob -inf in b"),
    "a positive log-prob": ([answer(log_probs=(0.01, -1))], "token 3 with log-prob 0.00999"),
    "no token": ([answer("a"), answer(tokens=(), log_probs=())], "0 tokens and 0 log-probs for b, expected 1 to 4"),
    "too many tokens": (
        [answer(tokens=[1] * 5, log_probs=[-1] * 5)],
        "5 tokens and 5 log-probs for b, expected 1 to 4",
    ),
    "fewer log-probs than tokens": ([answer(log_probs=(-1,))], "2 tokens and 1 log-probs for b"),
    "an answer without a request": ([answer(), answer("c")], r"\['c'\], which was not requested"),
    "one request twice": ([answer(), answer()], "it answered one request twice"),
    "other weights": ([answer(weight_version=2)], "b has weights 2, not 1"),
    "another end": ([answer(finish="abort")], "b has weights 1, not 1, or finish reason 'abort'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_answer_that_cannot_be_right_is_named(case: str) -> None:
    samples, what = WRONG[case]
    assert re.search(what, wrong_answer(samples, ASKED, {1}, 10))


def test_an_answer_that_may_be_right_is_let_through() -> None:
    assert wrong_answer([], ASKED, {1}, 10) == ""
    assert wrong_answer([answer("a", (0,), (1e-6,)), answer(tokens=[9] * 4, log_probs=[-80] * 4)], ASKED, {1}, 10) == ""
