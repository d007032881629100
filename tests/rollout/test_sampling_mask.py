"""Sampling masks from engines: exactly the tokens that top-k and then top-p leave, with ties and errors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from mrl.config.algorithm import LARGEST_MASK, NUM_TIES
from mrl.config.arithmetic import mask_bytes, mask_width
from mrl.errors import RolloutError
from mrl.rollout.engine import RolloutEngine
from mrl.rollout.requests import Generated, GenerationRequest, Sampling
from mrl.rollout.sampling_mask import mask_of
from tests.rollout.conftest import VOCAB, Small, requests, run

IDS = np.array([[4, 9, 2, 7], [9, 4, 7, 2], [2, 7, 4, 9]], np.int64)
INF = np.inf
LEFT = np.array([[-0.7, -0.7, -INF, -INF], [0, -INF, -INF, -INF], [-0.7, -1.2, -1.6, -INF]], np.float32)


def test_a_mask_is_what_is_left_and_contains_the_token() -> None:
    mask = mask_of("p0/0", np.array([9, 9, 4], np.int32), IDS, LEFT, 100)
    np.testing.assert_array_equal(mask, [[4, 9, -1, -1], [9, -1, -1, -1], [2, 7, 4, -1]])
    assert mask.dtype == np.int32
    with pytest.raises(RolloutError, match=r"p0/0.*token 1, 4, is not among those it was drawn from: \[9\]"):
        mask_of("p0/0", np.array([9, 4, 4], np.int32), IDS, LEFT, 100)


def test_more_ties_than_a_mask_has_room_for_are_an_error() -> None:
    tokens = np.array([9, 9, 4], np.int32)
    full = np.where(np.arange(3)[:, None] == 2, np.float32(-1.4), LEFT)
    with pytest.raises(RolloutError, match=r"token 2 was drawn from at least 4 tokens: more than 7 tie"):
        mask_of("p0/0", tokens, IDS, full, 100)
    assert (mask_of("p0/0", tokens, IDS, full, 4)[2] >= 0).all(), "the whole vocabulary is no tie"


def test_vllm_keeps_tokens_that_tie_for_the_last_place() -> None:
    """A sort or a maximum number would drop them, and the normalizer would differ."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    logits = torch.tensor([[3.0, 1.0, 2.0, 1.0, 1.0, 0.0]])
    for top_p in (None, torch.tensor([0.999])):
        left = apply_top_k_top_p_pytorch(logits.clone(), torch.tensor([3]), top_p)
        assert left.isfinite().tolist() == [[True, True, True, True, True, False]]


def test_the_width_of_a_mask_has_room_for_ties() -> None:
    assert (mask_width(20, 1000), mask_width(20, 25), mask_bytes(20)) == (20 + NUM_TIES, 25, 4 * (20 + NUM_TIES))


@pytest.fixture(scope="module", params=["transformers", "vllm"])
def engine(request: pytest.FixtureRequest, make_engine: Callable[..., RolloutEngine], small: Small) -> RolloutEngine:
    made = make_engine(request.param, small("qwen3"), loads_files=True)
    made.receive_weights(1)
    return made


def kept(model: Path, request: GenerationRequest, sample: Generated, sampling: Sampling) -> list[dict[int, float]]:
    """Return the tokens left by top-k and then by top-p at each place of a sample, with their log-probs, from
    transformers' logits in float64."""
    from transformers import AutoModelForCausalLM

    ids = torch.from_numpy(np.concatenate([request.prompt_ids, sample.token_ids])).long()
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)(ids[None]).logits[0]
    places = []
    for row in (logits[len(request.prompt_ids) - 1 : -1] / sampling.temperature).tolist():
        likeliest = sorted(range(len(row)), key=lambda token: -row[token])[: sampling.top_k]
        weights = [np.exp(row[token]) for token in likeliest]
        share = np.cumsum(weights) / np.sum(weights)
        num = 1 + int((share < sampling.top_p).sum()) if sampling.top_p < 1 else len(likeliest)
        total = float(np.log(np.sum(weights[:num])))
        places.append({token: row[token] - total for token in likeliest[:num]})
    return places


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.7, top_p=0.8, top_k=30, keeps_mask=True),
        Sampling(temperature=1.4, top_k=5, keeps_mask=True),
        Sampling(top_p=0.5, top_k=LARGEST_MASK, keeps_mask=True),
    ],
    ids=str,
)
def test_a_mask_is_what_top_k_and_then_top_p_leave(engine: RolloutEngine, small: Small, sampling: Sampling) -> None:
    wanted, sizes = requests(3, 2, 16), set()
    samples = run(engine, wanted, sampling)
    plain = run(engine, wanted, dataclasses.replace(sampling, keeps_mask=False))
    for request in wanted:
        sample = samples[request.key]
        np.testing.assert_array_equal(sample.token_ids, plain[request.key].token_ids)
        np.testing.assert_array_equal(sample.log_probs, plain[request.key].log_probs)
        assert plain[request.key].sampling_mask is None
        assert sample.sampling_mask is not None
        assert sample.sampling_mask.shape == (len(sample.token_ids), mask_width(sampling.top_k, VOCAB))
        for place, expected in enumerate(kept(small("qwen3"), request, sample, sampling)):
            mask = sample.sampling_mask[place]
            assert sorted(mask[mask >= 0].tolist()) == sorted(expected)
            assert abs(sample.log_probs[place] - expected[int(sample.token_ids[place])]) < 2e-5
            sizes.add(len(expected))
    assert max(sizes) <= sampling.top_k
    assert len(sizes) > 1 or sampling.top_p == 1


def test_requests_with_and_without_masks_run_together(engine: RolloutEngine) -> None:
    wanted, sampling = requests(2, 2, 8), Sampling(top_k=9)
    engine.start(wanted[:2], sampling)
    both = run(engine, wanted[2:], dataclasses.replace(sampling, keeps_mask=True))
    assert [both[request.key].sampling_mask is not None for request in wanted] == [False, False, True, True]
    assert all(len(sample.log_probs) == len(sample.token_ids) for sample in both.values())
