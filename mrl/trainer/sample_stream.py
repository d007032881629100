"""Batches of samples for the steps: batch k belongs to step k, and batches are drawn in that order.

Up to `asynchrony.ahead` batches may be started before the one being trained: batch k starts as soon as k - 1 - ahead
steps are trained and their weights are in the engines. Therefore no token is more than `ahead` updates old when it is
trained on. No sample is dropped because of its age, and no slow sample is replaced by another prompt.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

from mrl.config.arithmetic import corrects_engines, has_own_rollout_pool
from mrl.config.schema import Config
from mrl.controller.transport import fetch
from mrl.errors import CheckpointError, WireError
from mrl.observe.metrics import StepTimer
from mrl.protocol import DataProto
from mrl.protocol.batch_file import batch_from_bytes, batch_to_bytes
from mrl.rollout.gate import Gate
from mrl.rollout.hybrid_engine import HybridEngine
from mrl.trainer.collector import Collector
from mrl.trainer.engine_probe import Answers, EngineProbe
from mrl.trainer.generation import OpenRounds, ScoredBatch
from mrl.trainer.segments import segments_from_json, segments_to_json

_LOOK_S = 0.01
_CLOSE_S = 10.0
_FETCH_S = 600.0


class SampleStream:
    """Source of the samples of each step. This class generates them when the step asks for them."""

    def __init__(
        self, config: Config, collector: Collector, hybrid: HybridEngine, probe: EngineProbe, clock: StepTimer
    ) -> None:
        self.collector, self._hybrid, self._probe, self._clock = collector, hybrid, probe, clock
        self._gate = Gate(config.asynchrony.ahead, config.training.steps)
        self._weighs = corrects_engines(config)
        self._whole: dict[int, ScoredBatch] = {}
        """Complete batches that no step has taken yet."""

    def next(self, step: int) -> tuple[ScoredBatch, Answers]:
        """Return the batch of this step, and the engines' answers to compare with the trainer."""
        with self._clock("rollout"), self._hybrid.rollout_mode():
            if step not in self._whole:
                self._whole[step] = self.collector.collect(step)
            return self._take(step), self._probe.ask(step)

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Give the engines the newest weights, with no generation running, for the length of the block."""
        self._settle()
        with self._hybrid.rollout_mode():
            yield

    def drawn_ahead(self) -> dict[int, ScoredBatch]:
        """Wait until no generation is running. Return the complete batches that have been drawn but not trained."""
        if self._gate.ahead:
            with self._clock("rollout"):
                self._settle()
        return dict(sorted(self._whole.items()))

    def go_on(self, step: int, drawn: Mapping[int, ScoredBatch]) -> None:
        """Continue after this step with the batches that had been drawn by then."""
        if len(drawn) > self._gate.ahead and not self._weighs:
            problem = f"{len(drawn)} batches were drawn ahead of step {step} by older weights, and no correction is set"
            fix = f"set asynchrony.ahead={len(drawn)}, or algorithm.correction={{level: token}}"
            raise CheckpointError(problem, fix=fix)
        self._gate.trained, self._gate.begun = step, step + len(drawn)
        self._whole = dict(drawn)

    def close(self) -> None:
        """Stop the generation in other threads."""

    def _settle(self) -> None:
        """Wait until no generation is running."""

    def _take(self, step: int) -> ScoredBatch:
        return self._whole.pop(step)


class _Threaded(SampleStream):
    """Generates in another thread. The actor sends weights only while the trainer waits for samples."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._thread = ThreadPoolExecutor(1, "generation")
        self._under_way: list[Future[None]] = []
        self._has_actor = False
        self.collector.generator.progress = self._show

    def close(self) -> None:
        self._hybrid.fleet.is_closing = True
        self._free_actor()
        self._thread.shutdown(wait=False, cancel_futures=True)
        wait(self._under_way, _CLOSE_S)

    def _settle(self) -> None:
        self._free_actor()
        while self._under_way:
            self._under_way[0].result()
            self._under_way.pop(0)

    def _show(self, done: int, total: int) -> None:
        if not self._has_actor:
            self._clock.progress(done, total)

    def _hold_actor(self) -> None:
        self._hybrid.actor_lock.acquire()
        self._has_actor = True

    def _free_actor(self) -> None:
        if self._has_actor:
            self._has_actor = False
            self._hybrid.actor_lock.release()


class BetweenBatches(_Threaded):
    """Generates the next batches while one is trained. Engines get weights between batches: one version per batch."""

    def next(self, step: int) -> tuple[ScoredBatch, Answers]:
        with self._clock("rollout"):
            self._free_actor()
            self._gate.trained = step - 1
            if self._gate.begun < step:
                with self._hybrid.rollout_mode():
                    self._under_way.append(self._thread.submit(self._collect, next(self._gate.open())))
                    self._settle()
            with self.settled():
                answers = self._probe.ask(step)
            self._under_way += [self._thread.submit(self._collect, number) for number in self._gate.open()]
            self._hold_actor()
        return self._take(step), answers

    def _collect(self, number: int) -> None:
        self._whole[number] = self.collector.collect(number)


