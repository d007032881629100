"""Every error that a user can meet: what happened, where, the numbers, and how to fix it.

`str(error)` is the whole message, ready to print. The command line prints it without a traceback and exits with
`exit_code`: 2 if the user's input was wrong, 1 if a run failed.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

EXIT_STOPPED = 75
"""Exit code of a run that was asked to stop and has saved. `sysexits.h` calls it a temporary failure: the same command
continues the run."""
_MAX_LISTED = 12


class MrlError(Exception):
    """A failure with a complete message for the reader: what, where, and the fix."""

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
        # By default, exceptions are rebuilt from their positional arguments, which loses keywords between processes. An
        # error that a worker raises must arrive complete.
        return _rebuild, (type(self), self.__dict__)


def _rebuild(kind: type[MrlError], state: dict[str, object]) -> MrlError:
    error = kind.__new__(kind)
    error.args = (state.get("what", ""),)
    error.__dict__.update(state)
    return error


@dataclass(frozen=True)
class Problem:
    """One mistake in a configuration: where it is, the key, what is wrong, and a fix."""

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
        count = counted(len(problems), "problem")
        super().__init__("\n".join([f"{count} in the configuration:", *(f"  - {problem}" for problem in problems)]))
        self.problems = tuple(problems)


class NameUnknown(MrlError):
    """A name that is not registered and not the `package.module:attribute` of an object."""

    exit_code = 2


class SetupError(MrlError):
    """A library, device or service that a command needs and this machine does not have."""


class ModelError(MrlError):
    """A model's files that cannot be read or used, or a layout that they do not fit."""

    exit_code = 2


class BatchError(MrlError):
    """Columns or rows of a batch that do not fit the requested operation."""


class DataError(MrlError):
    """Prompts that cannot be read or used: file, row and column, the expected and the actual value."""

    exit_code = 2


class BadRow(DataError):
    """One row of a data source that is not a prompt."""


class RewardError(MrlError):
    """A reward that is missing, not a finite number, or on a token that the model did not write."""


class AgentError(MrlError):
    """A conversation, an environment or a tool that breaks its contract: which one, in which turn, and what was
    expected."""


class EngineError(MrlError):
    """An operation that Megatron does not support, or a model, layout and batch that do not fit together."""


class RolloutError(MrlError):
    """A request that a rollout engine does not support, or weights that differ from the weights sent."""


class DeviceFull(RolloutError):
    """A device with too little free memory for an engine that should wake on it. The message lists what uses the
    memory."""


class AuditFailed(MrlError):
    """An identity that every correct run satisfies does not hold in this one."""


class CheckpointError(MrlError):
    """A checkpoint that is incomplete, damaged, or from another run."""


class WireError(MrlError):
    """Bytes that are not a batch: truncated, in another format, or inconsistent."""


class PlacementError(MrlError):
    """Roles, pools and devices that do not fit the machines at hand."""


class TooFewDevices(PlacementError):
    """Ray does not have the devices of all pools, or does not hand them out."""

    def __init__(self, what: str, num_nodes: int, *, fix: str) -> None:
        super().__init__(what, fix=fix)
        self.num_nodes = num_nodes
        """Number of available machines."""


class WorkerError(MrlError):
    """A worker that died, raised, or did not answer in time. The message says which one."""

    def __init__(self, what: str, *, where: str = "", fix: str = "", role: str = "", ranks: Sequence[int] = ()) -> None:
        super().__init__(what, where=where, fix=fix)
        self.role = role
        self.ranks = tuple(ranks)


class WorkerDied(WorkerError):
    """A worker's process ended while others depended on it."""


class WorkerRaised(WorkerError):
    """A worker's method raised."""


class WorkerSilent(WorkerError):
    """A worker did not answer by its deadline, or its process is stopped."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `did you mean "x"?` for the nearest known name, or all known names if none is similar."""
    known = sorted(known)
    similar = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if similar:
        return f'did you mean "{similar[0]}"?'
    return f"known: {', '.join(known)}" if known else ""


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def problem_list(problems: list[str]) -> str:
    rest = [f"and {len(problems) - _MAX_LISTED} more"] if len(problems) > _MAX_LISTED else []
    return "\n  - ".join(["", *problems[:_MAX_LISTED], *rest])
