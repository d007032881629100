"""Routes of vLLM's samples: the experts that transformers chooses for the same tokens, over preemptions and turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from mrl.errors import RolloutError
from mrl.models.families import read_spec
from mrl.models.spec import route_bytes
from mrl.rollout.engine import EngineSettings, RolloutEngine
from mrl.rollout.engine_routes import EngineRoutes
from mrl.rollout.requests import Generated, GenerationRequest, Sampling
from mrl.rollout.stored_routes import take_out
from tests.rollout.conftest import Small, requests, run
from tests.rollout.small_models import VOCAB
from tests.rollout.trainer_side import update

SAMPLING = Sampling(temperature=0.9)
NUM_CHOSEN = 2


def assert_routes(model: Path, asked: Sequence[GenerationRequest], samples: Mapping[str, Generated]) -> None:
    """Compare the routes of each sample with the choices of transformers for its tokens."""
    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for request in asked:
        sample = samples[request.key]
        tokens = np.concatenate([request.prompt_ids, sample.token_ids])[:-1]
        with torch.no_grad():
            logits = oracle(torch.from_numpy(tokens.astype(np.int64))[None], output_router_logits=True).router_logits
        expected = [layer.topk(NUM_CHOSEN).indices.sort(-1).values for layer in logits]
        assert sample.routes is not None
        assert sample.routes.dtype == np.uint8
        assert sample.routes.nbytes == route_bytes(read_spec(model)) * len(sample.routes), "as planned"
        assert np.array_equal(np.sort(sample.routes, -1), torch.stack(expected, 1).numpy())


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
    assert_routes(model, asked, samples)
    assert engine.step() == []
    engine.start(asked, SAMPLING)
    engine.step()
    engine.abort()
    again = run(engine, asked, SAMPLING)
    assert all(np.array_equal(again[key].routes, sample.routes) for key, sample in samples.items())


def test_a_model_without_experts_has_no_routes(small: Small) -> None:
    settings = EngineSettings(small("qwen3"), "float32", "cpu", 96, VOCAB, Path(), "replica-0")
    with pytest.raises(RolloutError, match="has no experts, so there are no routes"):
        EngineRoutes(settings, lambda method, **_: [])


def test_routes_that_cannot_be_the_models_are_refused(small: Small) -> None:
    settings = EngineSettings(small("qwen3_moe"), "float32", "cuda", 96, VOCAB, Path(), "replica-0")
    sample = Generated("a", np.zeros(2, np.int32), np.zeros(2, np.float32), "stop", 1)

    def added(routes: np.ndarray[Any, Any] | None) -> Any:
        engine_routes = EngineRoutes(settings, lambda method, **_: [])
        engine_routes.add("a", "a-1")
        output = SimpleNamespace(
            request_id="a",
            prompt_token_ids=[1, 2],
            outputs=[SimpleNamespace(token_ids=[3, 4], routed_experts=routes)],
        )
        return engine_routes.added([sample], [output])[0].routes  # type: ignore[list-item]

    # On a GPU, vLLM returns all four layers. The second one has no experts.
    routes = np.broadcast_to(np.array([[0, 1], [9, 9], [2, 3], [3, 1]], np.uint8), (3, 4, 2)).copy()
    assert added(routes)[2].tolist() == [[0, 1], [2, 3], [3, 1]]
    with pytest.raises(RolloutError, match="a: vLLM returned no routes"):
        added(None)
    with pytest.raises(RolloutError, match=r"a: the engine returned routes \[2, 3, 2\], expected \[3, 3, 2\]"):
        added(routes[:2])
    for wrong, message in [
        ((4, 1), r"token 1 has the routes \[\[0, 1\], \[4, 1\], \[3, 1\]\], not 4 experts"),
        ((-1, 1), r"token 1 has the routes \[\[0, 1\], \[-1, 1\], \[3, 1\]\], not 4 experts"),
        ((1, 1), "the same expert twice"),
    ]:
        spoilt = routes.astype(np.int16)
        spoilt[1, 2] = wrong
        with pytest.raises(RolloutError, match=message):
            added(spoilt)


def test_earlier_turns_keep_their_routes() -> None:
    routes = np.arange(12, dtype=np.uint8).reshape(6, 1, 2)
    sample = Generated("a/1", np.zeros(3, np.int32), np.zeros(3, np.float32), "stop", 1, routes=routes)
    (without,), stored = take_out([sample], {"a/1": routes[:2] + 100})
    assert without.routes is None
    assert stored is not None
    assert bytes(stored["routes"][1]) == bytes([100, 101, 102, 103, *range(4, 12)])
    with pytest.raises(RolloutError, match="the engine returned no routes"):
        take_out([replace(sample, routes=None)], {})
