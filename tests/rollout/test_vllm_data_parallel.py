"""A vLLM engine of a mixture with data-parallel attention: its ranks generate different samples and share experts."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mrl.rollout.engine import Cache, RolloutEngine
from mrl.rollout.requests import Sampling
from tests.rollout.conftest import Small, requests, run
from tests.rollout.test_in_flight import AT, finished, log_probs
from tests.rollout.test_vllm_engine import assert_same
from tests.rollout.test_vllm_routes import assert_routes
from tests.rollout.test_vllm_weights import SAMPLING, assert_follows
from tests.rollout.trainer_side import update

ENGINE = "tests.rollout.expert_parallel_engine:ExpertParallelEngine"


@pytest.mark.slow
def test_ranks_that_share_experts_compute_with_each_version(
    make_engine: Callable[..., RolloutEngine], small: Small, capfd: pytest.CaptureFixture[str]
) -> None:
    engine: Any = make_engine(ENGINE, small("qwen3_moe"), dp=2, enable_expert_parallel=True)
    print("standard output is kept")
    assert "standard output is kept" in capfd.readouterr().out
    with ThreadPoolExecutor(1) as new_thread:  # a rank that starts does not change the threads of the whole process
        assert new_thread.submit(torch.get_num_threads).result() == torch.get_num_threads()
    oracle = make_engine("transformers", small("qwen3_moe"))
    first, second = update(engine, small("qwen3_moe"), 1)
    update(oracle, small("qwen3_moe"), 1)
    assert {name for name in first if first[name] != second[name]} == {
        name for name in first if "routed_experts" in name
    }, "attention is the same on both ranks, and the experts are others"
    engine.start(requests(3, 1, 12), SAMPLING)
    ranks = engine._engine._nodes[0].__self__._ranks
    assert [rank.engine.get_num_unfinished_requests() for rank in ranks] == engine._engine._loads == [2, 1]
    engine.step()
    engine.abort()
    assert [rank.engine.get_num_unfinished_requests() for rank in ranks] == engine._engine._loads == [0, 0]
    assert_follows(engine, oracle, [small("qwen3_moe", 1)])
    assert_same(engine, oracle, requests(1, 1, 12), SAMPLING)  # the other rank has no sample
    for either in (engine, oracle):
        either.sleep()
        either.wake("weights")
        update(either, small("qwen3_moe", 2), 3)
        either.wake("kv_cache")
    assert_same(engine, oracle, requests(3, 2, 12), SAMPLING)


@pytest.fixture(scope="module")
def changing(make_engine: Callable[..., RolloutEngine], small: Small) -> Any:
    """Return an engine of two ranks with router replay and weights in flight."""
    # Twelve blocks of the cache are too few for a rank's samples: vLLM computes some of them again.
    options = {"enable_expert_parallel": True, "num_gpu_blocks_override": 12}
    engine: Any = make_engine(ENGINE, small("qwen3_moe"), dp=2, routes=True, in_flight=True, **options)
    assert not engine._engine._nodes[0].__self__._ranks[0].engine.vllm_config.scheduler_config.async_scheduling
    return engine


@pytest.mark.slow
def test_each_rank_returns_the_routes_of_its_samples(changing: Any, small: Small) -> None:
    update(changing, small("qwen3_moe"), 1)
    for number, asked in enumerate((requests(5, 2, 24), requests(1, 1, 12), requests(3, 1, 8))):
        asked = [replace(request, key=f"{number}/{request.key}") for request in asked]
        samples = run(changing, asked, SAMPLING)
        assert_routes(small("qwen3_moe"), asked, samples)
    changing.start(asked, SAMPLING)
    changing.step()
    changing.abort()
    again = run(changing, asked, SAMPLING)
    assert all(np.array_equal(again[key].routes, sample.routes) for key, sample in samples.items())


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["recompute", "keep"])
def test_all_ranks_continue_with_weights_that_arrive_in_flight(changing: Any, small: Small, cache: Cache) -> None:
    first, second = small("qwen3_moe"), small("qwen3_moe", 1)
    update(changing, first, 1)
    asked = [replace(request, key=f"{cache}/{request.key}") for request in requests(3, 1, 16)]
    changing.start(asked, Sampling())
    for _ in range(AT):
        assert changing.step() == []
    update(changing, second, 2, cache)
    samples = finished(changing)
    for request in asked:
        sample = samples[request.key]
        assert (sample.weight_version, sample.switches) == (1, ((AT, 2),))
        old, new = (log_probs(model, request, sample) for model in (first, second))
        np.testing.assert_allclose(sample.log_probs[:AT], old[:AT], rtol=0, atol=1e-4)
        if cache == "recompute":
            np.testing.assert_allclose(sample.log_probs[AT:], new[AT:], rtol=0, atol=1e-4)
        else:
            assert np.abs(sample.log_probs[AT:] - new[AT:]).max() > 1e-3, "the cache is that of both models"
        assert sample.routes is not None
    later = [replace(request, key=f"later/{request.key}") for request in asked]
    for key, sample in run(changing, later, Sampling()).items():
        request = next(request for request in later if request.key == key)
        assert (sample.weight_version, sample.switches) == (2, ())
        np.testing.assert_allclose(sample.log_probs, log_probs(second, request, sample), rtol=0, atol=1e-4)
