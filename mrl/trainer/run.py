"""A run beside its learning: its directory, what it writes down, when it saves, when it stops, where it goes on."""

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
from mrl.trainer.checkpoints import CheckpointManager
from mrl.trainer.role_client import RoleClient

SAVE_ERRORS = (WorkerRaised, OSError)
"""What a full or broken disk does, on a rank or here. A worker that died is no longer there to train."""


class Resumable(Protocol):
    """What a checkpoint holds: models, and the state beside them as plain JSON."""

    @property
    def roles(self) -> Mapping[str, RoleClient]:
        """The models that are trained."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs beside the models."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""


class Run(Generic[AnyTyped]):
    """One run, of RL or of SFT. Its directory is held by one process at a time."""

    config: AnyTyped

    def __init__(self, resolved: Resolved[AnyTyped], directory: Path, console: Console) -> None:
        self.directory, self.console = directory, console
        self.config = resolved.config
        self.events = EventLog(directory / EVENTS)
        self.events.listeners.append(self._show)
        self.clock = StepTimer(self.events, console.phase, console.progress)
        self.checkpoints = CheckpointManager(directory / CHECKPOINTS, self.config.training.keep, self.events)
        self._metrics: MetricsFile
        self.stopping = ShutdownSignal(self.config.training.time_limit_s, lambda why: self.ended("killed", why))
        self.stopped_by, self.step = "", 0
        """What made the run stop early, and the last step whose metrics were recorded."""
        self.trackers: list[TrackerThread] = []
        self.best_by = ""
        """What scores say; those that said something else are not compared with."""
        self.drawn_ahead = b""
        """Of the checkpoint that it goes on from: the batches that were drawn and not trained."""
        self._best: float | None = None
        self._best_before: float | None = None
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
        """Load the newest checkpoint, where there is one; return how many steps are done."""
        found = self.checkpoints.newest() if self.config.training.resume == "auto" else None
        metrics = self.directory / "metrics.jsonl"
        if found is None and metrics.exists():
            self.warn("resume", "this run began here before and left no checkpoint: it begins again")
        next_step = 1 if found is None else found.step + 1
        self._metrics = MetricsFile(metrics, 0 if found is None else next_step)  # 0 is a validation before training
        which, name = self.config.training.trackers, self.config.run.name
        self.trackers = open_trackers(which, name, self.directory, resume_config(self.config), next_step)
        if found is None:
            return 0
        self.step = found.step
        for key, change in describe_changes(found.state["config"], self.config, found.step).items():
            self.warn(key, change)
        for name, role in trained.roles.items():
            role.group.load_checkpoint(str(found.path / name))
        trained.load_state_dict(found.state["trained"])
        self.drawn_ahead = found.drawn_ahead
        best_by = found.state.get("best_by", "a figure that is not known")
        if best_by == self.best_by:
            self._best = found.state["best"]
        elif found.state["best"] is not None:
            self.warn("validation", f"the best was {best_by}; it begins anew as {self.best_by}")
        self.console.print(f"resumed from {found.path}")
        return found.step

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write down the metrics of a step, or of a validation that stands beside no step."""
        if why := self._metrics.write(step, metrics):
            self.warn_once("metrics", f"metrics.jsonl cannot be written; the figures come later: {why}")
        self.step = step
        for tracker in self.trackers:
            tracker.log(step, metrics)
            if news := tracker.news():
                self.warn("tracker", news)

    @contextmanager
    def may_be_lost(self, what: str) -> Iterator[None]:
        """What the block writes is worth no run: where it cannot be written, that is said once, and the run goes on."""
        try:
            yield
        except OSError as error:
            self.warn_once(what, f"cannot be written, and the run goes on without: {error}")

    def warn_once(self, about: str, message: str, of: str = "") -> None:
        """Warn of the same thing, and of the same part of it, no second time in this process."""
        if (about, of) not in self._warned:
            self._warned.add((about, of))
            self.warn(about, message)

    def save_is_due(self, step: int) -> bool:
        """Return whether the configuration wants a checkpoint after this step, or one failed that is to be made up."""
        every = self.config.training.save_every
        return (bool(every) and step % every == 0) or self._num_failed_saves > 0

    def is_best(self, score: float | None) -> bool:
        return score is not None and (self._best is None or score > self._best)

    def save(
        self,
        trained: Resumable,
        step: int,
        score: float | None = None,
        *,
        wait: bool = True,
        drawn_ahead: bytes = b"",
    ) -> None:
        """Save everything. It is the best so far if it was validated itself, and scored higher than any before.

        Without waiting it is written while training goes on, and becomes visible later.
        """
        with self.clock("save"):
            self.finish_save()
            is_best = self.is_best(score)
            self._best_before, self._best = self._best, score if is_best else self._best
            best = {"best": self._best, "best_by": self.best_by}
            state = {"config": resume_config(self.config), "trained": trained.state_dict(), **best}
            try:
                self.checkpoints.begin(step, trained.roles, state, is_best, drawn_ahead)
            except SAVE_ERRORS as error:
                self._save_failed(error, wait)
            else:
                if wait or not self.config.training.background_save:
                    self.finish_save(wait)

    def finish_save(self, is_needed: bool = False) -> None:
        """Wait for the save under way, if there is one. A failure is a warning, or an error where it is needed."""
        if self.checkpoints.is_under_way:
            try:
                self.checkpoints.finish()
                self._num_failed_saves = 0
            except SAVE_ERRORS as error:
                self._save_failed(error, is_needed)

    def publish_save(self) -> None:
        """Make the save that is under way visible, if nobody has to wait for it any more."""
        if self.checkpoints.is_written():
            self.finish_save()

    def _save_failed(self, error: Exception, is_needed: bool) -> None:
        self._best = self._best_before
        self._num_failed_saves += 1
        of_disk = _what_a_disk_says(error)
        if is_needed or self._num_failed_saves > self.config.training.max_failed_saves:
            if isinstance(error, MrlError) and not of_disk:
                raise error
            said, where = of_disk or error, str(getattr(error, "filename", None) or "")
            what = f"a checkpoint cannot be written: {said}"
            fix = "free space there; the run goes on from the one before"
            raise CheckpointError(what, where=where, fix=fix) from error
        self.warn("checkpoint", f"not saved, which is tried again after the next step: {of_disk or error}")

    def should_stop(self) -> bool:
        """Return whether a signal came or the time is up; what it was is printed."""
        reason = self.stopping.reason()
        if reason:
            self.console.print(f"{reason}: saving and stopping")
            self.stopped_by = reason
        return bool(reason)

    def ended(self, cause: str, why: str) -> None:
        self.events.write(RunEnded(cause, why, self.step))

    def close(self) -> None:
        """Close the trackers, and say what could not be written."""
        for tracker in self.trackers:
            if lost := tracker.close():
                self.warn("tracker", lost)
        if self.events.num_lost:
            self.console.print(f"warning: {self.events.num_lost} events could not be written to {self.events.path}")


