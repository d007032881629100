"""A run beside its learning: its directory, what it writes down, when it saves, when it stops, where it resumes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import mrl
from mrl.config.load import Resolved
from mrl.config.run_directory import open_run_directory
from mrl.config.schema import Config
from mrl.data.sample_files import write_samples
from mrl.events import EventLog, RunStarted, Warned
from mrl.observe.console import Console
from mrl.observe.metrics import MetricsFile
from mrl.observe.panel import SamplePreview
from mrl.observe.step_timer import StepTimer
from mrl.observe.trackers import Tracker, open_trackers
from mrl.protocol import DataProto
from mrl.trainer.checkpoints import CheckpointManager
from mrl.trainer.components import Components
from mrl.trainer.resume_config import describe_changes, resume_config
from mrl.trainer.shutdown import ShutdownSignal


class Run:
    """One run. Its directory is held by one process at a time."""

    config: Config

    def __init__(self, resolved: Resolved[Config], directory: Path, console: Console) -> None:
        self.directory, self.console = directory, console
        self.config = resolved.config
        self.events = EventLog(directory / "events.jsonl")
        self.clock = StepTimer(self.events, console.phase, console.progress)
        self.snapshots = CheckpointManager(directory / "checkpoints", self.config.training.keep, self.events)
        self._metrics: MetricsFile
        self.stopping = ShutdownSignal(self.config.training.time_limit_s)
        self.trackers: list[Tracker] = []
        self._best = -np.inf
        self.events.write(RunStarted(self.config.run.name, mrl.__version__))
        for warning in resolved.warnings:
            self.warn("configuration", warning)

    def warn(self, about: str, message: str) -> None:
        """Say it and write it down."""
        self.events.write(Warned(about, message))
        self.console.print(f"warning: {about}: {message}")

    def resume(self, components: Components) -> int:
        """Put everything into the state of the newest checkpoint; how many steps are done."""
        found = self.snapshots.newest() if self.config.training.resume == "auto" else None
        metrics = self.directory / "metrics.jsonl"
        if found is None and metrics.exists():
            self.warn("resume", "this run began here before and left no checkpoint: it begins again")
        next_step = 1 if found is None else found.step + 1
        self._metrics = MetricsFile(metrics, next_step)
        which, name = self.config.training.tracker, self.config.run.name
        self.trackers = open_trackers(which, name, self.directory, resume_config(self.config), next_step)
        if found is None:
            return 0
        for key, change in describe_changes(found.state["config"], self.config, found.step).items():
            self.warn(key, change)
        for name, role in components.roles.items():
            role.group.load_checkpoint(str(found.path / name))
        components.load_state_dict(found.state["team"])
        self._best = -np.inf if found.state["best"] is None else found.state["best"]
        self.console.print(f"resumed from {found.path}")
        return found.step

    def record(self, step: int, batch: DataProto, metrics: Mapping[str, float]) -> None:
        """Write down what a step did."""
        self._metrics.write(step, metrics)
        self.console.step(step, metrics, _preview(batch))
        for tracker in self.trackers:
            tracker.log(step, metrics)
        every = self.config.training.samples_every
        if every and step % every == 0:
            write_samples(self.directory / "samples", step, _texts(batch))

    def record_validation(self, step: int, figures: Mapping[str, float]) -> None:
        """Write down the figures of a validation that stands beside no step, as the one before the first."""
        self._metrics.write(step, figures)
        for tracker in self.trackers:
            tracker.log(step, figures)

    def save_is_due(self, step: int) -> bool:
        """Whether the configuration wants a checkpoint after this step."""
        every = self.config.training.save_every
        return bool(every) and step % every == 0

    def save(self, components: Components, step: int, validated: Mapping[str, float]) -> None:
        """Save everything. It is the best so far if it was validated itself, and scored higher than any before."""
        score = validated.get(f"val/score/mean@{self.config.validation.samples_per_prompt}", -np.inf)
        is_best = score > self._best
        self._best = max(self._best, score)
        state = {
            "config": resume_config(self.config),
            "team": components.state_dict(),
            "best": None if np.isneginf(self._best) else self._best,
        }
        with self.clock("save"):
            self.snapshots.save(step, components.roles, state, is_best)

    def should_stop(self) -> bool:
        """Whether a signal came or the time is up; what it was is said."""
        reason = self.stopping.reason()
        if reason:
            self.console.print(f"{reason}: saving and stopping")
        return bool(reason)


@contextmanager
def open_run(resolved: Resolved[Config], console: Console) -> Iterator[Run]:
    """The run of a configuration: a new one, or one that goes on."""
    with open_run_directory(resolved, may_go_on=resolved.config.training.resume == "auto") as directory:
        run = Run(resolved, directory, console)
        try:
            with run.stopping.on_signals():
                yield run
        finally:
            for tracker in run.trackers:
                tracker.close()
            run.events.close()


def _preview(batch: DataProto) -> SamplePreview:
    columns = batch.non_tensor_batch
    return SamplePreview(columns["prompt_text"][0], columns["response_text"][0], float(batch.batch["scores"][0]))


def _texts(batch: DataProto) -> dict[str, Any]:
    columns = batch.non_tensor_batch
    return {
        "uid": columns["uid"],
        "data_source": columns["data_source"],
        "prompt": columns["prompt_text"],
        "response": columns["response_text"],
        "ground_truth": columns["ground_truth"],
        "score": batch.batch["scores"].tolist(),
        "num_tokens": batch.lengths("responses").tolist(),
        "truncated": batch.batch["truncated"].tolist(),
    }
