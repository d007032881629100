"""Schedule of each engine's calls and the steps before them, recorded with weights in flight and followed by a replay.

It determines the engine's results: which samples are computed together, and at which tokens newer weights arrive.
Everything else follows from the seeds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from mrl import files
from mrl.errors import RolloutError

REPLICA = "rollout-{}"
"""Name of a replica, by its number."""
SCHEDULE = "schedule"
"""Directory of a run's schedules, with one file per replica."""
CallKind = Literal["begin", "start", "weights", "sleep", "abort"]
_KINDS: tuple[CallKind, ...] = get_args(CallKind)
_MAX_BYTES = 1 << 30


@dataclass(frozen=True)
class ScheduledCall:
    at: int
    """Number of steps that the engine had done before."""
    kind: CallKind
    of: tuple[str, ...] = ()
    """Keys of the started samples, or the version of the weights."""

    def __str__(self) -> str:
        return f"{self.kind} {', '.join(self.of)[:80]} after {self.at} steps"


def schedule_path(run: Path, replica: str) -> Path:
    return run / SCHEDULE / f"{replica}.jsonl"


class Schedule:
    """Calls of one engine.

    With `records` they are written to a file. With `replays` each call is made at the same step as in the recorded run.
    """

    def __init__(self, records: Path | None = None, replays: Path | None = None) -> None:
        self._file, self._replays = None if records is None else _opened(records), replays
        self._calls = _read(replays) if replays is not None else []
        self._next = 1
        if records is not None:
            self.note(ScheduledCall(0, "begin"))

    @property
    def next(self) -> ScheduledCall | None:
        """The next call of the replay, or None."""
        return self._calls[self._next] if self._next < len(self._calls) else None

    def note(self, call: ScheduledCall) -> None:
        if self._file is not None:
            files.append(self._file, f"{json.dumps([call.at, call.kind, *call.of])}\n".encode())
        if self.next is not None and call != self.next:
            raise RolloutError(
                f"the replay calls {call}, but the run called {self.next}",
                where=f"{self._replays}:{self._next + 1}",
                fix="use the model, data, configuration and mrl version of that run",
            )
        self.advance()

    def advance(self) -> None:
        self._next += 1


class FleetSchedule:
    """Calls of all replicas of a fleet, in the order of the replayed run; empty without a replay."""

    def __init__(self, run: Path | None, num_replicas: int) -> None:
        numbers = range(num_replicas if run else 0)
        self._of = {number: Schedule(replays=schedule_path(run, REPLICA.format(number))) for number in numbers if run}

    def next(self, replica: int) -> ScheduledCall | None:
        """Return the replica's next call; None if it is free."""
        return self._of[replica].next if replica in self._of else None

    def are_next(self, version: int, replicas: Sequence[int]) -> bool:
        """Return whether these replicas may receive these weights now."""
        calls = map(self.next, replicas)
        return all(call is None or (call.kind, call.of) == ("weights", (str(version),)) for call in calls)

    def advance(self, replicas: Iterable[int]) -> None:
        for replica in replicas:
            if replica in self._of:
                self._of[replica].advance()


def _opened(path: Path) -> int:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _read(path: Path) -> list[ScheduledCall]:
    try:
        lines = files.read_bytes(path, _MAX_BYTES).decode().splitlines()
        calls = [_call(json.loads(line)) for line in lines]
    except OSError as error:
        problem, fix = (
            f"an engine's schedule is missing: {error.strerror}",
            "replay a run with asynchrony.weights=in_flight",
        )
        raise RolloutError(problem, where=str(path), fix=fix) from error
    except (ValueError, RecursionError) as error:
        raise RolloutError(f"this is not a schedule of an engine: {error}", where=str(path)) from error
    if [call.kind for call in calls].count("begin") != 1 or calls[0].kind != "begin":
        problem = "this engine was started more than once: it died, or its run resumed from a checkpoint"
        raise RolloutError(problem, where=str(path), fix="replay a run that was never interrupted")
    return calls


def _call(fields: object) -> ScheduledCall:
    match fields:
        case [int(at), str(name), *of] if name in _KINDS and all(isinstance(key, str) for key in of):
            return ScheduledCall(at, _KINDS[_KINDS.index(name)], tuple(map(str, of)))
    raise ValueError(f"this is not a call: {fields!r:.80}")
