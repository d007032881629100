"""TensorBoard and Weights & Biases, for those who watch their runs there; `metrics.jsonl` is always written."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from mrl.errors import SetupError


class Tracker(Protocol):
    """Takes the figures of every step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the figures of a step; those that are not finite are left out, for neither service can draw them."""

    def close(self) -> None: ...


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


TRACKERS: dict[str, tuple[type[TensorBoard] | type[WeightsAndBiases], ...]] = {
    "none": (),
    "tensorboard": (TensorBoard,),
    "wandb": (WeightsAndBiases,),
    "both": (TensorBoard, WeightsAndBiases),
}


def open_trackers(which: str, run: str, directory: Path, config: Mapping[str, Any], step: int) -> list[Tracker]:
    """Return the trackers that `training.tracker` names; `step` is the first that they will see."""
    return [kind(run, directory, config, step) for kind in TRACKERS[which]]


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _missing(extra: str) -> SetupError:
    return SetupError(f"training.tracker: {extra} is not installed", fix=f"pip install 'mrl[{extra}]'")
