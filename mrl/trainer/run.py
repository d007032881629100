"""A run apart from its learning: directory, metrics, checkpoints, stopping and resuming."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Generic, Protocol

import mrl
from mrl.children import listening
from mrl.config.resolved.load import AnyTyped, Resolved
from mrl.config.resolved.run_directory import CHECKPOINTS, EVENTS, open_run_directory
from mrl.config.sft import AnyConfig
from mrl.errors import CheckpointError, MrlError, SetupError, WorkerDied, WorkerRaised, WorkerSilent
from mrl.events import Event, EventLog, RunEnded, RunStarted, Warned
from mrl.observe.console import Console
from mrl.observe.metrics import MetricsFile, StepTimer
from mrl.observe.trackers import TrackerThread, open_trackers
from mrl.redaction import redact
from mrl.trainer.checkpoint_score import CheckpointScore
from mrl.trainer.checkpoints import Checkpoint, CheckpointManager
from mrl.trainer.role_client import RoleClient

SAVE_ERRORS = (WorkerRaised, OSError)
"""Errors of a full or broken disk, on a rank or here. After the death of a worker, saving makes no sense."""


class Resumable(Protocol):
    """State that a checkpoint holds: models, and the trainer's state as plain JSON."""

    @property
    def roles(self) -> Mapping[str, RoleClient]:
        """Models that are trained."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs besides the models."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state."""


def load_checkpoint(checkpoint: Checkpoint, trained: Resumable) -> None:
    """Load models and state."""
    for name, role in trained.roles.items():
        role.group.load_checkpoint(str(checkpoint.path / name))
    trained.load_state_dict(checkpoint.state["trained"])


