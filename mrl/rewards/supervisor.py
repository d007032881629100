"""The supervisor: a process of its own between a run and its reward workers. `python -m mrl.rewards.supervisor`.

It hands a sample to a worker that is ready for one, starts that sample's clock, kills the worker where the time is up,
starts another in its place, and answers for every sample that it was given. It runs no code but mrl's, and it ends,
with everything below it, when the run that started it does.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import NoReturn

from mrl.children import adopt_orphans, children, describe_status, end_group, reap
from mrl.config.agent import AgentConfig
from mrl.config.reward import BUILT_IN, RewardConfig
from mrl.errors import MrlError
from mrl.rewards.clock import WorkerClock
from mrl.rewards.messages import (
    CONTROL,
    GOES_ON,
    MAX_REPLY_BYTES,
    MAX_SAMPLE_BYTES,
    FrameError,
    FrameReader,
    config_from_json,
    control,
    frame,
    to_json,
)
from mrl.rewards.outcome import FailureKind, failure_reply
from mrl.rewards.side_by_side import Running, too_late
from mrl.rewards.worker import load_reward_function, run_worker

_BEAT_S = 1.0
_SWEEP_S = 0.01
_END_S = 5.0
_TURN_S = 1.0  # for a worker to be ready again after a sample
_MAX_FAILED_STARTS = 3  # in a row: the next would fail as well
_STDIN, _STDOUT = 0, 1

RunWorker = Callable[[socket.socket, int, Running], NoReturn]
"""What a worker does with its channel, the process that it dies with, and where it says whose code runs."""


class WorkerHandle:
    """A worker that was started; it is thrown away with its process."""

    def __init__(self, limits: RewardConfig | AgentConfig, run_worker: RunWorker, max_reply_bytes: int) -> None:
        self.channel, theirs = socket.socketpair()
        supervisor = os.getpid()
        self._running = Running()
        self.pid = os.fork()
        if self.pid == 0:
            run_worker(theirs, supervisor, self._running)
        theirs.close()
        self.channel.setblocking(False)
        self._limits = limits
        self.started = False
        """Whether it ever was ready."""
        self.clocks: dict[int, WorkerClock] = {}
        """Of each sample that it has in hand, since it got it."""
        self.open: set[int] = set()
        """Tickets that go on here, whose next frame the run has to send."""
        self.num_wanted = 0
        """Samples that it is ready for."""
        self.clock = WorkerClock(self.pid)
        """Runs since it was last waited for, while it has none."""
        self._reader = FrameReader(max_reply_bytes)
        self.outgoing = bytearray()
        """What the channel was too full for."""

    @property
    def limit_s(self) -> float:
        """How much time it may take: for each sample, or to be ready for one."""
        if self.clocks:  # of several, each ends at its limit by itself, but where another does not let it
            return self._limits.limit_s + (_TURN_S if self._limits.concurrency > 1 else 0.0)
        if self.num_wanted or self.open:
            return float("inf")
        return _TURN_S if self.started else self._limits.start_limit_s

    @property
    def look_in_s(self) -> float:
        return min(clock.look_in_s(self.limit_s) for clock in self.clocks.values() or [self.clock])

    @property
    def is_late(self) -> bool:
        return any(clock.is_late(self.limit_s) for clock in list(self.clocks.values()) or [self.clock])

    @property
    def culprits(self) -> list[int]:
        """The sample whose code runs; where none is known to, those that are late, or else all."""
        if self._running.ticket in self.clocks:
            return [self._running.ticket]
        late = [ticket for ticket, clock in self.clocks.items() if clock.seconds >= self.limit_s]
        return late or list(self.clocks)

    def assign(self, ticket: int, body: bytes) -> None:
        """Give it a sample, or the next frame of one that goes on here, and start the clock."""
        if ticket in self.open:
            self.open.remove(ticket)
        else:
            self.num_wanted -= 1
        self.clocks[ticket] = WorkerClock(self.pid)
        self.outgoing += frame(ticket, body)
        self.write()

    def write(self) -> None:
        """Send as much as the channel takes."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):  # reading tells of the end
            del self.outgoing[: self.channel.send(self.outgoing)]

    def read(self) -> Iterator[tuple[int, bytes]] | None:
        """Return the frames that have come; None where the worker has closed its end."""
        try:
            data = self.channel.recv(1 << 16)
        except BlockingIOError:
            return iter(())
        except ConnectionResetError:
            return None
        return self._reader.feed(data) if data else None

    def end(self) -> None:
        """Kill the worker with its group; what left the group comes to the supervisor as an orphan."""
        self.channel.close()
        end_group(self.pid)


