"""Where the figures of every step go: always `metrics.jsonl`, which the report reads; TensorBoard, Weights & Biases."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mrl import files
from mrl.errors import MrlError, SetupError


class MetricsFile:
    """Appends one line per step. On resume the lines of steps that are done again are cut off."""

    def __init__(self, path: Path, first_step: int) -> None:
        self._path = path
        kept = [line for line in read_metrics(path) if line["step"] < first_step] if path.exists() else []
        files.write_text(path, "".join(map(_line, kept)), mode=0o600)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the figures of a step. One that is not finite is written as null: JSON has no NaN."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(_line({"step": step, **metrics}))


def _line(fields: Mapping[str, Any]) -> str:
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in fields.items()
    }
    return json.dumps(finite, allow_nan=False) + "\n"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics file; a last one cut short by a crash is left out, any other bad one is an
    error."""
    lines = path.read_text(encoding="utf-8").split("\n")
    found = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            found.append(dict(json.loads(line)))
        except ValueError as error:
            raise MrlError(f"not a line of metrics: {error}", where=f"{path}:{number}") from error
    return found


# --- trackers ---------------------------------------------------------------------------------------------------------


class TensorBoard:
    """Event files in `tensorboard/` of the run directory."""

    def __init__(self, run: str, directory: Path, config: Mapping[str, Any], step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _missing("tensorboard") from error
        # Steps that are done again hide what an earlier attempt wrote of them.
        self._writer = SummaryWriter(str(directory / "tensorboard"), purge_step=step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in _finite(metrics).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of the project that `WANDB_PROJECT` names, else `mrl`; a resumed run goes on in the same one."""

    def __init__(self, run: str, directory: Path, config: Mapping[str, Any], step: int) -> None:
        try:
            import wandb
        except ImportError as error:
            raise _missing("wandb") from error
        project = os.environ.get("WANDB_PROJECT", "mrl")
        self._run = wandb.init(
            project=project, name=run, id=run, resume="allow", dir=str(directory), config=dict(config)
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(_finite(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


Tracker = TensorBoard | WeightsAndBiases
TRACKERS: dict[str, tuple[type[Tracker], ...]] = {
    "none": (),
    "tensorboard": (TensorBoard,),
    "wandb": (WeightsAndBiases,),
    "both": (TensorBoard, WeightsAndBiases),
}


def open_trackers(which: str, run: str, directory: Path, config: Mapping[str, Any], step: int) -> list[Tracker]:
    """Return the trackers that `training.tracker` names; `step` is the first that they will see."""
    return [kind(run, directory, config, step) for kind in TRACKERS[which]]


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the figures without those that are not finite, which neither service can draw."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _missing(extra: str) -> SetupError:
    return SetupError(f"training.tracker: {extra} is not installed", fix=f"pip install 'mrl[{extra}]'")