_OF_A_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)
_DISK_SAYS = re.compile(rf"\[Errno ({'|'.join(map(str, _OF_A_DISK))})\]")


def _what_a_disk_says(error: Exception) -> str:
    """Return what a full or broken disk said on a rank, without its traceback, which is in its log; else nothing."""
    said = str(error).partition("\n")[0]
    return said if isinstance(error, WorkerRaised) and _DISK_SAYS.search(said) else ""


@contextmanager
def open_run(resolved: Resolved[AnyTyped], console: Console) -> Iterator[Run[AnyTyped]]:
    """Open the run of a configuration: a new one, or one that goes on."""
    said: list[str] = []
    may_go_on = resolved.config.training.resume == "auto"
    with open_run_directory(resolved, may_go_on=may_go_on, warn=said.append) as directory:
        run = Run(resolved, directory, console)
        for message in said:
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
    """Raise one error with a fix for whatever a full or broken disk refused."""
    try:
        yield
    except OSError as error:
        if error.errno not in _OF_A_DISK:
            raise
        where, fix = str(error.filename or directory), "free space there; the same command goes on"
        raise SetupError(f"the run cannot write: {error.strerror}", where=where, fix=fix) from error


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
"""Sections that a resumed run may have otherwise than before without a word: they do not decide what is learned."""


def resume_config(config: AnyConfig) -> dict[str, Any]:
    """It as JSON knows it; without secrets, which the variables of rewards and environments may hold."""
    sections = {name: value for name, value in dataclasses.asdict(config).items() if name not in _MAY_CHANGE}
    if "agent" in sections:
        del sections["agent"]["environment"]
    found: dict[str, Any] = redact(json.loads(json.dumps(sections)))
    return found


def describe_changes(before: dict[str, Any], config: AnyConfig, step: int) -> dict[str, str]:
    """Return what a run that goes on after this step has otherwise than it had; by key, in words."""
    return {
        key: f"was {then} when this run began, and is {now} from step {step + 1} on"
        for key, (then, now) in _differences(before, resume_config(config)).items()
    }


def _differences(before: Any, now: Any, key: str = "") -> dict[str, tuple[Any, Any]]:
    if isinstance(before, dict) and isinstance(now, dict):
        found: dict[str, tuple[Any, Any]] = {}
        for name in {**before, **now}:
            found |= _differences(before.get(name), now.get(name), f"{key}.{name}" if key else name)
        return found
    return {} if before == now else {key: (before, now)}


_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_AGAIN = "SIGTERM again: ended without saving"
_AGAIN_S = 2.0
"""One SIGTERM may come several times: to the process, to its group, and from each parent that forwards it."""


class ShutdownSignal:
    def __init__(self, time_limit_s: float | None, killed: Callable[[str], None] = lambda why: None) -> None:
        self._time_limit_s = time_limit_s
        self._killed = killed
        self._began = time.monotonic()
        self._signal = ""
        self._terminated: float | None = None

    def reason(self) -> str:
        """Return why the run is to stop; empty while it is to go on."""
        limit = self._time_limit_s
        if not self._signal and limit is not None and time.monotonic() - self._began > limit:
            return f"training.time_limit_s={limit:g} is reached"
        return self._signal

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """SIGTERM, SIGUSR1 and SIGHUP end the run after the present step; a second SIGTERM ends it at once."""
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
                        os._exit(128 + number)  # what keeps Ray and the reward workers ends them now
            if number == signal.SIGHUP:  # a terminal that is gone fails every print
                nowhere = os.open(os.devnull, os.O_WRONLY)
                for stream in terminals:
                    os.dup2(nowhere, stream)
                os.close(nowhere)

        with listening(_SIGNALS, note):
            yield
