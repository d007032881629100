"""What each engine was asked, and before which of its steps: written with weights in flight, followed by a replay.

What an engine computes follows from that alone: which samples are under way together, and at which of their tokens
newer weights come. Everything else follows from the seeds.
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
"""The name of a replica, by its number."""
SCHEDULE = "schedule"
"""The directory of a run's schedules, a file for each replica."""
CallKind = Literal["begin", "start", "weights", "sleep", "abort"]
_KINDS: tuple[CallKind, ...] = get_args(CallKind)
_MAX_BYTES = 1 << 30


@dataclass(frozen=True)
class ScheduledCall:
    at: int
    """How many steps it had done by then."""
    kind: CallKind
    of: tuple[str, ...] = ()
    """The keys of the samples that were started, or the version of the weights."""

    def __str__(self) -> str:
        return f"{self.kind} {', '.join(self.of)[:80]} after {self.at} steps"


def schedule_path(run: Path, replica: str) -> Path:
    return run / SCHEDULE / f"{replica}.jsonl"


class Schedule:
    """The calls of one engine, each made when it comes. They are written down in `records`; with `replays` each is made
    when it was in the run that wrote that."""

    def __init__(self, records: Path | None = None, replays: Path | None = None) -> None:
        self._file, self._replays = None if records is None else _opened(records), replays
        self._calls = _read(replays) if replays is not None else []
        self._next = 1
        if records is not None:
            self.note(ScheduledCall(0, "begin"))

    @property
    def next(self) -> ScheduledCall | None:
        """What the engine waits for; None where it waits for nothing."""
        return self._calls[self._next] if self._next < len(self._calls) else None

    def note(self, call: ScheduledCall) -> None:
        if self._file is not None:
            files.append(self._file, f"{json.dumps([call.at, call.kind, *call.of])}\n".encode())
        if self.next is not None and call != self.next:
            raise RolloutError(
                f"the replay asks {call}, and the run asked {self.next}",
                where=f"{self._replays}:{self._next + 1}",
                fix="the model, the data, the configuration and the version of mrl that the run had",
            )
        self.advance()

    def advance(self) -> None:
        self._next += 1


class FleetSchedule:
    """What all replicas of a fleet are asked, each in the order of the run that is replayed; of any other nothing."""

    def __init__(self, run: Path | None, num_replicas: int) -> None:
        numbers = range(num_replicas if run else 0)
        self._of = {number: Schedule(replays=schedule_path(run, REPLICA.format(number))) for number in numbers if run}

    def next(self, replica: int) -> ScheduledCall | None:
        """Return what this one is asked next; None where that is open."""
        return self._of[replica].next if replica in self._of else None

    def are_next(self, version: int, replicas: Sequence[int]) -> bool:
        """Return whether these replicas may be sent these weights now."""
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
        what, fix = f"there is no schedule of an engine: {error.strerror}", "a run with asynchrony.weights=in_flight"
        raise RolloutError(what, where=str(path), fix=fix) from error
    except (ValueError, RecursionError) as error:
        raise RolloutError(f"not the schedule of an engine: {error}", where=str(path)) from error
    if [call.kind for call in calls].count("begin") != 1 or calls[0].kind != "begin":
        what = "this engine was started more than once: it died, or its run went on from a checkpoint"
        raise RolloutError(what, where=str(path), fix="replay a run that went through from its beginning")
    return calls


def _call(fields: object) -> ScheduledCall:
    match fields:
        case [int(at), str(name), *of] if name in _KINDS and all(isinstance(each, str) for each in of):
            return ScheduledCall(at, _KINDS[_KINDS.index(name)], tuple(map(str, of)))
    raise ValueError(f"no call: {fields!r:.80}")
