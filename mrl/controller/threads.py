"""What the threads of a process that no longer answers are at: their native frames, and the kernel's view of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

NATIVE_S = 15.0
"""For py-spy, which reads the symbols of every library that the process has loaded."""
_FRAMES = 10
_NAMES = 5
_FRAME_LETTERS = 140
_STATES = {"R": "running", "S": "sleeping", "D": "waiting for a device", "T": "stopped", "t": "traced"}


def native_frames(pid: int) -> str:
    """Return the innermost frames of every Python thread, those of C among them; where none can be had, why."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    program = shutil.which("py-spy", path=path)
    if program is None:
        return "py-spy is not installed"
    command = [program, "dump", "--native", "--pid", str(pid)]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=NATIVE_S, check=False)
    except subprocess.TimeoutExpired:
        return f"py-spy: nothing within {NATIVE_S:g} s"
    threads = ran.stdout.split("\nThread ")[1:]
    if ran.returncode or not threads:
        return f"py-spy: {(ran.stderr.strip() or 'it says nothing').splitlines()[0]}"
    lines = (line for thread in threads for line in f"Thread {thread}".splitlines()[: 1 + _FRAMES])
    return "\n".join(line[:_FRAME_LETTERS] for line in lines)


def kernel_view(pid: int) -> str:
    """Return where in the kernel the main thread is, and where the others are, those alike in one line."""
    names: dict[str, list[str]] = defaultdict(list)
    main = "the main thread has ended"
    for task in Path(f"/proc/{pid}/task").iterdir():
        name, stat = _read(task / "comm"), _read(task / "stat")
        if not stat:
            continue  # it ended meanwhile
        place = _place(task, stat.rpartition(")")[2].split()[0])
        if task.name == str(pid):
            main = f"main thread ({name}): {place}"
        else:
            names[place].append(name)
    groups = sorted(names.items(), key=lambda group: -len(group[1]))
    return "\n".join([main, *(_described(place, of) for place, of in groups)])


def _place(task: Path, state: str) -> str:
    """The state of a thread, and the function of the kernel that it is in, else its system call, as far as allowed."""
    function, call = _read(task / "wchan"), _read(task / "syscall").split(" ")[0]
    inside = f" in {function}" if function not in ("", "0") else f" in system call {call}" if call.isdigit() else ""
    return _STATES.get(state, state) + inside


def _described(place: str, names: list[str]) -> str:
    distinct = sorted(set(names))
    more = ", ..." if len(distinct) > _NAMES else ""
    return f"{len(names)} more {place}: {', '.join(distinct[:_NAMES])}{more}"


def _read(path: Path) -> str:
    """Return a file of the kernel; empty where it has gone, or is not for us."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
