"""The supervisor: a separate process between a run and its reward workers. `python -m mrl.rewards.supervisor`.

It gives a sample to a ready worker, starts the sample's clock, kills the worker if time is up, starts a replacement,
and answers for every sample that it received. It runs only mrl's code. When the run that started it ends, it ends with
all processes below it.
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
_MAX_FAILED_STARTS = 3  # in a row: the next one would fail too
_STDIN, _STDOUT = 0, 1

RunWorker = Callable[[socket.socket, int, Running], NoReturn]
"""Main function of a worker. It takes its channel, the process that it ends with, and the shared ticket of the running
sample."""


class WorkerHandle:
    """A started worker. A new process gets a new handle."""

    def __init__(self, limits: RewardConfig | AgentConfig, run_worker: RunWorker, max_reply_bytes: int) -> None:
        self.channel, worker_channel = socket.socketpair()
        supervisor = os.getpid()
        self._running = Running()
        self.pid = os.fork()
        if self.pid == 0:
            run_worker(worker_channel, supervisor, self._running)
        worker_channel.close()
        self.channel.setblocking(False)
        self._limits = limits
        self.started = False
        """Whether the worker has ever been ready."""
        self.clocks: dict[int, WorkerClock] = {}
        """Clock of each sample that the worker is processing, started when it was assigned."""
        self.open: set[int] = set()
        """Tickets that continue in this worker, for which the run sends the next frame."""
        self.num_wanted = 0
        """Number of samples that the worker is ready for."""
        self.clock = WorkerClock(self.pid)
        """Clock while the worker has no sample, started when it was last waited for."""
        self._reader = FrameReader(max_reply_bytes)
        self.outgoing = bytearray()
        """Data that the channel had no room for."""

    @property
    def limit_s(self) -> float:
        """Time limit: for each sample, or for becoming ready."""
        if self.clocks:  # with several samples, each ends itself at its limit, unless another one blocks it
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
        """Tickets of the sample whose code is running; if unknown, of the late samples, or else of all."""
        if self._running.ticket in self.clocks:
            return [self._running.ticket]
        late = [ticket for ticket, clock in self.clocks.items() if clock.seconds >= self.limit_s]
        return late or list(self.clocks)

    def assign(self, ticket: int, body: bytes) -> None:
        """Assign a sample, or the next frame of a sample that continues here, and start its clock."""
        if ticket in self.open:
            self.open.remove(ticket)
        else:
            self.num_wanted -= 1
        self.clocks[ticket] = WorkerClock(self.pid)
        self.outgoing += frame(ticket, body)
        self.write()

    def write(self) -> None:
        """Send as much as the channel accepts."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):  # a read will detect the end
            del self.outgoing[: self.channel.send(self.outgoing)]

    def read(self) -> Iterator[tuple[int, bytes]] | None:
        """Return the received frames, or None if the worker has closed its end."""
        try:
            data = self.channel.recv(1 << 16)
        except BlockingIOError:
            return iter(())
        except ConnectionResetError:
            return None
        return self._reader.feed(data) if data else None

    def end(self) -> None:
        """Kill the worker and its process group. Processes that left the group become orphans of the supervisor."""
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
        """Tickets that were to continue in a worker that has ended, with the reason: the answer to their next frame."""
        self._outgoing = bytearray()
        self._is_closing = self._is_traced = False
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
        """Wait until something can be read or, if there is output, written, and handle it."""
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
        # The run announces its close, because a process that it forked may keep the pipe open.
        controls = [json.loads(body) for ticket, body in samples if ticket == CONTROL]
        self._is_closing = not data or any("close" in message for message in controls)
        for message in controls:
            self._is_traced = message.get("trace", self._is_traced)
            if self._is_traced:
                self._outgoing += control(worked=[[worker.pid, 0, 0] for worker in self._workers])
        for ticket, body in samples:
            if ticket == CONTROL:
                continue
            if not body.startswith(GOES_ON):
                self._queue.append((ticket, body))
            elif holder := next((worker for worker in self._workers if ticket in worker.open), None):
                holder.assign(ticket, body)
            else:
                reason = self._lost.pop(ticket, "its process does not have it")
                self._outgoing += frame(ticket, to_json({"again": reason}))

    def _write_run(self) -> None:
        try:
            del self._outgoing[: os.write(_STDOUT, self._outgoing)]
        except BrokenPipeError:
            self._is_closing = True

    def _beat(self) -> None:
        """Send a sign of life to the run, unless the pipe is full."""
        if time.monotonic() - self._last_beat >= _BEAT_S and not self._outgoing:
            self._last_beat = time.monotonic()
            self._outgoing += control(beat=True)

    # --- the workers --------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Assign samples to ready workers, as far as the rate limit allows."""
        ready = [worker for worker in self._workers for _ in range(worker.num_wanted)]
        for worker in sorted(ready, key=lambda ready_worker: len(ready_worker.clocks)):
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
            self._fail_sample(worker, "crashed", f"its process sent an invalid message: {error}")
            return
        if frames is None:
            worker.end()
            self._fail_sample(worker, "crashed", describe_status(os.waitpid(worker.pid, 0)[1]))

    def _take(self, worker: WorkerHandle, ticket: int, body: bytes) -> None:
        if ticket != CONTROL:
            if ticket not in worker.clocks:
                raise FrameError("an answer without a request")
            self._note_work(worker, [ticket])
            self._outgoing += frame(ticket, body)
            del worker.clocks[ticket]
            worker.clock = WorkerClock(worker.pid)
            if self._is_of_agents and body.startswith(GOES_ON):
                worker.open.add(ticket)
        elif worker.num_wanted + len(worker.clocks) + len(worker.open) < self._limits.concurrency:
            message = json.loads(body)
            if "problems" in message:
                self._abort(body)
                return
            if not worker.started:
                self._failed_starts = 0
                self._outgoing += control(ready=True)
            worker.started = True
            worker.num_wanted += 1

    def _note_work(self, worker: WorkerHandle, tickets: list[int]) -> None:
        """Report to the run when a worker had samples, while a trace is recorded. The frame precedes the answers."""
        if self._is_traced and tickets:
            now = time.monotonic_ns()
            self._outgoing += control(worked=[[worker.pid, worker.clocks[of].began_ns, now] for of in tickets])

    def _abort(self, problems: bytes) -> None:
        """Report to the run why no worker can start, and stop starting workers."""
        self._failed_starts = _MAX_FAILED_STARTS
        self._outgoing += frame(CONTROL, problems)

    def _check_clocks(self) -> None:
        for worker in list(self._workers):
            if worker.is_late:
                late = f"it was not ready within {worker.limit_s:g} s"
                self._fail_sample(worker, "timeout", too_late(self._limits.limit_s) if worker.clocks else late)

    def _fail_sample(self, worker: WorkerHandle, kind: FailureKind, detail: str) -> None:
        """End a worker. The sample that caused it has failed, and its other samples are retried.

        Samples that it held for their next frame are answered when that frame arrives, because each frame of the run
        gets one answer. Between two samples, no sample is affected.
        """
        culprits = worker.culprits
        self._stop_worker(worker)
        self._note_work(worker, list(worker.clocks))
        for ticket, clock in worker.clocks.items():
            failed = failure_reply(kind, detail, clock.seconds)
            self._outgoing += frame(ticket, to_json(failed if ticket in culprits else {"again": detail}))
        self._lost |= dict.fromkeys(worker.open, detail)
        if not worker.clocks and not worker.started and self._failed_starts < _MAX_FAILED_STARTS:
            self._failed_starts += 1
            if self._failed_starts == _MAX_FAILED_STARTS:
                kind_of_worker = "agent" if self._is_of_agents else "reward"
                what = f"no {kind_of_worker} worker can start; {_MAX_FAILED_STARTS} in a row failed: {detail}"
                self._abort(to_json({"problems": [what]}))

    def _stop_worker(self, worker: WorkerHandle) -> None:
        self._workers.discard(worker)
        worker.end()
        self._has_orphans = True

    def _reap_orphans(self) -> None:
        """End processes left by workers that are gone. Each round reaches one generation deeper."""
        if self._has_orphans:
            for child in children() - {worker.pid for worker in self._workers}:
                end_group(child)
                reap(child)
            self._has_orphans = bool(children() - {worker.pid for worker in self._workers})

    def _wait_s(self) -> float:
        """Return the seconds until work is due even if nothing is received."""
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
    """Read the first message of the run, and keep its workers running until the run closes its end."""
    reader = FrameReader(MAX_SAMPLE_BYTES)
    frames: list[tuple[int, bytes]] = []
    while not frames:
        data = os.read(_STDIN, 1 << 16)
        if not data:
            return
        frames += reader.feed(data)
    limits, run_worker = workers(frames[0][1])
    Supervisor(limits, run_worker, reader, max_reply_bytes).run()


def reward_workers(section_json: bytes) -> tuple[RewardConfig | AgentConfig, RunWorker]:
    """Return the workers of the section `reward`. Load mrl's own functions here, so that workers need not."""
    config = config_from_json(section_json)
    for label, function in config.functions.items():
        if function.name in BUILT_IN:
            with contextlib.suppress(MrlError, ImportError):  # the first worker raises the same error and reports it
                load_reward_function(label, function)
    return config, partial(run_worker, config)


if __name__ == "__main__":
    supervise(reward_workers)
