"""Program of each trainer rank while an engine in another process samples: send weights, score samples, and learn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]

from mrl.config.schema import ParallelConfig
from mrl.engine.engine import MegatronEngine
from mrl.engine.packed_rows import TokenRows
from mrl.engine.parallel import model_parallel
from mrl.engine.scores import ScoreRequest
from mrl.engine.weights import held_tensors
from mrl.models.rollout_table import EngineSizes
from mrl.weight_sync.exchange import WorldTransport
from mrl.weight_sync.ipc import socket_path
from mrl.weight_sync.planner import ReshardPlanner, RolloutLayout
from mrl.weight_sync.resharder import Resharder, WeightSyncSpec
from tests.engine.tiny_training import build, negative_score

NUM_UPDATES = 10
LIMIT_S = 200.0


@dataclass(frozen=True)
class SamplingCase:
    """A training layout and an engine. `version` is the first version; the trained weights get the next."""

    model: str
    parallel: ParallelConfig
    sizes: EngineSizes
    sockets: str
    replica: str
    version: int


@dataclass(frozen=True)
class Differences:
    """Largest differences between sampled log-probs and this rank's, if it has any."""

    before: float
    after: float
    stale: float
    """Of the first samples and the trained weights."""


def meeting(sockets: str) -> FileStore:
    """Return the store with the samples for the ranks."""
    store = FileStore(f"{sockets}/samples", -1)
    store.set_timeout(timedelta(seconds=LIMIT_S))
    return store


def send_and_score(cases: list[SamplingCase]) -> list[Differences | None]:
    """Run every case on this rank."""
    return [send_and_score_one(case) for case in cases]


def send_and_score_one(case: SamplingCase) -> Differences | None:
    """Send weights, and compare samples and log-probs, before and after some updates."""
    store = meeting(case.sockets)
    with model_parallel(case.parallel, seed=0) as groups:
        engine = build(case.model, case.parallel, groups)
        spec, num_ranks = engine.request.spec, dist.get_world_size()
        held = {(shard.chunk, shard.name): tensor for shard, tensor in held_tensors(engine.models, spec, "lm", groups)}
        rollout = RolloutLayout(case.sizes, tuple(range(case.sizes.tp)), (0,) * num_ranks)
        sockets = tuple(socket_path(Path(case.sockets), case.replica, rank) for rank in range(case.sizes.tp))
        planner = ReshardPlanner(spec, case.parallel, groups.mesh, rollout)
        told = WeightSyncSpec(rollout, sockets, "float32", "float32", 1 << 18, LIMIT_S)
        resharder = Resharder(planner, WorldTransport(torch.device("cpu")), held, told)

        def samples(version: int) -> tuple[TokenRows, Tensor]:
            report = resharder.send(version)
            assert not report.failure, report.failure
            return _rows(engine, json.loads(store.get(f"{version}")))

        first = samples(case.version)
        before = _difference(engine, *first)
        for _ in range(NUM_UPDATES):
            engine.update(first[0], _micro_batches(first[0]), negative_score, ScoreRequest())
        after = _difference(engine, *samples(case.version + 1))
        stale = _difference(engine, *first)
    return None if before is None or after is None or stale is None else Differences(before, after, stale)


def _rows(
    engine: MegatronEngine, found: Sequence[tuple[list[int], list[int], list[float]]]
) -> tuple[TokenRows, Tensor]:
    """Return this data-parallel rank's samples, and the engine's log-probs of their responses."""
    mine = found[engine.groups.at.dp :: engine.groups.mesh.dp]
    tokens = torch.tensor([token for prompt, response, _ in mine for token in prompt + response])
    lengths = np.array([len(prompt) + len(response) for prompt, response, _ in mine])
    responses = np.array([len(response) for _, response, _ in mine])
    return TokenRows(tokens, lengths, responses, {}), torch.tensor([value for *_, values in mine for value in values])


def _micro_batches(rows: TokenRows) -> list[np.ndarray]:
    return np.array_split(np.arange(len(rows.lengths)), 2)


def _difference(engine: MegatronEngine, rows: TokenRows, sampled_T: Tensor) -> float | None:
    scores = engine.forward(rows, _micro_batches(rows), ScoreRequest())
    if scores is None or scores.log_probs_T is None:
        return None
    return float((scores.log_probs_T - sampled_T).abs().max())
