"""Why a worker's process ended: from what Ray says, what the process itself wrote last, and what its node counts."""

from __future__ import annotations

import re
from dataclasses import dataclass

_MONITOR = re.compile(r"Memory on the node .*? was (\S+) / (\S+) \(\S+\), which exceeds the .*? threshold of (\d\.\d+)")
_USERS = re.compile(r"\d+\t\d+\.\d+\t[^,\t]+")
_USERS_FROM_GB = 0.5
_PID = re.compile(r"\bpid[:=]\s*(\d+)")
_FATAL = re.compile(r"^Fatal Python error: (.+)$", re.MULTILINE)
_SHARED_MEMORY_LEFT = 0.02
_MIB = 1 << 20


@dataclass(frozen=True)
class NodeMemory:
    """The memory of a node: processes that its kernel has killed for lack of it since it booted, and /dev/shm."""

    kills: int
    shared_bytes: int
    free_shared_bytes: int


def pid_in(text: str) -> int | None:
    """Return the process that a message of Ray is about."""
    found = _PID.search(text)
    return int(found[1]) if found else None


def said_by_ray(text: str) -> str:
    """Return the telling part of Ray's long message: of its memory monitor the numbers, and who held how much."""
    if monitor := _MONITOR.search(text):
        taken, total, threshold = monitor.groups()
        users = [user.split("\t") for user in _USERS.findall(text)]
        large = [f"{name} (pid {pid}) {size} GB" for pid, size, name in users if float(size) >= _USERS_FROM_GB]
        return (
            f"Ray's memory monitor killed it, because {taken} of the node's {total} were taken, more than "
            f"{float(threshold):.0%}; {', '.join(large)}"
        )
    if "error raised in its creation task" in text:
        return text.strip().splitlines()[-1]  # of a traceback
    for line in text.splitlines():
        if "reason" in line.lower() or "exit" in line.lower():
            return re.split(r"Some common causes|There are some potential", line)[0].strip()
    return text.strip().splitlines()[0] if text.strip() else "no reason known"


def cause(said: str, log: str, before: NodeMemory, now: NodeMemory) -> tuple[str, tuple[str, ...]]:
    """What ended a process, and lines of evidence that stand below; `said` is what is known of it without them."""
    hints = []
    if kills := now.kills - before.kills:
        hints.append(f"the kernel killed {kills} processes for lack of memory on this node meanwhile")
    fatal = _FATAL.findall(log)
    is_full = now.free_shared_bytes < _SHARED_MEMORY_LEFT * now.shared_bytes
    if is_full or fatal[-1:] == ["Bus error"]:
        numbers = f"{now.free_shared_bytes / _MIB:.0f} of {now.shared_bytes / _MIB:.0f} MiB are free"
        hints.append(f"/dev/shm {'is full' if is_full else 'may have been, as after most bus errors, full'}: {numbers}")
        hints.append("fix: give the node more (`docker run --shm-size`, `mount -o remount,size=... /dev/shm`)")
    if "memory monitor" in said or kills:
        hints.append("fix: `mrl plan` says who takes how much, and which key would make it fit")
    if fatal:
        return f"it crashed: {fatal[-1]} (its stack stands in the log)", tuple(hints)
    return said, tuple(hints)
