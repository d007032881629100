"""Intercept system calls that change files. For each call, a test decides to allow it, refuse it, or end the process.

A seccomp filter passes the calls to a listener. It applies to the thread that installs it and to all threads and
processes it starts, through fork and exec, so writes of C libraries and of other languages are intercepted too.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import select
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# Name, number on x86_64 and aarch64, and the argument with the place: a file `f`, a path `p`, or a directory and a path
# relative to it, `at`. An `open` only counts if it may write.
_CALLS = """
write:1:64:f0 pwrite64:18:68:f0 writev:20:66:f0 fallocate:285:47:f0 ftruncate:77:46:f0 fsync:74:82:f0
fdatasync:75:83:f0 flock:73:32:f0 open:2:-:p0 openat:257:56:at0 creat:85:-:p0 mkdir:83:-:p0 mkdirat:258:34:at0
rename:82:-:p0 renameat:264:38:at0 renameat2:316:276:at0 unlink:87:-:p0 unlinkat:263:35:at0 rmdir:84:-:p0
"""
_OPENS = {"open": 1, "openat": 2}
_MAY_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_MACHINE = {"x86_64": (1, 317), "aarch64": (2, 277)}[platform.machine()]
_LOAD, _AND, _EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06
_ALLOW, _NOTIFY = 0x7FFF0000, 0x7FC00000
_NO_NEW_PRIVILEGES, _SET_FILTER, _NEW_LISTENER = 38, 1, 8
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_CONTINUE = 1
_POLL_MS = 100
_AT_CWD = 0xFFFFFF9C
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class SystemCall:
    """A system call before it is executed. For a rename, `path` is the old name."""

    name: str
    pid: int
    path: Path


Decide = Callable[[SystemCall], int]
"""Returns 0 to allow the call, or the number of the error with which it fails."""


def _table() -> dict[int, tuple[str, str]]:
    entries = (entry.split(":") for entry in _CALLS.split())
    return {int(entry[_MACHINE[0]]): (entry[0], entry[3]) for entry in entries if entry[_MACHINE[0]] != "-"}


def _filter() -> bytes:
    program = [(_LOAD, 0, 0, 0)]
    for number, (name, _) in _table().items():
        notify = [(_RETURN, 0, 0, _NOTIFY)]
        if name in _OPENS:
            flags = [(_LOAD, 0, 0, 16 + 8 * _OPENS[name]), (_AND, 0, 0, _MAY_WRITE), (_EQUAL, 0, 1, 0)]
            notify = [*flags, (_RETURN, 0, 0, _ALLOW), *notify]
        program += [(_EQUAL, 0, len(notify), number), *notify]
    program.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _listen() -> int:
    """Install the filter in this thread and all that it starts. Return its listener."""
    code = _filter()
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
    assert _libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0, os.strerror(ctypes.get_errno())
    listener = _libc.syscall(_MACHINE[1], _SET_FILTER, _NEW_LISTENER, program)
    assert listener >= 0, os.strerror(ctypes.get_errno())
    return int(listener)


def _serve(listener: int, decide: Decide, is_over: Callable[[], bool]) -> None:
    """Serve system calls until it is over or all processes with the filter have ended."""
    table, waiting = _table(), select.poll()
    waiting.register(listener, select.POLLIN)
    while not is_over():
        events = waiting.poll(_POLL_MS)
        if any(event & select.POLLHUP for _, event in events):
            return
        if events:
            _answer(listener, table, decide)


def _answer(listener: int, table: dict[int, tuple[str, str]], decide: Decide) -> None:
    notice = bytearray(80)
    try:
        fcntl.ioctl(listener, _RECEIVE, notice)
        number, pid, _, call, _, _, *arguments = struct.unpack("=QIIiIQ6Q", notice)
        name, place = table[call]
        refused = decide(SystemCall(name, pid, _path(pid, place, arguments)))
        fcntl.ioctl(listener, _SEND, struct.pack("=QqiI", number, 0, -refused, 0 if refused else _CONTINUE))
    except OSError as error:
        if error.errno != errno.ENOENT:  # the caller was killed in the meantime
            raise


def _path(pid: int, place: str, arguments: Sequence[int]) -> Path:
    first = int(place[-1])
    try:
        if place[0] == "f":
            return Path(os.readlink(f"/proc/{pid}/fd/{arguments[first]}"))
        descriptor = arguments[first] & 0xFFFFFFFF
        is_cwd = place[0] == "p" or descriptor == _AT_CWD
        base = os.readlink(f"/proc/{pid}/cwd" if is_cwd else f"/proc/{pid}/fd/{descriptor}")
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            memory.seek(arguments[first + (place[0] == "a")])
            return Path(base, os.fsdecode(memory.read(4096).partition(b"\0")[0]))
    except OSError:
        return Path("gone")


def watched(work: Callable[[], None], decide: Decide) -> None:
    """Do the work in a separate thread whose calls `decide` sees, and raise its exception."""
    raised: list[BaseException] = []
    listener: list[int] = []
    ready = threading.Event()

    def run() -> None:
        try:
            listener.append(_listen())
            ready.set()
            work()
        except BaseException as error:
            raised.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait()
    if listener:
        _serve(listener[0], decide, lambda: not thread.is_alive())
        os.close(listener[0])
    thread.join()
    if raised:
        raise raised[0]


@contextmanager
def watched_command(command: Sequence[str], decide: Decide, **options: object) -> Iterator[subprocess.Popen[str]]:
    """Start a command. `decide` sees its calls and those of its descendants until the block ends."""
    receiving_end, sending_end = socket.socketpair()
    with receiving_end, sending_end:
        launcher = [sys.executable, "-m", "tests.system_calls", str(sending_end.fileno()), *command]
        process = subprocess.Popen(launcher, pass_fds=[sending_end.fileno()], text=True, **options)  # type: ignore[call-overload]
        sending_end.close()
        _, (listener,), _, _ = socket.recv_fds(receiving_end, 1, 1)
    over = threading.Event()
    thread = threading.Thread(target=_serve, args=(listener, decide, over.is_set))
    thread.start()
    try:
        yield process
    finally:
        over.set()
        thread.join()
        os.close(listener)  # from here on, such a call fails with ENOSYS


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as test:
        own = _listen()
        socket.send_fds(test, [b"!"], [own])
    os.close(own)
    os.execvp(sys.argv[2], sys.argv[2:])
