"""Engines for the whole session, because starting one is slow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from mrl.rollout.engine import EngineSettings, RolloutEngine, engine_class
from mrl.rollout.requests import Generated, GenerationRequest, Sampling, request_seed
from tests.models.conftest import tiny  # noqa: F401  # a fixture of tests here too
from tests.rollout.small_models import VOCAB, make_small

if TYPE_CHECKING:
    from collections.abc import Sequence

Small = Callable[..., Path]
VLLM = {"enforce_eager": True, "kv_cache_memory_bytes": 64 << 20, "block_size": 32}  # blocks that fill up are cached
MAX_TOKENS = 96


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """Return a function that makes a model's directory, once for each family, seed and kind of embedding."""

    @cache
    def make(family: str, seed: int = 0, tied: bool = False) -> Path:
        return make_small(family, tmp_path_factory.mktemp(family), seed, tied)

    return make


@pytest.fixture(scope="session")
def make_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., RolloutEngine]]:
    """Return a function that starts engines. Only one vLLM engine runs at a time, because its groups are global."""
    engines: list[RolloutEngine] = []
    names = count()

    def make(
        kind: str,
        model: Path,
        tp: int = 1,
        in_flight: bool = False,
        routes: bool = False,
        dtype: str = "float32",
        loads_files: bool = False,
        adapter_rank: int = 0,
        pp: int = 1,
        dp: int = 1,
        **vllm: object,
    ) -> RolloutEngine:
        for other in [engine for engine in engines if kind == "vllm" and isinstance(engine, engine_class(kind))]:
            other.close()
            engines.remove(other)
        sockets = tmp_path_factory.mktemp("handover")
        settings = EngineSettings(
            model, dtype, "cpu", MAX_TOKENS, VOCAB, sockets, f"replica-{next(names)}", tp, {**VLLM, **vllm}
        )
        settings = replace(settings, takes_weights_in_flight=in_flight, returns_routes=routes, loads_files=loads_files)
        settings = replace(settings, adapter_rank=adapter_rank, pp=pp, dp=dp)
        engines.append(engine_class(kind)(settings))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def requests(num_prompts: int, num_samples: int, max_tokens: int = 24) -> list[GenerationRequest]:
    """Return requests with prompts of several lengths, each sampled several times."""
    noise = np.random.default_rng(0)
    prompts = {f"p{i}": noise.integers(0, VOCAB, 18 + 5 * (i % 5)).astype(np.int32) for i in range(num_prompts)}
    return [
        GenerationRequest(f"{prompt}/{sample}", prompt, ids, request_seed(7, 3, prompt, sample), max_tokens)
        for prompt, ids in prompts.items()
        for sample in range(num_samples)
    ]


def run(engine: RolloutEngine, wanted: Sequence[GenerationRequest], sampling: Sampling) -> dict[str, Generated]:
    """Start all requests, and step until all are finished."""
    engine.start(wanted, sampling)
    finished: dict[str, Generated] = {}
    while engine.unfinished:
        finished |= {sample.key: sample for sample in engine.step()}
    return finished
