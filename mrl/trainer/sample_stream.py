"""Hands each step its batch: batch k is for step k, and is drawn in that order, whoever is finished first.

`asynchrony.ahead` batches may be begun before the one that is trained: batch k once k - 1 - ahead steps are trained,
and their weights are in the engines. So no token is drawn by weights that are more than `ahead` updates old when it is
trained on. Nothing is dropped for its age, and no prompt is drawn for another batch because some sample was slow.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

from mrl.config.arithmetic import has_own_rollout_pool
from mrl.config.schema import Config
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


class SampleStream:
    """Where the samples of a step come from. This one generates them when the step asks for them."""

    def __init__(
        self, config: Config, collector: Collector, hybrid: HybridEngine, probe: EngineProbe, clock: StepTimer
    ) -> None:
        self.collector, self._hybrid, self._probe, self._clock = collector, hybrid, probe, clock
        self._gate = Gate(config.asynchrony.ahead, config.training.steps)
        self._weighs = config.algorithm.correction is not None
        self._whole: dict[int, ScoredBatch] = {}
        """Batches that no step has taken yet."""

    def next(self, step: int) -> tuple[ScoredBatch, Answers]:
        """Return the batch of this step, and what engines answered that are to be compared with the trainer."""
        with self._clock("rollout"), self._hybrid.rollout_mode():
            if step not in self._whole:
                self._whole[step] = self.collector.collect(step)
            return self._take(step), self._probe.ask(step)

    @contextmanager
    def settled(self) -> Iterator[None]:
        """The engines with the newest weights and nothing under way, for the length of the block."""
        self._settle()
        with self._hybrid.rollout_mode():
            yield

    def drawn_ahead(self) -> dict[int, ScoredBatch]:
        """Return the batches that are drawn and not trained, all of them whole: nothing is under way beside them."""
        if self._gate.ahead:
            with self._clock("rollout"):
                self._settle()
        return dict(sorted(self._whole.items()))

    def go_on(self, step: int, drawn: Mapping[int, ScoredBatch]) -> None:
        """Go on after this step with the batches that had been drawn by then."""
        if len(drawn) > self._gate.ahead and not self._weighs:
            what = f"{len(drawn)} batches were drawn ahead of step {step} by older weights, which nothing weighs now"
            raise CheckpointError(what, fix=f"asynchrony.ahead={len(drawn)}, or algorithm.correction={{level: token}}")
        self._gate.trained, self._gate.begun = step, step + len(drawn)
        self._whole = dict(drawn)

    def close(self) -> None:
        """End what another thread generates."""

    def _settle(self) -> None:
        """Wait until nothing is under way."""

    def _take(self, step: int) -> ScoredBatch:
        return self._whole.pop(step)


class _Threaded(SampleStream):
    """Generates in another thread, which has the actor send weights while the trainer waits for it, and only then."""

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
    """Generates the next batches while one is trained. Engines take weights between two: one version draws each."""

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
    """Generates all batches that may begin at once. Engines take weights between two tokens of what is under way."""

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
        """Complete the scores, which the actor's devices may be needed for: the trainer has them now."""
        if number not in self._finished:
            self._finished.add(number)
            self._whole[number] = self.collector.finish(self._whole[number])

    def _learn(self) -> None:
        """Tell what draws prompts of the last batch: now, so that what it draws does not depend on who is fast."""
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
    """Engines with devices of their own: another thread generates, and never stops."""

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
    """Engines that take turns with the trainer: samples that hold up no batch go on when the engines wake again."""

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
        """Generate until some sample has ended; begin with what may, where nothing is under way."""
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


_LENGTH = struct.Struct("<Q")


def drawn_to_bytes(drawn: Mapping[int, ScoredBatch], version: int) -> bytes:
    """Return the file's content, at this version of the weights; nothing where nothing is drawn."""
    parts = []
    for number, scored in drawn.items():
        batch = scored.batch
        if "other_segments" in batch.columns():
            batch = batch.with_column("other_segments", [segments_to_json(each) for each in batch["other_segments"]])
        told = {"number": number, "version": version, "metrics": scored.metrics}
        data = batch_to_bytes(batch.columns(), batch.row_ids, told)
        parts += [_LENGTH.pack(len(data)), data]
    return b"".join(parts)


def drawn_from_bytes(content: bytes) -> tuple[dict[int, ScoredBatch], int | None]:
    """Return the batches, and the version of the weights then; None where nothing was drawn.

    Versions are counted on from there: tokens that were drawn before stay as many updates old as they are.
    """
    drawn: dict[int, ScoredBatch] = {}
    version, at = None, 0
    try:
        while at < len(content):
            (size,) = _LENGTH.unpack_from(content, at)
            at += _LENGTH.size
            if size > len(content) - at:
                raise ValueError(f"a batch of {size} bytes is told of, and {len(content) - at} are left")
            columns, row_ids, told = batch_from_bytes(content[at : at + size])
            batch = DataProto(columns, row_ids, {})
            at += size
            if "other_segments" in batch.columns():
                segments = [segments_from_json(each) for each in batch["other_segments"]]
                batch = batch.with_column("other_segments", segments)
            version = int(told["version"])
            drawn[int(told["number"])] = ScoredBatch(batch, told["metrics"])
    except (struct.error, WireError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"the batches that were drawn ahead cannot be read: {error}") from error
    return drawn, version
