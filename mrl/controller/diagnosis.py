"""Evidence about a process that ended or does not answer: from Ray, from its log and from the kernel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

_MONITOR = re.compile(r"Memory on the node .*? was (\S+) / (\S+) \(\S+\), which exceeds the .*? threshold of (\d\.\d+)")
_USERS = re.compile(r"\d+\t\d+\.\d+\t[^,\t]+")
_USERS_FROM_GB = 0.5
_PID = re.compile(r"\bpid[:=]\s*(\d+)")
_FATAL = re.compile(r"^Fatal Python error: (.+)$", re.MULTILINE)
_SHARED_MEMORY_LEFT = 0.02
_MIB = 1 << 20


@dataclass(frozen=True)
class NodeMemory:
    """Memory of a node: number of out-of-memory kills by its kernel since boot, and /dev/shm."""

    kills: int
    shared_bytes: int
    free_shared_bytes: int


def pid_in(text: str) -> int | None:
    """Return the pid in a message of Ray."""
    match = _PID.search(text)
    return int(match[1]) if match else None


def said_by_ray(text: str) -> str:
    """Return the relevant part of Ray's long message; for its memory monitor, the numbers and the largest processes."""
    if monitor := _MONITOR.search(text):
        used, total, threshold = monitor.groups()
        users = [user.split("\t") for user in _USERS.findall(text)]
        large = [f"{name} (pid {pid}) {size} GB" for pid, size, name in users if float(size) >= _USERS_FROM_GB]
        return (
            f"Ray's memory monitor killed it, because {used} of the node's {total} were used, more than "
            f"{float(threshold):.0%}; {', '.join(large)}"
        )
    if "error raised in its creation task" in text:
        return text.strip().splitlines()[-1]  # the last line of a traceback
    for line in text.splitlines():
        if "reason" in line.lower() or "exit" in line.lower():
            return re.split(r"Some common causes|There are some potential", line)[0].strip()
    return text.strip().splitlines()[0] if text.strip() else "no known reason"


def cause(detail: str, log: str, before: NodeMemory, now: NodeMemory) -> tuple[str, tuple[str, ...]]:
    """Return why a process ended, with lines of evidence. `detail` is the cause known so far."""
    hints = []
    if kills := now.kills - before.kills:
        hints.append(f"the kernel has killed {kills} processes on this node during the run: it was out of memory")
    fatal = _FATAL.findall(log)
    is_full = now.free_shared_bytes < _SHARED_MEMORY_LEFT * now.shared_bytes
    if is_full or fatal[-1:] == ["Bus error"]:
        numbers = f"{now.free_shared_bytes / _MIB:.0f} of {now.shared_bytes / _MIB:.0f} MiB are free"
        hints.append(f"/dev/shm {'is full' if is_full else 'may have been full, as after most bus errors'}: {numbers}")
        hints.append("fix: enlarge it (`docker run --shm-size`, `mount -o remount,size=... /dev/shm`)")
    if "memory monitor" in detail or kills:
        hints.append("fix: run `mrl plan`, which lists the users of memory and the key that would make it fit")
    if fatal:
        return f"it crashed: {fatal[-1]} (see the stack in the log)", tuple(hints)
    return detail, tuple(hints)


NATIVE_S = 15.0
"""Time limit of py-spy, which reads the symbols of every library that the process has loaded."""
_FRAMES = 10
_NAMES = 5
_FRAME_LETTERS = 140
_STATES = {"R": "running", "S": "sleeping", "D": "waiting for a device", "T": "stopped", "t": "traced"}


def native_frames(pid: int) -> str:
    """Return the innermost frames of every Python thread, including C frames; if impossible, the reason."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    program = shutil.which("py-spy", path=path)
    if program is None:
        return "py-spy is not installed"
    command = [program, "dump", "--native", "--pid", str(pid)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=NATIVE_S, check=False)
    except subprocess.TimeoutExpired:
        return f"py-spy: no result within {NATIVE_S:g} s"
    threads = result.stdout.split("\nThread ")[1:]
    if result.returncode or not threads:
        return f"py-spy: {(result.stderr.strip() or 'no output').splitlines()[0]}"
    lines = (line for thread in threads for line in f"Thread {thread}".splitlines()[: 1 + _FRAMES])
    return "\n".join(line[:_FRAME_LETTERS] for line in lines)


def kernel_view(pid: int) -> str:
    """Return where in the kernel the main thread is, and where the others are, with equal ones in one line."""
    names: dict[str, list[str]] = defaultdict(list)
    main = "the main thread has ended"
    for task in Path(f"/proc/{pid}/task").iterdir():
        name, stat = _read(task / "comm"), _read(task / "stat")
        if not stat:
            continue  # the thread has ended
        place = _place(task, stat.rpartition(")")[2].split()[0])
        if task.name == str(pid):
            main = f"main thread ({name}): {place}"
        else:
            names[place].append(name)
    groups = sorted(names.items(), key=lambda group: -len(group[1]))
    return "\n".join([main, *(_described(place, thread_names) for place, thread_names in groups)])


def _place(task: Path, state: str) -> str:
    """Return the state of a thread, and its kernel function or else its system call, as far as permissions allow."""
    function, call = _read(task / "wchan"), _read(task / "syscall").split(" ")[0]
    inside = f" in {function}" if function not in ("", "0") else f" in system call {call}" if call.isdigit() else ""
    return _STATES.get(state, state) + inside


def _described(place: str, names: list[str]) -> str:
    distinct = sorted(set(names))
    more = ", ..." if len(distinct) > _NAMES else ""
    return f"{len(names)} more {place}: {', '.join(distinct[:_NAMES])}{more}"


def _read(path: Path) -> str:
    """Return a file of the kernel; empty if it does not exist or is not readable."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