class Supervisor:
    def __init__(
        self,
        limits: RewardConfig | AgentConfig,
        run_worker: RunWorker,
        reader: FrameReader,
        max_reply_bytes: int,
    ) -> None:
        self._limits = limits
        self._is_of_agents = isinstance(limits, AgentConfig)
        self._run_worker, self._max_reply_bytes = run_worker, max_reply_bytes
        self._reader = reader
        self._parent = os.getppid()
        self._queue: deque[tuple[int, bytes]] = deque()
        self._workers: set[WorkerHandle] = set()
        self._lost: dict[int, str] = {}
        """Tickets that would go on in a worker that has ended, and how it did: the answer to their next frame."""
        self._outgoing = bytearray()
        self._is_closing = False
        self._has_orphans = False
        self._failed_starts = 0
        self._last_beat = self._next_hand_out = time.monotonic()
        for pipe in (_STDIN, _STDOUT):
            os.set_blocking(pipe, False)

    def run(self) -> None:
        """Work until the run closes its end, or is gone."""
        adopt_orphans()
        while not self._is_closing and os.getppid() == self._parent:
            while len(self._workers) < self._limits.num_workers and self._failed_starts < _MAX_FAILED_STARTS:
                self._workers.add(WorkerHandle(self._limits, self._run_worker, self._max_reply_bytes))
            self._dispatch()
            self._listen()
            self._check_clocks()
            self._reap_orphans()
            self._beat()
        for worker in list(self._workers):
            self._stop_worker(worker)
        deadline = time.monotonic() + _END_S
        while self._has_orphans and time.monotonic() < deadline:
            self._reap_orphans()
            time.sleep(_SWEEP_S)

    def _listen(self) -> None:
        """Wait for what is to be read, and to be written where there is something to write, and handle it."""
        poll, handlers = select.poll(), {_STDIN: self._read_run}
        poll.register(_STDIN, select.POLLIN)
        if self._outgoing:
            poll.register(_STDOUT, select.POLLOUT)
            handlers[_STDOUT] = self._write_run
        for worker in self._workers:
            poll.register(worker.channel, select.POLLIN | (select.POLLOUT if worker.outgoing else 0))
            handlers[worker.channel.fileno()] = partial(self._read_worker, worker)
        for descriptor, _ in poll.poll(1000 * self._wait_s()):
            handlers[descriptor]()

    # --- the run ------------------------------------------------------------------------------------------------

    def _read_run(self) -> None:
        data = os.read(_STDIN, 1 << 20)
        samples = list(self._reader.feed(data))
        # The run says when it closes: a process that it has forked may hold the pipe open.
        self._is_closing = not data or any(ticket == CONTROL for ticket, _ in samples)
        for ticket, body in samples:
            if not body.startswith(GOES_ON):
                self._queue.append((ticket, body))
            elif holder := next((worker for worker in self._workers if ticket in worker.open), None):
                holder.assign(ticket, body)
            else:
                why = self._lost.pop(ticket, "its process does not hold it")
                self._outgoing += frame(ticket, to_json({"again": why}))

    def _write_run(self) -> None:
        try:
            del self._outgoing[: os.write(_STDOUT, self._outgoing)]
        except BrokenPipeError:
            self._is_closing = True

    def _beat(self) -> None:
        """Send a sign of life to the run; not into a pipe that it does not empty."""
        if time.monotonic() - self._last_beat >= _BEAT_S and not self._outgoing:
            self._last_beat = time.monotonic()
            self._outgoing += control(beat=True)

    # --- the workers --------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Assign samples to the workers that are ready, as far as the rate allows."""
        ready = [worker for worker in self._workers for _ in range(worker.num_wanted)]
        for worker in sorted(ready, key=lambda each: len(each.clocks)):
            if not self._queue or time.monotonic() < self._next_hand_out:
                return
            worker.assign(*self._queue.popleft())
            if self._limits.max_samples_per_s is not None:
                begin = max(self._next_hand_out, time.monotonic())
                self._next_hand_out = begin + 1 / self._limits.max_samples_per_s

    def _read_worker(self, worker: WorkerHandle) -> None:
        if worker.outgoing:
            worker.write()
        try:
            frames = worker.read()
            for ticket, body in frames or ():
                self._take(worker, ticket, body)
        except (FrameError, ValueError) as error:
            self._fail_sample(worker, "crashed", f"its process sent something else than an answer: {error}")
            return
        if frames is None:
            worker.end()
            self._fail_sample(worker, "crashed", describe_status(os.waitpid(worker.pid, 0)[1]))

    def _take(self, worker: WorkerHandle, ticket: int, body: bytes) -> None:
        if ticket != CONTROL:
            if ticket not in worker.clocks:
                raise FrameError("an answer that nobody asked for")
            self._outgoing += frame(ticket, body)
            del worker.clocks[ticket]
            worker.clock = WorkerClock(worker.pid)
            if self._is_of_agents and body.startswith(GOES_ON):
                worker.open.add(ticket)
        elif worker.num_wanted + len(worker.clocks) + len(worker.open) < self._limits.concurrency:
            said = json.loads(body)
            if "problems" in said:
                self._abort(body)
                return
            if not worker.started:
                self._failed_starts = 0
                self._outgoing += control(ready=True)
            worker.started = True
            worker.num_wanted += 1

    def _abort(self, problems: bytes) -> None:
        """Tell the run why no worker can be had, and start no other."""
        self._failed_starts = _MAX_FAILED_STARTS
        self._outgoing += frame(CONTROL, problems)

    def _check_clocks(self) -> None:
        for worker in list(self._workers):
            if worker.is_late:
                late = f"it was not ready within {worker.limit_s:g} s"
                self._fail_sample(worker, "timeout", too_late(self._limits.limit_s) if worker.clocks else late)

    def _fail_sample(self, worker: WorkerHandle, kind: FailureKind, detail: str) -> None:
        """End a worker; what it ended for has failed, and what else it had in hand is tried again.

        What it held open for its next frame is answered when that comes: each frame of the run has one answer.
        Between two samples it costs nobody anything.
        """
        culprits = worker.culprits
        self._stop_worker(worker)
        for ticket, clock in worker.clocks.items():
            failed = failure_reply(kind, detail, clock.seconds)
            self._outgoing += frame(ticket, to_json(failed if ticket in culprits else {"again": detail}))
        self._lost |= dict.fromkeys(worker.open, detail)
        if not worker.clocks and not worker.started and self._failed_starts < _MAX_FAILED_STARTS:
            self._failed_starts += 1
            if self._failed_starts == _MAX_FAILED_STARTS:
                whose = "agent" if self._is_of_agents else "reward"
                what = f"no {whose} worker can be started, {_MAX_FAILED_STARTS} in a row failed: {detail}"
                self._abort(to_json({"problems": [what]}))

    def _stop_worker(self, worker: WorkerHandle) -> None:
        self._workers.discard(worker)
        worker.end()
        self._has_orphans = True

    def _reap_orphans(self) -> None:
        """End what the workers that are gone have left; each round reaches one generation deeper."""
        if self._has_orphans:
            for child in children() - {worker.pid for worker in self._workers}:
                end_group(child)
                reap(child)
            self._has_orphans = bool(children() - {worker.pid for worker in self._workers})

    def _wait_s(self) -> float:
        """Return the seconds until something has to be done although nothing is received."""
        waits = [_BEAT_S, *(worker.look_in_s for worker in self._workers)]
        if self._has_orphans:
            waits.append(_SWEEP_S)
        if self._queue:
            pause = self._next_hand_out - time.monotonic()
            waits += [pause] if pause > 0 else []
        return max(0.0, min(waits))


def supervise(
    workers: Callable[[bytes], tuple[RewardConfig | AgentConfig, RunWorker]], max_reply_bytes: int = MAX_REPLY_BYTES
) -> None:
    """Read what the run tells first, and keep the workers that it means until the run closes its end."""
    reader = FrameReader(MAX_SAMPLE_BYTES)
    frames: list[tuple[int, bytes]] = []
    while not frames:
        data = os.read(_STDIN, 1 << 16)
        if not data:
            return
        frames += reader.feed(data)
    limits, run_worker = workers(frames[0][1])
    Supervisor(limits, run_worker, reader, max_reply_bytes).run()


def reward_workers(told: bytes) -> tuple[RewardConfig | AgentConfig, RunWorker]:
    """Return the workers of the section `reward`; load what is mrl's own so that they need not."""
    config = config_from_json(told)
    for label, function in config.functions.items():
        if function.name in BUILT_IN:
            with contextlib.suppress(MrlError, ImportError):  # the first worker meets the same error, and says so
                load_reward_function(label, function)
    return config, partial(run_worker, config)


if __name__ == "__main__":
    supervise(reward_workers)
