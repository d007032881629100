"""Processes and signals, where Linux offers what Python does not: whose child one is, and how to end a family.

Who adopts the orphans below it keeps below it whatever these start, until it ends: a new session or a double fork
changes nothing about it. Reward workers and their supervisor do, and whoever keeps a run's Ray.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)
_TRACKER = b"multiprocessing.resource_tracker"
_TRACKERS_S = 1.0
_POLL_S = 0.02


def adopt_orphans() -> None:
    """Become the parent of every process below this one whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with(parent: int) -> None:
    """Be killed as soon as the process `parent`, which started this one, is gone."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it went before the line above
        os._exit(1)


def children() -> set[int]:
    """Return the children of this process, those that have ended but were not waited for included."""
    return children_of("self")


def children_of(pid: int | str) -> set[int]:
    """Return the children of a process; none where it is gone."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # a thread that has just ended
                found.update(map(int, (task / "children").read_text().split()))
    return found


def end_all_below(limit_s: float) -> bool:
    """Kill every process below this one, which has adopted its orphans; return whether none is left.

    Trackers of shared memory come last: they remove what the others leave, and end by themselves.
    """
    began = time.monotonic()
    while has_children() and time.monotonic() - began < limit_s:
        spares = time.monotonic() - began < _TRACKERS_S
        level = children()
        while level:
            deeper = {child for pid in level for child in children_of(pid)}
            for pid in level:
                if not (spares and _is_tracker(pid)):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            level = deeper
        for pid in children():
            reap(pid)
        time.sleep(_POLL_S)
    return not has_children()


def has_children() -> bool:
    """Return whether there is any child; far cheaper than naming them."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def end_group(pid: int) -> None:
    """Kill a process and its whole group at once: members that are just forking do not get away."""
    with contextlib.suppress(ProcessLookupError):
        group = os.getpgid(pid)
        if group != os.getpgrp():
            os.killpg(group, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def reap(pid: int) -> bool:
    """Return whether a child has ended and is now off the process table."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _is_tracker(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return _TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def describe_status(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"its process left with status {code}"
    hint = "; out of memory, or it closed its channel" if code == -signal.SIGKILL else ""
    return f"its process was ended by signal {-code} ({signal.strsignal(-code)}{hint})"


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


@contextmanager
def listening(numbers: Sequence[signal.Signals], hear: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Hear these signals within the block, but for those that the process was told to ignore, as by `nohup`."""
    listened = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, hear) for number in listened}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
