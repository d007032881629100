"""The supervisor: a process of its own between a run and its reward workers. `python -m mrl.rewards.supervisor`.

It hands one sample to each worker that is ready, starts that sample's clock, kills the worker where the time is up,
starts another in its place, and answers for every sample that it was given. It runs no code but mrl's, and it ends,
with everything below it, when the run that started it does.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator

from mrl.config.reward import RewardConfig
from mrl.errors import MrlError
from mrl.rewards.clock import WorkerClock
from mrl.rewards.messages import (
    CONTROL,
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
from mrl.children import adopt_orphans, children, describe_status, end_group, reap
from mrl.rewards.worker import is_built_in, load_reward_function, run_worker

_BEAT_S = 1.0
_SWEEP_S = 0.01
_END_S = 5.0
_TURN_S = 1.0  # for a worker to be ready again after a sample
_MAX_FAILED_STARTS = 3  # in a row: the next would fail as well
_STDIN, _STDOUT = 0, 1


class WorkerHandle:
    """A worker that was started; it is thrown away with its process."""

    def __init__(self, config: RewardConfig) -> None:
        self.channel, theirs = socket.socketpair()
        self.descriptor = self.channel.fileno()
        supervisor = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            run_worker(theirs, config, supervisor)
        theirs.close()
        self.channel.setblocking(False)
        self._config = config
        self.started = False
        """Whether it ever was ready."""
        self.ticket: int | None = None
        self.clock = WorkerClock(self.pid)
        """Runs since it got its sample, or, without one, since it was last waited for."""
        self.is_ready = False
        self._reader = FrameReader(MAX_REPLY_BYTES)
        self._outgoing = memoryview(b"")

    @property
    def is_writing(self) -> bool:
        """Whether the channel was too full for the whole sample."""
        return bool(self._outgoing)

    @property
    def limit_s(self) -> float:
        """How much time it may take."""
        if self.ticket is not None:
            return self._config.limit_s
        if self.is_ready:
            return float("inf")
        return _TURN_S if self.started else self._config.start_limit_s

    def assign(self, ticket: int, body: bytes) -> None:
        """Give it a sample, and start the clock."""
        self.ticket, self.is_ready = ticket, False
        self.clock.restart()
        self._outgoing = memoryview(frame(ticket, body))
        self.write()

    def write(self) -> None:
        """Send as much as the channel takes."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):  # reading tells of the end
            self._outgoing = self._outgoing[self.channel.send(self._outgoing) :]

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
    """One loop over the run's pipes and the workers' channels."""

    def __init__(self, config: RewardConfig, reader: FrameReader) -> None:
        self._config = config
        self._reader = reader
        self._parent = os.getppid()
        self._queue: deque[tuple[int, bytes]] = deque()
        self._workers: set[WorkerHandle] = set()
        self._outgoing = bytearray()
        self._selector = selectors.DefaultSelector()
        self._is_closing = False
        self._has_orphans = False
        self._failed_starts = 0
        self._last_beat = self._next_hand_out = time.monotonic()
        for pipe in (_STDIN, _STDOUT):
            os.set_blocking(pipe, False)
        self._watch(_STDIN, selectors.EVENT_READ, self._read_run)

    def run(self) -> None:
        """Work until the run closes its end, or is gone."""
        adopt_orphans()
        while not self._is_closing and os.getppid() == self._parent:
            while len(self._workers) < self._config.num_workers and self._failed_starts < _MAX_FAILED_STARTS:
                self._workers.add(WorkerHandle(self._config))
            self._dispatch()
            self._set_watches()
            for key, _ in self._selector.select(self._wait_s()):
                key.data()
            self._check_clocks()
            self._reap_orphans()
            self._beat()
        for worker in list(self._workers):
            self._stop_worker(worker)
        deadline = time.monotonic() + _END_S
        while self._has_orphans and time.monotonic() < deadline:
            self._reap_orphans()
            time.sleep(_SWEEP_S)

    def _set_watches(self) -> None:
        """Listen to every worker, and write where there is something to write."""
        self._watch(_STDOUT, selectors.EVENT_WRITE if self._outgoing else 0, self._write_run)
        for worker in self._workers:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.is_writing else 0)
            self._watch(worker.descriptor, events, functools.partial(self._read_worker, worker))

    def _watch(self, descriptor: int, events: int, handle: Callable[[], None]) -> None:
        """Call `handle` on these events of a descriptor; on none, where `events` is 0."""
        watched = self._selector.get_map().get(descriptor)
        if watched is None and events:
            self._selector.register(descriptor, events, handle)
        elif watched is not None and not events:
            self._selector.unregister(descriptor)
        elif watched is not None and watched.events != events:
            self._selector.modify(descriptor, events, handle)

    # --- the run ------------------------------------------------------------------------------------------------

    def _read_run(self) -> None:
        data = os.read(_STDIN, 1 << 20)
        samples = list(self._reader.feed(data))
        # The run says when it closes: a process that it has forked may hold the pipe open.
        self._is_closing = not data or any(ticket == CONTROL for ticket, _ in samples)
        self._queue.extend(samples)

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
        """Assign a sample to each worker that is ready, as far as the rate allows."""
        for worker in self._workers:
            if not self._queue or time.monotonic() < self._next_hand_out:
                return
            if worker.is_ready:
                worker.assign(*self._queue.popleft())
                if self._config.max_samples_per_s is not None:
                    begin = max(self._next_hand_out, time.monotonic())
                    self._next_hand_out = begin + 1 / self._config.max_samples_per_s

    def _read_worker(self, worker: WorkerHandle) -> None:
        if worker.is_writing:
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
            if ticket != worker.ticket:
                raise FrameError("an answer that nobody asked for")
            self._outgoing += frame(ticket, body)
            worker.ticket = None
            worker.clock.restart()
        elif worker.ticket is None and not worker.is_ready:
            said = json.loads(body)
            if "problems" in said:
                self._abort(body)
                return
            if not worker.started:
                self._failed_starts = 0
                self._outgoing += control(ready=True)
            worker.started = worker.is_ready = True

    def _abort(self, problems: bytes) -> None:
        """Tell the run why no worker can be had, and start no other."""
        self._failed_starts = _MAX_FAILED_STARTS
        self._outgoing += frame(CONTROL, problems)

    def _check_clocks(self) -> None:
        for worker in list(self._workers):
            if worker.clock.is_late(worker.limit_s):
                what = "it was not ready" if worker.ticket is None else "no answer"
                self._fail_sample(worker, "timeout", f"{what} within {worker.limit_s:g} s")

    def _fail_sample(self, worker: WorkerHandle, kind: FailureKind, detail: str) -> None:
        """End a worker; whatever it had in hand failed. Between two samples it costs nobody anything."""
        self._stop_worker(worker)
        if worker.ticket is not None:
            self._outgoing += frame(worker.ticket, to_json(failure_reply(kind, detail, worker.clock.seconds)))
        elif not worker.started and self._failed_starts < _MAX_FAILED_STARTS:
            self._failed_starts += 1
            if self._failed_starts == _MAX_FAILED_STARTS:
                what = f"no reward worker can be started, {_MAX_FAILED_STARTS} in a row failed: {detail}"
                self._abort(to_json({"problems": [what]}))

    def _stop_worker(self, worker: WorkerHandle) -> None:
        self._watch(worker.descriptor, 0, self._reap_orphans)
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
        waits = [_BEAT_S, *(worker.clock.look_in_s(worker.limit_s) for worker in self._workers)]
        if self._has_orphans:
            waits.append(_SWEEP_S)
        if self._queue:
            pause = self._next_hand_out - time.monotonic()
            waits += [pause] if pause > 0 else []
        return max(0.0, min(waits))


def main() -> None:
    """Read the configuration, load what is mrl's own so that workers need not, and keep workers."""
    reader = FrameReader(MAX_SAMPLE_BYTES)
    frames: list[tuple[int, bytes]] = []
    while not frames:
        data = os.read(_STDIN, 1 << 16)
        if not data:
            return
        frames += reader.feed(data)
    config = config_from_json(frames[0][1])
    for label, function in config.functions.items():
        if is_built_in(function.name):
            with contextlib.suppress(MrlError, ImportError):  # the first worker meets the same error, and says so
                load_reward_function(label, function)
    Supervisor(config, reader).run()


if __name__ == "__main__":
    main()
