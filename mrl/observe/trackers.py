"""Services that plot a run's metrics, in addition to `metrics.jsonl`.

None of them can delay or end a run: each runs in its own thread behind a queue, and metrics that it does not accept are
counted.
"""

from __future__ import annotations

import importlib.util
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Full, Queue
from threading import Thread
from typing import Any, Protocol

from mrl.errors import SetupError
from mrl.registry import load_attribute

MAX_WAITING = 1000
"""Largest number of queued steps per service. Later steps are lost for the service."""
CLOSE_S = 30.0
"""Longest wait at the end of a run for steps that a service has not accepted yet."""


class Tracker(Protocol):
    """Interface of a service. It is created with the run's name, directory and configuration, and its first step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Accept the metrics of a step. All of them are finite."""

    def close(self) -> None:
        """Deliver all pending metrics."""


class TensorBoard:
    """Event files in `tensorboard/` in the run directory."""

    def __init__(self, run: str, directory: Path, config: Mapping[str, Any], step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # The purge hides repeated steps of an earlier attempt.
        self._writer = SummaryWriter(str(directory / "tensorboard"), purge_step=step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run in the project `WANDB_PROJECT`, by default `mrl`. A resumed run continues in the same one."""

    def __init__(self, run: str, directory: Path, config: Mapping[str, Any], step: int) -> None:
        import wandb

        project = os.environ.get("WANDB_PROJECT", "mrl")
        self._run = wandb.init(
            project=project, name=run, id=run, resume="allow", dir=str(directory), config=dict(config)
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run at `MLFLOW_TRACKING_URI`, in the experiment `MLFLOW_EXPERIMENT_NAME`, by default `mrl`.

    A resumed run continues in the same one, whose id is in the file `mlflow-run`.
    """

    def __init__(self, run: str, directory: Path, config: Mapping[str, Any], step: int) -> None:
        import mlflow

        note = directory / "mlflow-run"
        self._mlflow = mlflow
        mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "mrl"))
        if note.is_file():
            mlflow.start_run(run_id=note.read_text(encoding="utf-8"))
        else:
            note.write_text(mlflow.start_run(run_name=run).info.run_id, encoding="utf-8")
            mlflow.log_dict(dict(config), "config.json")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._mlflow.log_metrics({name.replace("@", "_at_"): value for name, value in metrics.items()}, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


class SwanLab(WeightsAndBiases):
    """An experiment in the project `SWANLAB_PROJ_NAME`, by default `mrl`."""

    def __init__(self, run: str, directory: Path, config: Mapping[str, Any], step: int) -> None:
        import swanlab

        project = os.environ.get("SWANLAB_PROJ_NAME", "mrl")
        folder = str(directory / "swanlab")
        self._run = swanlab.init(project=project, experiment_name=run, config=dict(config), logdir=folder)


KNOWN: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
    "swanlab": SwanLab,
}
"""Trackers by name of the required package, which is also the name of mrl's extra."""


class TrackerThread:
    def __init__(self, name: str, kind: type[Tracker], made_from: Sequence[Any]) -> None:
        self.name = name
        self._num_unsent = 0
        self._num_refused = 0  # written by the thread; other counts are written by the run
        self._error = ""
        self._reported = False
        self._queue: Queue[tuple[int, dict[str, float]] | None] = Queue(MAX_WAITING)
        self._thread = Thread(target=self._work, args=(kind, made_from), name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand over the metrics of a step, without non-finite numbers, which no service can draw."""
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        try:
            self._queue.put_nowait((step, finite))
        except Full:
            self._num_unsent += 1
            self._error = self._error or f"{MAX_WAITING} steps are waiting already"

    def news(self) -> str:
        """Return the first error, once."""
        if not self._error or self._reported:
            return ""
        self._reported = True
        return f"{self.name}: {self._error}; the run continues, and metrics.jsonl has all metrics"

    def close(self, limit_s: float = CLOSE_S) -> str:
        """Wait up to `limit_s` for pending steps. Return how many steps the service did not accept."""
        deadline = time.monotonic() + limit_s
        with suppress(Full):
            self._queue.put(None, timeout=limit_s)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        num_waiting = sum(item is not None for item in self._queue.queue) if self._thread.is_alive() else 0
        lost = self._num_unsent + self._num_refused + num_waiting
        timeout = f"it had not ended after {limit_s:g} s" if self._thread.is_alive() else ""
        if not lost and not timeout and (self._reported or not self._error):
            return ""
        reasons = "; ".join(filter(None, (self._error, timeout)))
        return f"{self.name}: the metrics of {lost} steps were not delivered" + (f" ({reasons})" if reasons else "")

    def _work(self, kind: type[Tracker], made_from: Sequence[Any]) -> None:
        tracker: list[Tracker] = []
        self._succeeds("it failed to start", lambda: tracker.append(kind(*made_from)))
        while (item := self._queue.get()) is not None:
            if not tracker or not self._succeeds(f"step {item[0]} was refused", partial(tracker[0].log, *item)):
                self._num_refused += 1
        if tracker:
            self._succeeds("it failed to close", tracker[0].close)

    def _succeeds(self, otherwise: str, action: Callable[[], object]) -> bool:
        try:
            action()
        except Exception as error:
            self._error = self._error or f"{otherwise}: {f'{type(error).__name__}: {error}'[:500]}"
            return False
        return True


def open_trackers(
    names: Sequence[str], run: str, directory: Path, config: Mapping[str, Any], step: int
) -> list[TrackerThread]:
    """Return the trackers with these names. `step` is the first step that they will get."""
    kinds = {}
    for name in names:
        if name in KNOWN and importlib.util.find_spec(name) is None:
            raise SetupError(f"training.trackers: {name} is not installed", fix=f"pip install 'mrl[{name}]'")
        kinds[name] = KNOWN[name] if name in KNOWN else load_attribute(name)
    return [TrackerThread(name, kind, (run, directory, config, step)) for name, kind in kinds.items()]
