"""Samples of a real vLLM engine have the trainer's own log-probs, for any layouts of trainer and engine."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mrl.config.schema import ParallelConfig
from mrl.errors import RolloutError
from mrl.models.rollout_table import EngineSizes
from mrl.rollout.engine import EngineSettings, RolloutEngine, engine_class
from mrl.rollout.requests import Sampling
from mrl.verify.spawn import run_distributed
from tests.rollout.conftest import MAX_TOKENS, VLLM, requests, run
from tests.rollout.small_models import VOCAB, make_small
from tests.weight_sync.sampling_ranks import LIMIT_S, SamplingCase, meeting, send_and_score

NUM_RANKS = 4
TOLERANCE = 1e-5
WANTED = requests(4, 4, 16)
LAYOUTS = {
    "dp4": ParallelConfig(),
    "tp2 dp2": ParallelConfig(tp=2),
    "pp2 dp2": ParallelConfig(pp=2),
    "tp2 pp2": ParallelConfig(tp=2, pp=2),
}
EXPERT_LAYOUTS = {
    "dp4": ParallelConfig(),
    "tp2 sp pp2": ParallelConfig(tp=2, pp=2, sequence_parallel=True),
    "ep2 dp4": ParallelConfig(ep=2),
    "pp2 ep2 dp2": ParallelConfig(pp=2, ep=2),
}
ENGINE: list[RolloutEngine] = []
"""Of the process that has one."""


def start(settings: EngineSettings) -> str:
    ENGINE.append(engine_class("vllm")(settings))
    return ENGINE[0].full_tensor_reason


def sample(version: int) -> str:
    """Receive a version, and sample with it."""
    (engine,) = ENGINE
    engine.receive_weights(version)
    samples = run(engine, WANTED, Sampling())
    rows = [(request.prompt_ids.tolist(), samples[request.key]) for request in WANTED]
    return json.dumps([(prompt, made.token_ids.tolist(), made.log_probs.tolist()) for prompt, made in rows])


def stop() -> None:
    ENGINE.pop().close()


@pytest.fixture
def in_engine(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Return a function that runs others in an engine's process: vLLM and trainer use global process groups."""
    family, sizes = request.param
    model = make_small(family, tmp_path / "model", 0)
    settings = EngineSettings(model, "float32", "cpu", MAX_TOKENS, VOCAB, tmp_path, "engine", sizes.tp, VLLM)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:

        def call(function: Callable[..., Any], *args: Any) -> Any:
            return process.submit(function, *args).result(LIMIT_S)

        assert call(start, settings) == ""
        yield call
        call(stop)


@pytest.mark.slow
@pytest.mark.parametrize(
    "in_engine",
    [
        pytest.param(("qwen3", EngineSizes(1)), marks=pytest.mark.on_demand),
        ("qwen3", EngineSizes(2)),
        pytest.param(("qwen3_moe", EngineSizes(1)), marks=pytest.mark.on_demand),
        pytest.param(
            ("qwen3_moe", EngineSizes(2)), marks=pytest.mark.on_demand
        ),  # vLLM's expert parallel kernel ends its process on a CPU
    ],
    ids=["dense tp1", "dense tp2", "experts tp1", "experts tp2"],
    indirect=True,
)
def test_sampled_log_probs_are_the_trainers(
    in_engine: Callable[..., Any], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    family, sizes = request.node.callspec.params["in_engine"]
    layouts = EXPERT_LAYOUTS if family == "qwen3_moe" else LAYOUTS
    cases = [
        SamplingCase(str(tmp_path / "model"), parallel, sizes, str(tmp_path), "engine", version=1 + 2 * number)
        for number, parallel in enumerate(layouts.values())
    ]
    store = meeting(str(tmp_path))
    with ThreadPoolExecutor(1) as thread:
        world = thread.submit(run_distributed, NUM_RANKS, send_and_score, cases, timeout_s=LIMIT_S)
        for version in range(1, 1 + 2 * len(cases)):
            try:
                store.set(f"{version}", in_engine(sample, version))
            except RolloutError:
                if world.done():
                    world.result()  # whose failure is why the engine got nothing
                raise
        by_rank = world.result()
    for number, name in enumerate(layouts):
        found = [ranks[number] for ranks in by_rank if ranks[number] is not None]
        largest = {what: max(getattr(each, what) for each in found) for what in ("before", "after", "stale")}
        print(f"{name}: {largest}")
        assert max(largest["before"], largest["after"]) < TOLERANCE, (name, largest)
        assert largest["stale"] > 1000 * TOLERANCE, (name, "ten updates change little")