class Run(Generic[AnyTyped]):
    """One run of RL or SFT. One process at a time holds its directory."""

    config: AnyTyped

    def __init__(self, resolved: Resolved[AnyTyped], directory: Path, console: Console) -> None:
        self.directory, self.console = directory, console
        self.config = resolved.config
        self.events = EventLog(directory / EVENTS)
        self.events.listeners.append(self._show)
        self.clock = StepTimer(self.events, console.phase, console.progress)
        self.checkpoints = CheckpointManager(directory / CHECKPOINTS, self.config.training.keep, self.events)
        self._metrics: MetricsFile
        self.stopping = ShutdownSignal(self.config.training.time_limit_s, lambda reason: self.ended("killed", reason))
        self.stopped_by, self.step = "", 0
        """Reason for an early stop, and the last step with recorded metrics."""
        self.trackers: list[TrackerThread] = []
        self.best_by = ""
        """Meaning of the scores. Scores with another meaning are not compared."""
        self.drawn_ahead = b""
        """Batches that were drawn and not trained, from the checkpoint that the run resumes."""
        self.best: CheckpointScore | None = None
        """Score of the best checkpoint."""
        self._best_before: CheckpointScore | None = None
        self._num_failed_saves = 0
        self._warned: set[tuple[str, str]] = set()
        self.events.write(RunStarted(self.config.run.name, mrl.__version__))
        for warning in resolved.warnings:
            self.warn("configuration", warning)

    def warn(self, about: str, message: str) -> None:
        self.events.write(Warned(about, message))

    def _show(self, event: Event) -> None:
        if isinstance(event, Warned):
            self.console.print(f"warning: {event.about}: {event.message}")

    def resume(self, trained: Resumable) -> int:
        """Load the newest checkpoint, if there is one. Return the number of steps that are done."""
        checkpoint = self.checkpoints.newest() if self.config.training.resume == "auto" else None
        metrics = self.directory / "metrics.jsonl"
        if checkpoint is None and metrics.exists():
            self.warn("resume", "an earlier start of this run left no checkpoint: training starts from the beginning")
        next_step = 1 if checkpoint is None else checkpoint.step + 1
        self._metrics = MetricsFile(metrics, 0 if checkpoint is None else next_step)  # 0 is the first validation
        names, name = self.config.training.trackers, self.config.run.name
        self.trackers = open_trackers(names, name, self.directory, resume_config(self.config), next_step)
        if checkpoint is None:
            return 0
        self.step = checkpoint.step
        for key, change in describe_changes(checkpoint.state["config"], self.config, checkpoint.step).items():
            self.warn(key, change)
        load_checkpoint(checkpoint, trained)
        self.drawn_ahead = checkpoint.drawn_ahead
        best_by = checkpoint.state.get("best_by", "an unknown figure")
        if best_by == self.best_by:
            self.best = CheckpointScore.from_state(checkpoint.state)
        elif checkpoint.state["best"] is not None:
            self.warn("validation", f"the best checkpoint was chosen by {best_by}; from now on, by {self.best_by}")
        self.console.print(f"resumed from {checkpoint.path}")
        return checkpoint.step

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step, or of a validation outside any step."""
        if error := self._metrics.write(step, metrics):
            self.warn_once("metrics", f"cannot write metrics.jsonl, the figures will be written later: {error}")
        self.step = step
        for tracker in self.trackers:
            tracker.log(step, metrics)
            if news := tracker.news():
                self.warn("tracker", news)

    @contextmanager
    def may_be_lost(self, about: str) -> Iterator[None]:
        """Warn once if the block cannot write its files, and continue: the run does not need them."""
        try:
            yield
        except OSError as error:
            self.warn_once(about, f"cannot write the files, the run continues without them: {error}")

    def warn_once(self, about: str, message: str, of: str = "") -> None:
        """Warn once per process about the same thing and the same part of it."""
        if (about, of) not in self._warned:
            self._warned.add((about, of))
            self.warn(about, message)

    def save_is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after this step, by the configuration or because the last one failed."""
        every = self.config.training.save_every
        return (bool(every) and step % every == 0) or self._num_failed_saves > 0

    def is_best(self, score: CheckpointScore | None) -> bool:
        return score is not None and score.is_better_than(self.best)

    def save(
        self,
        trained: Resumable,
        step: int,
        score: CheckpointScore | None = None,
        *,
        wait: bool = True,
        drawn_ahead: bytes = b"",
    ) -> None:
        """Save everything. The checkpoint is the best so far if it was validated and is better than the best before it.

        With `wait=False`, files are written while training continues, and the checkpoint becomes visible later.
        """
        with self.clock("save"):
            self.finish_save()
            is_best = self.is_best(score)
            self._best_before, self.best = self.best, score if is_best else self.best
            best = {"best": None} if self.best is None else self.best.to_state()
            state = {"config": resume_config(self.config), "trained": trained.state_dict(), "best_by": self.best_by}
            try:
                self.checkpoints.begin(step, trained.roles, state | best, is_best, drawn_ahead)
            except SAVE_ERRORS as error:
                self._save_failed(error, wait)
            else:
                if wait or not self.config.training.background_save:
                    self.finish_save(wait)

    def finish_save(self, is_needed: bool = False) -> None:
        """Wait for the save under way, if any. A failure is a warning, or an error if the save is needed."""
        if self.checkpoints.is_under_way:
            try:
                self.checkpoints.finish()
                self._num_failed_saves = 0
            except SAVE_ERRORS as error:
                self._save_failed(error, is_needed)

    def publish_save(self) -> None:
        """Publish the save under way if all its files are written."""
        if self.checkpoints.is_written():
            self.finish_save()

    def _save_failed(self, error: Exception, is_needed: bool) -> None:
        self.best = self._best_before
        self._num_failed_saves += 1
        disk_error = _disk_error(error)
        if is_needed or self._num_failed_saves > self.config.training.max_failed_saves:
            if isinstance(error, MrlError) and not disk_error:
                raise error
            reason, file = disk_error or error, str(getattr(error, "filename", None) or "")
            problem = f"cannot write a checkpoint: {reason}"
            fix = "free space on that disk; the run resumes from the previous checkpoint"
            raise CheckpointError(problem, where=file, fix=fix) from error
        self.warn("checkpoint", f"not saved, retrying after the next step: {disk_error or error}")

    def should_stop(self) -> bool:
        """Return whether a signal came or the time limit has passed, and print the reason."""
        reason = self.stopping.reason()
        if reason:
            self.console.print(f"{reason}: saving and stopping")
            self.stopped_by = reason
        return bool(reason)

    def ended(self, cause: str, reason: str) -> None:
        self.events.write(RunEnded(cause, reason, self.step))

    def close(self) -> None:
        """Close the trackers, and report what was lost."""
        for tracker in self.trackers:
            if lost := tracker.close():
                self.warn("tracker", lost)
        if self.events.num_lost:
            self.console.print(f"warning: cannot write {self.events.num_lost} events to {self.events.path}")


_OF_A_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)
_DISK_SAYS = re.compile(rf"\[Errno ({'|'.join(map(str, _OF_A_DISK))})\]")


def _disk_error(error: Exception) -> str:
    """Return the message of a full or broken disk on a rank, without the traceback (see its log); otherwise nothing."""
    message = str(error).partition("\n")[0]
    return message if isinstance(error, WorkerRaised) and _DISK_SAYS.search(message) else ""


