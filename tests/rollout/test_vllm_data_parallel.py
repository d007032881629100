"""A vLLM engine of a mixture with data-parallel attention: its ranks generate different samples and share experts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from mrl.rollout.engine import RolloutEngine
from tests.rollout.conftest import Small, requests
from tests.rollout.test_vllm_engine import assert_same
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
    oracle = make_engine("transformers", small("qwen3_moe"))
    first, second = update(engine, small("qwen3_moe"), 1)
    update(oracle, small("qwen3_moe"), 1)
    assert {name for name in first if first[name] != second[name]} == {
        name for name in first if "routed_experts" in name
    }, "attention is the same on both ranks, and the experts are others"
    engine.start(requests(3, 1, 12), SAMPLING)
    loads = sorted(rank.engine.get_num_unfinished_requests() for rank in engine._engine._ranks)
    assert loads == [1, 2]
    engine.step()
    engine.abort()
    assert_follows(engine, oracle, [small("qwen3_moe", 1)])
    assert_same(engine, oracle, requests(1, 1, 12), SAMPLING)  # the other rank has no sample
    for either in (engine, oracle):
        either.sleep()
        either.wake("weights")
        update(either, small("qwen3_moe", 2), 3)
        either.wake("kv_cache")
    assert_same(engine, oracle, requests(3, 2, 12), SAMPLING)


def test_an_error_on_a_rank_ends_the_pass_while_another_rank_waits() -> None:
    from mrl.rollout.vllm_data_parallel import DataParallelEngine

    released = threading.Event()

    def die() -> list[Any]:
        raise RuntimeError("the worker has died")

    engine: Any = DataParallelEngine.__new__(DataParallelEngine)
    engine._threads, engine._rank_of = ThreadPoolExecutor(2), {}
    engine._ranks = [SimpleNamespace(step=lambda: released.wait(4) and []), SimpleNamespace(step=die)]
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="the worker has died"):
        engine.step()
    assert time.monotonic() - began < 3, "the error waits for no other rank"
    released.set()
