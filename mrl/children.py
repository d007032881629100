"""Linux functions for processes and signals that Python does not offer: whose child a process is, and how to end a
family.

A process that adopts the orphans below it keeps all of their descendants below it until it ends, even after a new
session or a double fork. Reward workers, their supervisor, and the keeper of a run's Ray use this.
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
    """Have the kernel kill this process as soon as the process `parent`, which started it, is gone."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the line above
        os._exit(1)


def children() -> set[int]:
    """Return the children of this process, including ended ones that were not waited for."""
    return children_of("self")


def children_of(pid: int | str) -> set[int]:
    """Return the children of a process, or none if it is gone."""
    pids: set[int] = set()
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # a thread that has just ended
                pids.update(map(int, (task / "children").read_text().split()))
    return pids


def end_all_below(limit_s: float) -> bool:
    """Kill every process below this one, which has adopted its orphans. Return whether none remain.

    Trackers of shared memory come last: they clean up after the others, and end by themselves.
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
    """Return whether there is any child, far faster than listing them."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def end_group(pid: int) -> None:
    """Kill a process and its whole group at once, so that members that are just forking cannot escape."""
    with contextlib.suppress(ProcessLookupError):
        group = os.getpgid(pid)
        if group != os.getpgrp():
            os.killpg(group, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def reap(pid: int) -> bool:
    """Return whether a child has ended and has been removed from the process table."""
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
        return f"its process exited with status {code}"
    hint = "; out of memory, or it closed its channel" if code == -signal.SIGKILL else ""
    return f"its process was ended by signal {-code} ({signal.strsignal(-code)}{hint})"


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


@contextmanager
def listening(numbers: Sequence[signal.Signals], handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle these signals within the block, except signals that the process ignores, as under `nohup`."""
    listened = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, handle) for number in listened}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
