"""Fakes for an engine and for other ranks, so that tests of a worker's own arithmetic take milliseconds."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mrl.config.mesh import Mesh
from mrl.config.schema import MegatronModelConfig
from mrl.controller import RankInfo, Rendezvous
from mrl.engine.optimizer import StepOutcome
from mrl.engine.packed_rows import TokenRows
from mrl.engine.scores import LossFunction, LossInput, ScoreRequest, Scores
from mrl.protocol import DataProto
from mrl.protocol.columns import from_rows
from mrl.workers.messages import ModelSetup
from mrl.workers.model_worker import ModelWorker
from tests.workers.by_hand import Row

UIDS = ("a", "b", "a", "c", "b", "a", "d", "d")
LENGTHS = (5, 3, 1, 4, 6, 2, 7, 3)
SETUP = ModelSetup("nowhere", "lm", MegatronModelConfig(max_tokens_per_device=64), seed=1, timeout_s=60)
OUTCOME = StepOutcome(grad_norm=1.25, learning_rate=3e-4, applied=True)
Answer = TypeVar("Answer")


def make_rows(*names: str, with_holes: bool = True) -> list[Row]:
    """Make eight rows of four prompts with these columns. With holes, one row has no written token at all."""
    chance = torch.Generator().manual_seed(5)
    rows = []
    for number, (uid, length) in enumerate(zip(UIDS, LENGTHS, strict=True)):
        mask = (torch.rand(length, generator=chance) < 0.7).tolist() if with_holes else [True] * length
        if with_holes and number in (3, 4):
            mask = [False, True, True, False, True, False][:length] if number == 4 else [False] * length
        prompt = torch.randint(1, 90, (number % 3 + 1,), generator=chance).tolist()
        response = torch.randint(1, 90, (length,), generator=chance).tolist()
        score = 0.5 if uid == "d" else round(float(torch.randn((), generator=chance)), 3)  # d's answers are alike
        row = Row(uid, prompt, response, mask, score, baseline=0.1 * number)
        base = -torch.rand(length, generator=chance, dtype=torch.float64) * 3
        written = torch.tensor(mask, dtype=torch.bool)
        for name in ("old_log_probs", "ref_log_probs", "rollout_log_probs", "advantages", "values", "returns"):
            noise = torch.randn(length, generator=chance, dtype=torch.float64)
            values = base + 0.5 * noise if name.endswith("log_probs") else noise
            # Values of tokens that the model did not write must not affect any result.
            filler = torch.nan if name in ("ref_log_probs", "rollout_log_probs") else 77.0
            if name in names:
                row.columns[name] = torch.where(written, values, filler)
        if "score_norms" in names:
            row.columns["score_norms"] = torch.where(written, 0.1 + (1 - base.exp()).square(), torch.nan)
        rows.append(row)
    return rows


def batch_of(rows: Sequence[Row], first_id: int = 0, row_ids: Sequence[int] | None = None) -> DataProto:
    """Return the rows as a worker gets them, without a mask if every token was written."""
    tensors: dict[str, Any] = {
        "prompts": from_rows([row.prompt for row in rows]),
        "responses": from_rows([row.response for row in rows]),
        "scores": torch.tensor([row.score for row in rows], dtype=torch.float64),
        "baseline_scores": torch.tensor([row.baseline for row in rows], dtype=torch.float64),
    }
    if not all(all(row.mask) for row in rows):
        tensors["response_mask"] = from_rows([[int(is_written) for is_written in row.mask] for row in rows])
    for name in rows[0].columns:
        tensors[name] = from_rows([row.columns[name] for row in rows])
    ids = first_id + 10 * np.arange(len(rows))[::-1] if row_ids is None else row_ids
    return DataProto.from_dict(tensors, row_ids=ids)


def make_place(rank: int = 0, mesh: Mesh | None = None) -> RankInfo:
    """Return a rank in a world that is never joined."""
    mesh = mesh or Mesh(1)
    return RankInfo("actor", rank, rank, mesh, Rendezvous("", 0, mesh.world_size, None))


class LocalWorld(ModelWorker):
    """A worker in a world that `run_distributed` has already created."""

    def init_process_group(self, backend: str, timeout_s: float) -> None:
        """Do nothing: the process group exists."""


@dataclass
class Call:
    """Arguments of a call to the engine."""

    rows: TokenRows
    micro_batches: list[list[int]]
    request: ScoreRequest
    weights: object


@dataclass
class StubMemory:
    """Records whose weights are in place, and which parts were requested."""

    weights: object = "own"
    asked: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)

    @contextmanager
    def weights_of(self, copy: object) -> Iterator[None]:
        before, self.weights = self.weights, copy
        yield
        self.weights = before

    def need(self, *names: str) -> None:
        self.asked.append(("need", names))

    def offload(self, *names: str) -> None:
        self.asked.append(("offload", names))

    def give_back(self) -> None:
        self.asked.append(("give_back", ()))

    def onload(self, *names: str) -> None:
        self.asked.append(("onload", names))


class StubEngine:
    """Returns the scores from its constructor, in row order, and computes losses like Megatron's engine."""

    def __init__(self, scores: Scores | None) -> None:
        self.scores = scores
        self.memory = StubMemory()
        self.adapters: object = None
        self.expert_load: object = None
        self.calls: list[Call] = []

    def other_experts(self) -> dict[str, float]:
        return {}

    def _note(self, rows: TokenRows, micro_batches: Sequence[npt.NDArray[np.int64]], request: ScoreRequest) -> None:
        sizes = [index.tolist() for index in micro_batches]
        self.calls.append(Call(rows, sizes, request, self.memory.weights))

    def forward(
        self, rows: TokenRows, micro_batches: Sequence[npt.NDArray[np.int64]], request: ScoreRequest
    ) -> Scores | None:
        self._note(rows, micro_batches, request)
        return self.scores

    def update(
        self,
        rows: TokenRows,
        micro_batches: Sequence[npt.NDArray[np.int64]],
        loss: LossFunction,
        request: ScoreRequest,
    ) -> tuple[dict[str, float], StepOutcome]:
        self._note(rows, micro_batches, request)
        assert self.scores is not None, "only the last stage has results of an update"
        parts = {name: getattr(self.scores, name) for name in Scores.__dataclass_fields__}
        lengths, totals = rows.response_lengths.tolist(), dict[str, float]()
        for index in micro_batches:
            scores = Scores(**{name: pick(part, lengths, index) for name, part in parts.items() if part is not None})
            here = rows.take(index)
            output = loss(LossInput(scores, here.response_lengths, here.columns))
            output.loss.backward()  # type: ignore[no-untyped-call]
            for name, value in output.reports.items():
                assert not value.requires_grad, f"{name} is reported and not learnt from"
                totals[name] = totals.get(name, 0.0) + float(value)
        return totals, OUTCOME


