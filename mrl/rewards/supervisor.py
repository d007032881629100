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
import time
from collections import deque
from collections.abc import Callable

from mrl.errors import MrlError
from mrl.rewards.frames import CONTROL, MAX_SAMPLE_BYTES, FrameError, FrameReader, control, frame, to_json
from mrl.rewards.loader import is_built_in, load_reward_function
from mrl.rewards.outcome import FailureKind, failure_reply
from mrl.rewards.processes import adopt_orphans, children, describe_status, end_group, reap
from mrl.rewards.settings import PoolSettings
from mrl.rewards.worker_handle import WorkerHandle

_BEAT_S = 1.0
_SWEEP_S = 0.01
_END_S = 5.0
_MAX_FAILED_STARTS = 3  # in a row: the next would fail as well
_STDIN, _STDOUT = 0, 1


class Supervisor:
    """One loop over the run's pipes and the workers' channels."""

    def __init__(self, settings: PoolSettings, reader: FrameReader) -> None:
        self._settings = settings
        self._reader = reader
        self._parent = os.getppid()
        self._queue: deque[tuple[int, bytes]] = deque()
        self._slots: set[WorkerHandle] = set()
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
            while len(self._slots) < self._settings.num_workers and self._failed_starts < _MAX_FAILED_STARTS:
                self._slots.add(WorkerHandle(self._settings))
            self._dispatch()
            self._set_watches()
            for key, _ in self._selector.select(self._wait_s()):
                key.data()
            self._check_clocks()
            self._reap_orphans()
            self._beat()
        for slot in list(self._slots):
            self._stop_worker(slot)
        deadline = time.monotonic() + _END_S
        while self._has_orphans and time.monotonic() < deadline:
            self._reap_orphans()
            time.sleep(_SWEEP_S)

    def _set_watches(self) -> None:
        """Listen to every worker, and write where there is something to write."""
        self._watch(_STDOUT, selectors.EVENT_WRITE if self._outgoing else 0, self._write_run)
        for slot in self._slots:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if slot.is_writing else 0)
            self._watch(slot.descriptor, events, functools.partial(self._read_worker, slot))

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
        """Show the run that somebody is here; not into a pipe that it does not empty."""
        if time.monotonic() - self._last_beat >= _BEAT_S and not self._outgoing:
            self._last_beat = time.monotonic()
            self._outgoing += control(beat=True)

    # --- the workers --------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """A sample for each worker that is ready, as far as the rate allows."""
        for slot in self._slots:
            if not self._queue or time.monotonic() < self._next_hand_out:
                return
            if slot.is_ready:
                slot.assign(*self._queue.popleft())
                if self._settings.max_samples_per_s is not None:
                    begin = max(self._next_hand_out, time.monotonic())
                    self._next_hand_out = begin + 1 / self._settings.max_samples_per_s

    def _read_worker(self, slot: WorkerHandle) -> None:
        if slot.is_writing:
            slot.write()
        try:
            frames = slot.read()
            for ticket, body in frames or ():
                self._take(slot, ticket, body)
        except (FrameError, ValueError) as error:
            self._fail_sample(slot, "crashed", f"its process sent something else than an answer: {error}")
            return
        if frames is None:
            slot.end()
            self._fail_sample(slot, "crashed", describe_status(os.waitpid(slot.pid, 0)[1]))

    def _take(self, slot: WorkerHandle, ticket: int, body: bytes) -> None:
        if ticket != CONTROL:
            if ticket != slot.ticket:
                raise FrameError("an answer that nobody asked for")
            self._outgoing += frame(ticket, body)
            slot.ticket, slot.since = None, time.monotonic()
        elif slot.ticket is None and not slot.is_ready:
            said = json.loads(body)
            if "problems" in said:
                self._abort(body)
                return
            if not slot.started:
                self._failed_starts = 0
                self._outgoing += control(ready=True)
            slot.started = slot.is_ready = True

    def _abort(self, problems: bytes) -> None:
        """Tell the run why no worker can be had, and start no other."""
        self._failed_starts = _MAX_FAILED_STARTS
        self._outgoing += frame(CONTROL, problems)

    def _check_clocks(self) -> None:
        for slot in list(self._slots):
            if slot.seconds >= slot.limit_s:
                what = "it was not ready" if slot.ticket is None else "no answer"
                self._fail_sample(slot, "timeout", f"{what} within {slot.limit_s:g} s")

    def _fail_sample(self, slot: WorkerHandle, kind: FailureKind, detail: str) -> None:
        """End a worker; whatever it had in hand failed. Between two samples it costs nobody anything."""
        self._stop_worker(slot)
        if slot.ticket is not None:
            self._outgoing += frame(slot.ticket, to_json(failure_reply(kind, detail, slot.seconds)))
        elif not slot.started and self._failed_starts < _MAX_FAILED_STARTS:
            self._failed_starts += 1
            if self._failed_starts == _MAX_FAILED_STARTS:
                what = f"no reward worker can be started, {_MAX_FAILED_STARTS} in a row failed: {detail}"
                self._abort(to_json({"problems": [what]}))

    def _stop_worker(self, slot: WorkerHandle) -> None:
        self._watch(slot.descriptor, 0, self._reap_orphans)
        self._slots.discard(slot)
        slot.end()
        self._has_orphans = True

    def _reap_orphans(self) -> None:
        """End what the workers that are gone have left; each round reaches one generation deeper."""
        if self._has_orphans:
            for child in children() - {slot.pid for slot in self._slots}:
                end_group(child)
                reap(child)
            self._has_orphans = bool(children() - {slot.pid for slot in self._slots})

    def _wait_s(self) -> float:
        """Until something has to be done although nobody says anything."""
        waits = [_BEAT_S, *(slot.limit_s - slot.seconds for slot in self._slots)]
        if self._has_orphans:
            waits.append(_SWEEP_S)
        if self._queue:
            pause = self._next_hand_out - time.monotonic()
            waits += [pause] if pause > 0 else []
        return max(0.0, min(waits))


def main() -> None:
    """Read the settings, load what is mrl's own so that workers need not, and keep workers."""
    reader = FrameReader(MAX_SAMPLE_BYTES)
    frames: list[tuple[int, bytes]] = []
    while not frames:
        data = os.read(_STDIN, 1 << 16)
        if not data:
            return
        frames += reader.feed(data)
    settings = PoolSettings.from_json(frames[0][1])
    for function in settings.functions:
        if is_built_in(function):
            with contextlib.suppress(MrlError, ImportError):  # the first worker meets the same error, and says so
                load_reward_function(function)
    Supervisor(settings, reader).run()


if __name__ == "__main__":
    main()
