"""Routes of vLLM's samples: the experts that transformers chooses for the same tokens, over preemptions and turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from mrl.errors import RolloutError
from mrl.rollout.engine import RolloutEngine
from mrl.rollout.requests import Generated, Sampling
from mrl.rollout.stored_routes import take_out
from tests.rollout.conftest import Small, requests, run
from tests.rollout.trainer_side import update

SAMPLING = Sampling(temperature=0.9)
NUM_CHOSEN = 2


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_routes_are_the_choices_of_transformers(
    make_engine: Callable[..., RolloutEngine], small: Small, tp: int
) -> None:
    model = small("qwen3_moe")
    # A cache of 12 blocks is too small for all samples: vLLM computes some of them again.
    engine = make_engine("vllm", model, tp=tp, routes=True, num_gpu_blocks_override=12)
    update(engine, model, 1)
    asked = requests(4, 2, 24)
    samples = run(engine, asked, SAMPLING)
    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for request in asked:
        sample = samples[request.key]
        tokens = np.concatenate([request.prompt_ids, sample.token_ids])[:-1]
        with torch.no_grad():
            logits = oracle(torch.from_numpy(tokens.astype(np.int64))[None], output_router_logits=True).router_logits
        expected = [layer.topk(NUM_CHOSEN).indices.sort(-1).values for layer in logits]
        assert sample.routes is not None
        assert sample.routes.dtype == np.uint8
        assert np.array_equal(np.sort(sample.routes, -1), torch.stack(expected, 1).numpy())
    assert engine.step() == []
    engine.start(asked, SAMPLING)
    engine.step()
    engine.abort()
    again = run(engine, asked, SAMPLING)
    assert all(np.array_equal(again[key].routes, sample.routes) for key, sample in samples.items())


def test_a_model_without_experts_has_no_routes(make_engine: Callable[..., RolloutEngine], small: Small) -> None:
    with pytest.raises(RolloutError, match="has no experts, so there are no routes"):
        make_engine("vllm", small("qwen3"), routes=True)


def test_earlier_turns_keep_their_routes() -> None:
    routes = np.arange(12, dtype=np.uint8).reshape(6, 1, 2)
    sample = Generated("a/1", np.zeros(3, np.int32), np.zeros(3, np.float32), "stop", 1, routes=routes)
    (without,), stored = take_out([sample], {"a/1": routes[:2] + 100})
    assert without.routes is None
    assert stored is not None
    assert bytes(stored["routes"][1]) == bytes([100, 101, 102, 103, *range(4, 12)])
    with pytest.raises(RolloutError, match="the engine returned no routes"):
        take_out([replace(sample, routes=None)], {})
