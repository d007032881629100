"""A thread that owns an engine: it steps while anything is under way, and does what is asked of it in between."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import TypeVar

from mrl.errors import WorkerSilent
from mrl.rollout.engine import RolloutEngine, can_step
from mrl.rollout.requests import Generated

T = TypeVar("T")


class EngineThread:
    """Everything that an engine does, it does in this thread, its start included."""

    def __init__(self, make: Callable[[], RolloutEngine], step_deadline_s: float) -> None:
        self._step_deadline_s = step_deadline_s
        self._thread = ThreadPoolExecutor(1, "engine")
        self._engine = self._thread.submit(make).result()
        self._finished: SimpleQueue[list[Generated]] = SimpleQueue()
        self._stepping: Future[None] = Future()
        self._stepping.set_result(None)
        self._stepped_at = time.monotonic()

    def call(self, action: Callable[[RolloutEngine], T]) -> T:
        """Have something done after the step under way."""
        result = self._thread.submit(action, self._engine).result()
        if can_step(self._engine) and self._stepping.done():
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
        self.call(lambda engine: engine.abort())
        self.poll(0)

    def _step(self) -> None:
        if not can_step(self._engine):  # it fell asleep since
            return
        if samples := self._engine.step():
            self._finished.put(samples)
        self._stepped_at = time.monotonic()
        if can_step(self._engine):
            self._stepping = self._thread.submit(self._step)

    def _raise_failure(self) -> None:
        if self._stepping.done():
            self._stepping.result()
