"""Every error that a user can meet: what happened, where, the numbers, and how to fix it.

`str(error)` is the whole message, ready to print. The command line prints it without a traceback and
leaves with `exit_code`: 2 where the user's input was wrong, 1 where a run failed.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

EXIT_STOPPED = 75
"""What a run leaves with that was asked to stop and has saved. `sysexits.h` calls it a temporary failure: the same
command goes on."""
_MAX_LISTED = 12


class MrlError(Exception):
    """A failure with a message made for the reader: what, where, and the fix."""

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.fix = fix

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        return f"{head}\n  fix: {self.fix}" if self.fix else head

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions are rebuilt from their positional arguments by default, which loses keywords
        # between processes: an error that a worker raises must arrive whole.
        return _rebuild, (type(self), self.__dict__)


def _rebuild(kind: type[MrlError], state: dict[str, object]) -> MrlError:
    error = kind.__new__(kind)
    error.args = (state.get("what", ""),)
    error.__dict__.update(state)
    return error


@dataclass(frozen=True)
class Problem:
    """One mistake in a configuration: where it stands, which key, what is wrong, what would work."""

    where: str
    key: str
    what: str
    fix: str = ""

    def __str__(self) -> str:
        head = f"{self.where}: {self.key}: {self.what}" if self.key else f"{self.where}: {self.what}"
        return f"{head} ({self.fix})" if self.fix else head


class ConfigError(MrlError):
    """All mistakes of a configuration at once."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem]) -> None:
        count = f"{len(problems)} problem{'s' if len(problems) != 1 else ''} in the configuration"
        super().__init__("\n".join([f"{count}:", *(f"  - {problem}" for problem in problems)]))
        self.problems = tuple(problems)


class NameUnknown(MrlError):
    """A name that is neither registered nor the `package.module:attribute` of something."""

    exit_code = 2


class SetupError(MrlError):
    """A library, device or service that a command needs and this machine lacks."""


class ModelError(MrlError):
    """A model's files that cannot be read or used, or a layout that they do not fit."""

    exit_code = 2


class BatchError(MrlError):
    """Columns or rows of a batch that do not fit what is asked of them."""


class DataError(MrlError):
    """Prompts that cannot be read or used: which file, row and column, what was expected, what was found."""

    exit_code = 2


class BadRow(DataError):
    """One row of a data source that is not a prompt."""


class RewardError(MrlError):
    """A reward that is missing, not a finite number, or on a token that the model did not write."""


class AgentError(MrlError):
    """A conversation, an environment or a tool that breaks its contract: who, in which turn, what was expected."""


class EngineError(MrlError):
    """Megatron asked for what it cannot do, or a model, layout and batch that do not fit each other."""


class RolloutError(MrlError):
    """A rollout engine that cannot do what is asked of it, or weights that did not reach it as they were sent."""


class DeviceFull(RolloutError):
    """A device with less free memory than an engine takes that is to wake on it; the message names who holds it."""


class AuditFailed(MrlError):
    """An identity that every right run keeps does not hold in this one."""


class CheckpointError(MrlError):
    """A checkpoint that is incomplete, damaged, or of another run."""


class WireError(MrlError):
    """Bytes that are not a batch: truncated, of another format, or inconsistent."""


class PlacementError(MrlError):
    """Roles, pools and devices that do not fit the machines at hand."""


class TooFewDevices(PlacementError):
    """Ray has not got the devices of all pools, or does not hand them out."""

    def __init__(self, what: str, num_nodes: int, *, fix: str) -> None:
        super().__init__(what, fix=fix)
        self.num_nodes = num_nodes
        """Machines that are there."""


class WorkerError(MrlError):
    """A worker that died, raised, or did not answer in time; the message names the culprit."""

    def __init__(self, what: str, *, where: str = "", fix: str = "", role: str = "", ranks: Sequence[int] = ()) -> None:
        super().__init__(what, where=where, fix=fix)
        self.role = role
        self.ranks = tuple(ranks)


class WorkerDied(WorkerError):
    """A worker's process ended while others counted on it."""


class WorkerRaised(WorkerError):
    """A worker's method raised."""


class WorkerSilent(WorkerError):
    """A worker did not answer by its deadline, or its process is stopped."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`did you mean "x"?` for the nearest known name, or the known names when none is near."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if near:
        return f'did you mean "{near[0]}"?'
    return f"known: {', '.join(known)}" if known else ""


def problem_list(problems: list[str]) -> str:
    rest = [f"and {len(problems) - _MAX_LISTED} more"] if len(problems) > _MAX_LISTED else []
    return "\n  - ".join(["", *problems[:_MAX_LISTED], *rest])