class _Open(SampleStream):
    """Generates all batches that may start, at the same time. Engines get weights between tokens of running samples."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._taken: DataProto | None = None
        self._finished: set[int] = set()

    def drawn_ahead(self) -> dict[int, ScoredBatch]:
        self._learn()
        for number in super().drawn_ahead():
            self._finish(number)
        return dict(sorted(self._whole.items()))

    def go_on(self, step: int, drawn: Mapping[int, ScoredBatch]) -> None:
        super().go_on(step, drawn)
        self._finished = set(drawn)

    def _finish(self, number: int) -> None:
        """Complete the scores. This may need the actor's devices, which the trainer holds now."""
        if number not in self._finished:
            self._finished.add(number)
            self._whole[number] = self.collector.finish(self._whole[number])

    def _learn(self) -> None:
        """Update the prompt sampler with the last batch. The fixed moment makes its draws independent of timing."""
        if self._taken is not None:
            self.collector.learn(self._taken)
            self._taken = None

    def _opening(self) -> Iterator[tuple[int, DataProto]]:
        for number in self._gate.open():
            yield number, self.collector.draw()

    def _take(self, step: int) -> ScoredBatch:
        self._taken = self._whole[step].batch
        self._finish(step)
        return super()._take(step)


class InFlight(_Open, _Threaded):
    """Engines with their own devices: another thread generates all the time."""

    _rounds: OpenRounds | None = None

    def next(self, step: int) -> tuple[ScoredBatch, Answers]:
        with self._clock("rollout"):
            self._free_actor()
            self._learn()
            answers: Answers = {}
            if self._rounds is not None:
                self._wait_until(self._hybrid.has_newest)
            if self._rounds is None or self._probe.is_due(step):
                with self.settled():
                    answers = self._probe.ask(step)
            self._gate.trained = step - 1
            self._begin()
            self._wait_until(lambda: step in self._whole)
            self._hold_actor()
        return self._take(step), answers

    def _begin(self) -> None:
        if self._rounds is None:
            self._rounds = OpenRounds(self.collector.generator, self._opening, self._whole, stays_open=True)
            self._under_way = [self._thread.submit(self._rounds.run)]

    def _settle(self) -> None:
        if self._rounds is not None:
            self._rounds.stays_open = False
        super()._settle()
        self._rounds = None

    def _wait_until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            for ended in wait(self._under_way, _LOOK_S).done:
                ended.result()


class CarriedOver(_Open):
    """Engines that share devices with the trainer. Samples of later batches pause until the engines wake up again."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._running: Iterator[None] | None = None

    def next(self, step: int) -> tuple[ScoredBatch, Answers]:
        with self._clock("rollout"), self._hybrid.rollout_mode():
            self._learn()
            self._gate.trained = step - 1
            answers: Answers = {}
            while step not in self._whole:
                self._advance()
            if self._probe.is_due(step):
                self._exhaust()
                answers = self._probe.ask(step)
        return self._take(step), answers

    @contextmanager
    def settled(self) -> Iterator[None]:
        with self._hybrid.rollout_mode():
            self._exhaust()
            yield

    def _settle(self) -> None:
        if self._running is not None:
            with self.settled():
                pass

    def _advance(self) -> None:
        """Generate until a sample ends. If no generation is running, start the batches that may start."""
        if self._running is None:
            self._running = OpenRounds(self.collector.generator, self._opening, self._whole).samples()
        if next(self._running, "end") == "end":
            self._running = None

    def _exhaust(self) -> None:
        while self._running is not None:
            self._advance()


def open_stream(
    config: Config, collector: Collector, hybrid: HybridEngine, probe: EngineProbe, clock: StepTimer
) -> SampleStream:
    kind: type[SampleStream] = SampleStream
    if config.asynchrony.ahead:
        in_flight = InFlight if has_own_rollout_pool(config) else CarriedOver
        kind = BetweenBatches if config.asynchrony.weights == "between" else in_flight
    return kind(config, collector, hybrid, probe, clock)


def stored_form(batch: DataProto) -> DataProto:
    """Return samples in the form in which a file holds them: with all values, and JSON instead of arrays of arrays."""
    if batch.stored:
        local = fetch(batch.select(*batch.stored), _FETCH_S)
        batch = DataProto({**batch.columns(), **local.columns()}, batch.row_ids, {})
    if "other_segments" in batch.columns():
        batch = batch.with_column("other_segments", [segments_to_json(row) for row in batch["other_segments"]])
    return batch


def from_stored_form(batch: DataProto) -> DataProto:
    if "other_segments" in batch.columns():
        batch = batch.with_column("other_segments", [segments_from_json(row) for row in batch["other_segments"]])
    return batch


_LENGTH = struct.Struct("<Q")


def drawn_to_bytes(drawn: Mapping[int, ScoredBatch], version: int) -> bytes:
    """Return the content of the file, with this version of the weights; empty if no batch is drawn."""
    parts = []
    for number, scored in drawn.items():
        batch = stored_form(scored.batch)
        metadata = {"number": number, "version": version, "metrics": scored.metrics}
        data = batch_to_bytes(batch.columns(), batch.row_ids, metadata)
        parts += [_LENGTH.pack(len(data)), data]
    return b"".join(parts)


def drawn_from_bytes(content: bytes) -> tuple[dict[int, ScoredBatch], int | None]:
    """Return the batches, and the version of the weights at the time; None if no batch was drawn.

    Version numbers continue from there, so that tokens drawn before keep their age in updates.
    """
    drawn: dict[int, ScoredBatch] = {}
    version, at = None, 0
    try:
        while at < len(content):
            (size,) = _LENGTH.unpack_from(content, at)
            at += _LENGTH.size
            if size > len(content) - at:
                raise ValueError(f"a batch should have {size} bytes, but {len(content) - at} are left")
            columns, row_ids, metadata = batch_from_bytes(content[at : at + size])
            batch = from_stored_form(DataProto(columns, row_ids, {}))
            at += size
            version = int(metadata["version"])
            drawn[int(metadata["number"])] = ScoredBatch(batch, metadata["metrics"])
    except (struct.error, WireError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"cannot read the batches that were drawn ahead: {error}") from error
    return drawn, version
