"""`events.jsonl`: what happened in a run, typed and append-only.

One event is one line. Tests use it as evidence that a fault happened and was handled, so an event reports what was
done, never what was intended.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, dataclass_transform

from mrl import files
from mrl.errors import MrlError
from mrl.redaction import redact

_MAX_BYTES = 4 << 30


@dataclass_transform(frozen_default=True)
@dataclass(frozen=True)
class Event:
    """Base of all events, which are frozen dataclasses. `kind` is the name in the file."""

    kind: ClassVar[str] = ""
    registry: ClassVar[dict[str, type[Event]]] = {}

    def __init_subclass__(cls, kind: str) -> None:
        cls.kind = kind
        Event.registry[kind] = dataclass(frozen=True)(cls)


class RunStarted(Event, kind="run_started"):
    run: str
    version: str


class RunEnded(Event, kind="run_ended"):
    """The last event of an attempt, unless its process was killed and nothing watched it."""

    cause: str
    """done | stopped | interrupted | failed | lost | killed."""
    why: str
    """Text of the error, with its traceback if it is a bug; or the reason to stop."""
    step: int
    """Last step whose metrics were recorded."""


class EventsLost(Event, kind="events_lost"):
    """Earlier events that could not be written."""

    num: int
    why: str


class RunRestarted(Event, kind="run_restarted"):
    """Restart of a run. `number` counts from the newest checkpoint, which is from `step`; 0 is the beginning."""

    why: str
    number: int
    step: int


class RayLost(Event, kind="ray_lost"):
    """The run lost its Ray or a node of it, and ended."""

    why: str


class NodeSilent(Event, kind="node_silent"):
    """A node did not answer for most of a heartbeat. It counts as lost after ten more seconds."""

    node: str
    address: str
    seconds: float


class PhaseBegin(Event, kind="phase_begin"):
    phase: str
    step: int


class PhaseEnd(Event, kind="phase_end"):
    phase: str
    step: int
    seconds: float


class PoolReady(Event, kind="pool_ready"):
    pool: str
    devices: int
    nodes: list[str]
    seconds: float


class NetworkChosen(Event, kind="network_chosen"):
    """Addresses on which the processes of a node listen, and the variables that set them for gloo and NCCL. `of_site`
    was set before mrl started."""

    node: str
    address: str
    interface: str | None
    chosen: dict[str, str]
    of_site: dict[str, str]


class WorkersStarted(Event, kind="workers_started"):
    role: str
    world_size: int
    pids: list[int]
    seconds: float


class ModelLoaded(Event, kind="model_loaded"):
    """The workers of a role have built their model and read its weights."""

    role: str
    num_parameters: int
    seconds: float


class ModelCompared(Event, kind="model_compared"):
    """A role without an engine and transformers, which read the model's files, computed the same fixed text."""

    role: str
    tokens: int
    difference: float
    """Root mean square of the difference in log-probs; for hidden states and scores, relative to their size."""
    limit: float
    """Largest difference that rounding explains."""
    seconds: float
    """Seconds that the run waited for the comparison."""


class WorkerFault(Event, kind="worker_fault"):
    """A worker that died, raised, or went silent (`fault`: died | raised | silent | stopped)."""

    role: str
    rank: int
    node: str
    phase: str
    fault: str
    detail: str
    seconds_into_call: float


class RanksReleased(Event, kind="ranks_released"):
    """Ranks whose processes were ended so that they do not wait in a collective forever."""

    role: str
    ranks: list[int]
    reason: str


class ReplicaLost(Event, kind="replica_lost"):
    """A rollout replica that died, hung or failed. Its unfinished samples are generated again."""

    replica: int
    reason: str
    num_unfinished: int


class ReplicaServes(Event, kind="replica_serves"):
    """A rollout replica that was new or late now holds the current weights."""

    replica: int
    weight_version: int


class EnginesCompared(Event, kind="engines_compared"):
    """Engines answered the same prompt, and the trainer computed the log-probs of their answers."""

    step: int
    mean_differences: dict[str, float]
    """Engine number -> mean difference of log-probs."""


class Retried(Event, kind="retried"):
    what: str
    attempt: int
    reason: str


class Saved(Event, kind="saved"):
    what: str
    step: int
    path: str
    bytes: int
    seconds: float


class SampleSkipped(Event, kind="sample_skipped"):
    """A sample that was left out of an update, with the reason. Samples are never dropped silently."""

    row_id: int
    reason: str
    detail: str


class Warned(Event, kind="warned"):
    """Something that works, but perhaps not as the user expects (a skipped setting, a slow path)."""

    about: str
    message: str


@dataclass(frozen=True)
class Recorded:
    """An event in the file, with its time and process."""

    time: float
    pid: int
    event: Event


class EventLog:
    """Appends events to one file. Several threads and processes may write to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.listeners: list[Callable[[Event], None]] = []
        """Called with each event that this process writes, in the writing thread."""
        self.num_lost = 0
        """Number of events that could not be written and have not been reported yet."""
        self._why = ""
        self._lock = threading.RLock()  # a signal handler may write while its own thread is writing
        # O_APPEND makes each line one atomic write, so writers never interleave.
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, event: Event) -> None:
        fields = redact(dataclasses.asdict(event))
        line = json.dumps({"time": time.time(), "pid": os.getpid(), "kind": event.kind, **fields}, ensure_ascii=False)
        with self._lock:
            self._append(line.encode() + b"\n")
        for listener in self.listeners:
            listener(event)

    def _append(self, line: bytes) -> None:
        """Write a line. Count lines that cannot be written, and report them first when writing works again."""
        if self.num_lost:
            lost = {"kind": EventsLost.kind, "num": self.num_lost, "why": self._why}
            line = json.dumps({"time": time.time(), "pid": os.getpid()} | lost).encode() + b"\n" + line
        try:
            files.append(self._file, line)
            self.num_lost = 0
        except OSError as error:
            if error.errno == errno.EBADF:  # the file was closed, which is not a fault of the disk
                raise
            self.num_lost, self._why = self.num_lost + 1, str(error)

    def close(self) -> None:
        """Close the file. Writing afterwards is an error."""
        os.close(self._file)


def read_events(path: Path) -> Iterator[Recorded]:
    """Yield the events of a file in order. Skip a last line cut off by a crash; any other bad line is an error."""
    try:
        lines = files.read_bytes(path, _MAX_BYTES).split(b"\n")
    except OSError as error:
        raise MrlError(f"cannot be read: {error.strerror}", where=str(path)) from error
    for number, line in enumerate(lines[:-1], start=1):  # text after the last newline was never finished
        yield _parse(line, f"{path}:{number}")


def last_ending(path: Path) -> RunEnded | None:
    """Return how the last attempt ended. Return None while it runs, or if its process was killed."""
    ended = None
    for recorded in read_events(path):
        if isinstance(recorded.event, RunStarted):
            ended = None
        elif isinstance(recorded.event, RunEnded):
            ended = recorded.event
    return ended


def _parse(line: bytes, where: str) -> Recorded:
    try:
        fields: dict[str, Any] = json.loads(line)
        event_type = Event.registry[fields.pop("kind")]
        return Recorded(time=fields.pop("time"), pid=fields.pop("pid"), event=event_type(**fields))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MrlError(f"not an event of this version of mrl: {error!r}", where=where) from error
