"""Services that draw a run's figures beside `metrics.jsonl`. None of them can hold a run up or end it: each works in a
thread of its own behind a queue, and what it fails to take is counted."""

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
"""Steps that wait for a service; those beyond are lost to it."""
CLOSE_S = 30.0
"""How long the end of a run waits for what a service has not taken yet."""


class Tracker(Protocol):
    """What a service is to mrl. It is made from the run's name, its directory, its configuration, and the first step
    that it will see."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the figures of a step; all of them are finite."""

    def close(self) -> None:
        """Deliver what is left."""


class TensorBoard:
    """Event files in `tensorboard/` of the run directory."""

    def __init__(self, run: str, directory: Path, config: Mapping[str, Any], step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Steps that are done again hide what an earlier attempt wrote of them.
        self._writer = SummaryWriter(str(directory / "tensorboard"), purge_step=step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of the project that `WANDB_PROJECT` names, else `mrl`; a resumed run goes on in the same one."""

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
    """A run where `MLFLOW_TRACKING_URI` points, of the experiment that `MLFLOW_EXPERIMENT_NAME` names, else `mrl`; a
    resumed run goes on in the same one, whose id stands in `mlflow-run`."""

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
    """An experiment of the project that `SWANLAB_PROJ_NAME` names, else `mrl`."""

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
"""By the package that each needs, which is mrl's extra of that name."""


class TrackerThread:
    def __init__(self, name: str, kind: type[Tracker], made_from: Sequence[Any]) -> None:
        self.name = name
        self._num_unsent = 0
        self._num_refused = 0  # by the thread, the others by the run
        self._error = ""
        self._reported = False
        self._queue: Queue[tuple[int, dict[str, float]] | None] = Queue(MAX_WAITING)
        self._thread = Thread(target=self._work, args=(kind, made_from), name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand over the figures of a step, without those that are not finite, which no service can draw."""
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        try:
            self._queue.put_nowait((step, finite))
        except Full:
            self._num_unsent += 1
            self._error = self._error or f"{MAX_WAITING} steps wait for it already"

    def news(self) -> str:
        """Return what went wrong, once."""
        if not self._error or self._reported:
            return ""
        self._reported = True
        return f"{self.name}: {self._error}; the run goes on, metrics.jsonl has every figure"

    def close(self, limit_s: float = CLOSE_S) -> str:
        """Wait for what is under way, but not for ever; return how much the service did not take."""
        until = time.monotonic() + limit_s
        with suppress(Full):
            self._queue.put(None, timeout=limit_s)
        self._thread.join(max(0.0, until - time.monotonic()))
        num_waiting = sum(each is not None for each in self._queue.queue) if self._thread.is_alive() else 0
        lost = self._num_unsent + self._num_refused + num_waiting
        late = f"after {limit_s:g} s it had not ended" if self._thread.is_alive() else ""
        if not lost and not late and (self._reported or not self._error):
            return ""
        why = "; ".join(filter(None, (self._error, late)))
        return f"{self.name}: the figures of {lost} steps did not arrive" + (f" ({why})" if why else "")

    def _work(self, kind: type[Tracker], made_from: Sequence[Any]) -> None:
        made: list[Tracker] = []
        self._succeeds("it does not start", lambda: made.append(kind(*made_from)))
        while (item := self._queue.get()) is not None:
            if not made or not self._succeeds(f"step {item[0]} was refused", partial(made[0].log, *item)):
                self._num_refused += 1
        if made:
            self._succeeds("it does not close", made[0].close)

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
    """Return the trackers of these names; `step` is the first that they will see."""
    kinds = {}
    for name in names:
        if name in KNOWN and importlib.util.find_spec(name) is None:
            raise SetupError(f"training.trackers: {name} is not installed", fix=f"pip install 'mrl[{name}]'")
        kinds[name] = KNOWN[name] if name in KNOWN else load_attribute(name)
    return [TrackerThread(name, kind, (run, directory, config, step)) for name, kind in kinds.items()]
