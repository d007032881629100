"""A thread that owns an engine: it steps while anything is under way, and does what is asked of it in between."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import TypeVar

from mrl.errors import WorkerSilent
from mrl.rollout.engine import RolloutEngine, can_step
from mrl.rollout.requests import Generated
from mrl.rollout.schedule import CallKind, Schedule, ScheduledCall

T = TypeVar("T")
_LOOK_S = 0.002


class EngineThread:
    """Everything that an engine does, it does in this thread, its start included."""

    def __init__(
        self, make: Callable[[], RolloutEngine], step_deadline_s: float, schedule: Schedule | None = None
    ) -> None:
        self._step_deadline_s, self._schedule = step_deadline_s, schedule or Schedule()
        self._num_steps = 0
        self._thread = ThreadPoolExecutor(1, "engine")
        self._engine = self._thread.submit(make).result()
        self._finished: SimpleQueue[list[Generated]] = SimpleQueue()
        self._stepping: Future[None] = Future()
        self._stepping.set_result(None)
        self._stepped_at = time.monotonic()

    def act(self, kind: CallKind, of: Sequence[str], action: Callable[[RolloutEngine], None]) -> None:
        """Have done what changes what is computed next: now, or in a replay before the step that it came before."""
        while self._schedule.next and not self._stepping.done():
            time.sleep(_LOOK_S)

        def noted(engine: RolloutEngine) -> None:
            self._schedule.note(ScheduledCall(self._num_steps, kind, tuple(of)))
            action(engine)

        self.call(noted)

    def call(self, action: Callable[[RolloutEngine], T]) -> T:
        """Have something done after the step under way."""
        result = self._thread.submit(action, self._engine).result()
        if self._stepping.done() and self._goes_on():
            self._raise_failure()
            self._stepped_at = time.monotonic()
            self._stepping = self._thread.submit(self._step)
        return result

    def poll(self, wait_s: float) -> list[Generated]:
        """What has been finished; waits this long for something."""
        self._raise_failure()
        samples: list[Generated] = []
        try:
            samples += self._finished.get(timeout=wait_s)
            while True:
                samples += self._finished.get_nowait()
        except Empty:
            pass
        age_s = time.monotonic() - self._stepped_at
        if not self._stepping.done() and age_s > self._step_deadline_s:
            raise WorkerSilent(f"the engine has been busy with one step for {age_s:.0f} s")
        return samples

    def abort(self) -> None:
        """Forget everything under way, and what has been finished of it."""
        self.act("abort", [], lambda engine: engine.abort())
        self.poll(0)

    def _step(self) -> None:
        if not self._goes_on():  # it fell asleep since, or got something else to wait for
            return
        if samples := self._engine.step():
            self._finished.put(samples)
        self._num_steps += 1
        self._stepped_at = time.monotonic()
        if self._goes_on():
            self._stepping = self._thread.submit(self._step)

    def _goes_on(self) -> bool:
        """Return whether there is a step to do, for which in a replay nothing is missing."""
        call = self._schedule.next
        return can_step(self._engine) and (call is None or self._num_steps < call.at)

    def _raise_failure(self) -> None:
        if self._stepping.done():
            self._stepping.result()
