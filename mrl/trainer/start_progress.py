"""Progress of a run between its start and its first step: what is ready, and what is still starting."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mrl.config.arithmetic import has_own_rollout_pool, num_engines
from mrl.config.schema import Config
from mrl.controller.worker_log import last_words, log_path
from mrl.events import Event, ModelLoaded, PoolReady, WorkersStarted
from mrl.rollout.hybrid_engine import RECEIVER
from mrl.rollout.schedule import REPLICA
from mrl.trainer.run import Run

EVERY_S = 10.0
_SHOWN = 4
_LETTERS = 80


@contextmanager
def show_start_progress(run: Run[Config]) -> Iterator[None]:
    """Print every few seconds what the run waits for, while the block starts everything."""
    progress = StartProgress(run, parts_of(run.config))
    run.events.listeners.append(progress.on_event)
    ended = threading.Event()
    thread = threading.Thread(target=progress.repeat, args=(ended,), name="start-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        run.events.listeners.remove(progress.on_event)


def parts_of(config: Config) -> list[str]:
    """Return everything that the first step needs: Ray's devices, the processes of each role, the models."""
    pools = map(_pool, config.placement.pools)
    generates = config.training.samples_from is None
    engines = [REPLICA.format(index) for index in range(num_engines(config) if generates else 0)]
    receivers = [RECEIVER] if has_own_rollout_pool(config) and generates else []
    return [*pools, *config.model_roles(), *receivers, *engines, *map(_model_of, config.model_roles())]


class StartProgress:
    """Keeps the list of parts that are still starting."""

    def __init__(self, run: Run[Config], parts: Sequence[str]) -> None:
        self._run = run
        self._num_parts = len(parts)
        self._awaited = dict.fromkeys(parts)
        self._began = time.monotonic()

    def on_event(self, event: Event) -> None:
        if isinstance(event, PoolReady):
            self._awaited.pop(_pool(event.pool), None)
        elif isinstance(event, WorkersStarted):
            self._awaited.pop(event.role, None)
        elif isinstance(event, ModelLoaded):
            self._awaited.pop(_model_of(event.role), None)
        else:
            return
        self._run.clock.progress(self._num_parts - len(self._awaited), self._num_parts)

    def repeat(self, ended: threading.Event) -> None:
        while not ended.wait(EVERY_S):
            self._run.console.note(self.line())

    def line(self) -> str:
        """Return the elapsed time, the number of parts that are ready, and the last log line of each other part."""
        awaited = list(self._awaited)
        shown = [name + self._last_words(name) for name in awaited[:_SHOWN]]
        more = [f"{len(awaited) - _SHOWN} more"] if len(awaited) > _SHOWN else []
        seconds = time.monotonic() - self._began
        num_ready = self._num_parts - len(awaited)
        waiting = ", ".join([*shown, *more])
        return f"starting for {seconds:.0f} s, {num_ready} of {self._num_parts} ready; waiting for: {waiting}"

    def _last_words(self, role: str) -> str:
        """Return the last log line of the role's first rank. Every node writes its logs to the run directory."""
        attempts = sorted(Path(self._run.directory, "logs").glob(f"{role}.*"), key=lambda path: int(path.suffix[1:]))
        line = last_words(log_path(attempts[-1], 0)) if attempts else ""
        return f" ({line.rpartition('] ')[2][:_LETTERS]})" if line else ""


def _pool(name: str) -> str:
    return f"the devices of pool {name}"


def _model_of(role: str) -> str:
    return f"the {role}'s model"