def pick(values_T: Tensor, lengths: list[int], index: npt.NDArray[np.int64]) -> Tensor:
    """Return the tokens of these rows."""
    pieces = torch.split(values_T, lengths)
    return torch.cat([pieces[row] for row in index])


class Shards:
    """Data-parallel ranks as threads. A reduction waits until all of them have passed their part."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._barrier = threading.Barrier(number, timeout=20)
        self._parts: list[Tensor] = [torch.zeros(0)] * number

    def reduced(self, shard: int, x: Tensor, how: Callable[[Tensor], Tensor]) -> Tensor:
        self._parts[shard] = x
        self._barrier.wait()
        whole = how(torch.stack(self._parts))
        self._barrier.wait()
        return whole

    def run(self, work: Callable[[int], Answer]) -> list[Answer]:
        """Run `work` on each shard, and return the results."""
        found: dict[int, Answer] = {}
        errors: list[BaseException] = []

        def one(shard: int) -> None:
            try:
                found[shard] = work(shard)
            except BaseException as error:
                self._barrier.abort()
                errors.append(error)

        threads = [threading.Thread(target=one, args=(shard,)) for shard in range(self.number)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return [found[shard] for shard in range(self.number)]


class OfShards:
    """A mixin for workers: reductions go over shards of this process."""

    shards: Shards
    shard: int

    def sum_over_shards(self, x: Tensor) -> Tensor:
        return self.shards.reduced(self.shard, x, lambda parts: parts.sum(0))

    def max_over_shards(self, x: Tensor) -> Tensor:
        return self.shards.reduced(self.shard, x, lambda parts: parts.amax(0))


def cut(rows: Sequence[Row], num_shards: int) -> list[list[int]]:
    """Return the positions of each shard's rows. Shards differ in size, and prompts span several shards."""
    bounds = np.linspace(0, len(rows), num_shards + 1).astype(int) + np.array([0] + [1] * (num_shards - 1) + [0])
    order = np.array([6, 1, 0, 4, 3, 7, 2, 5])
    return [order[low:high].tolist() for low, high in itertools.pairwise(bounds)]