@contextmanager
def open_run(resolved: Resolved[AnyTyped], console: Console) -> Iterator[Run[AnyTyped]]:
    """Open the run of a configuration: a new one, or an existing one to resume."""
    messages: list[str] = []
    may_go_on = resolved.config.training.resume == "auto"
    with open_run_directory(resolved, may_go_on=may_go_on, warn=messages.append) as directory:
        run = Run(resolved, directory, console)
        for message in messages:
            run.warn("run.name", message)
        with ExitStack() as stack:
            stack.callback(run.events.close)
            stack.push(lambda kind, error, trace: run.ended(*_ending(run, error, resolved.secrets.hide)))
            stack.callback(run.close)
            stack.enter_context(run.stopping.on_signals())
            stack.enter_context(_naming_a_full_disk(directory))
            yield run


@contextmanager
def _naming_a_full_disk(directory: Path) -> Iterator[None]:
    """Raise one error with a fix for any write that a full or broken disk refused."""
    try:
        yield
    except OSError as error:
        if error.errno not in _OF_A_DISK:
            raise
        file, fix = str(error.filename or directory), "free space on that disk, then run the same command to resume"
        raise SetupError(f"the run cannot write: {error.strerror}", where=file, fix=fix) from error


def _ending(run: Run[Any], error: BaseException | None, hide: Callable[[str], str]) -> tuple[str, str]:
    """Return the cause of a run's end, and its text."""
    if error is None:
        is_done = not run.stopped_by or run.step == run.config.training.steps
        return ("done", "") if is_done else ("stopped", run.stopped_by)
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", "Ctrl-C"
    if isinstance(error, MrlError):
        return ("lost" if isinstance(error, (WorkerDied, WorkerSilent)) else "failed"), hide(str(error))
    return "failed", hide("".join(traceback.format_exception(error)))


_MAY_CHANGE = ("run", "cluster", "deadlines", "placement", "training", "validation", "sync", "reward", "judge")
"""Sections that may change on resume without a warning: they do not affect what is learned."""


def resume_config(config: AnyConfig) -> dict[str, Any]:
    """Return the configuration as JSON, with secrets in the variables of rewards and environments removed."""
    sections = {name: value for name, value in dataclasses.asdict(config).items() if name not in _MAY_CHANGE}
    if "agent" in sections:
        del sections["agent"]["environment"]
    redacted: dict[str, Any] = redact(json.loads(json.dumps(sections)))
    return redacted


def describe_changes(before: dict[str, Any], config: AnyConfig, step: int) -> dict[str, str]:
    """Return the changes between the configuration of a run and that of its resumption, by key, in words."""
    return {
        key: f"was {old} when this run began, is {new} from step {step + 1} on"
        for key, (old, new) in _differences(before, resume_config(config)).items()
    }


def _differences(before: Any, after: Any, key: str = "") -> dict[str, tuple[Any, Any]]:
    if isinstance(before, dict) and isinstance(after, dict):
        differences: dict[str, tuple[Any, Any]] = {}
        for name in {**before, **after}:
            differences |= _differences(before.get(name), after.get(name), f"{key}.{name}" if key else name)
        return differences
    return {} if before == after else {key: (before, after)}


_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_AGAIN = "SIGTERM again: exiting without saving"
_AGAIN_S = 2.0
"""One SIGTERM may arrive several times: at the process, at its group, and from each parent that forwards it."""


class ShutdownSignal:
    def __init__(self, time_limit_s: float | None, killed: Callable[[str], None] = lambda reason: None) -> None:
        self._time_limit_s = time_limit_s
        self._killed = killed
        self._began = time.monotonic()
        self._signal = ""
        self._terminated: float | None = None

    def reason(self) -> str:
        """Return the reason to stop; empty if the run should continue."""
        limit = self._time_limit_s
        if not self._signal and limit is not None and time.monotonic() - self._began > limit:
            return f"training.time_limit_s={limit:g} is reached"
        return self._signal

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Stop the run after the current step on SIGTERM, SIGUSR1 or SIGHUP, and at once on a second SIGTERM."""
        terminals = [stream for stream in (1, 2) if os.isatty(stream)]

        def note(number: int, frame: FrameType | None) -> None:
            self._signal = signal.Signals(number).name
            if number == signal.SIGTERM:
                self._terminated = self._terminated or time.monotonic()
                if time.monotonic() - self._terminated > _AGAIN_S:
                    os.write(2, f"{_AGAIN}\n".encode())
                    try:
                        self._killed(_AGAIN)
                    finally:
                        os._exit(128 + number)  # the keepers of Ray and the reward workers stop them now
            if number == signal.SIGHUP:  # printing to a closed terminal would fail
                nowhere = os.open(os.devnull, os.O_WRONLY)
                for stream in terminals:
                    os.dup2(nowhere, stream)
                os.close(nowhere)

        with listening(_SIGNALS, note):
            yield
