"""Run a program that a model wrote in its own process, watch its resource use, and remove everything afterwards.

The kernel restricts what it can reach (`confinement`, `contained`). This module watches its time, its output, and its
numbers of files and threads. The program cannot start a process, so one signal ends it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import select
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Literal, Self

from mrl.errors import RewardError
from mrl.rewards import contained
from mrl.rewards.confinement import check_confinement, landlock_ruleset, seccomp_filter

_START_S = 10.0
_LOOK_S = 0.02
_MAX_THREADS, _MAX_FILES, _MAX_DESCRIPTORS = 64, 64, 32
_PREFIX = "mrl-program-"
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PACKAGES = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
_READABLE = (
    *(sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), sysconfig.get_config_var("LIBDIR"), *_PACKAGES),
    *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo"),
    "/dev/urandom",
)
# The same hashes in every process, and libraries without extra threads.
_VARIABLES = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "LANG": "C.UTF-8"}
_VARIABLES |= {name: value for name, value in os.environ.items() if name == "LD_LIBRARY_PATH"}
_PYTHON = (sys.executable, "-s", "-S", "-P", "-B", "-X", "utf8", contained.__file__)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one program."""

    test_s: float = 2.0
    """Seconds for each test. Computing, sleeping and waiting count; waiting for a busy processor does not."""
    program_s: float = 8.0
    """Seconds for all tests together. Keep it below reward.limit_s. Tests that do not run count as failed."""
    memory_bytes: int = 1 << 30
    """Address space; never more than reward.memory_bytes."""
    output_bytes: int = 1 << 20
    """Output of one test."""
    file_bytes: int = 16 << 20
    """Size of the files in its directory."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                raise RewardError(f"limits.{name} is {value!r:.60}, but must be a number above 0", where="code")


class ProgramEnded(Exception):
    """A program exceeded a limit; the reason says which one."""

    def __init__(self, reason: Literal["time", "output", "files", "threads"]) -> None:
        super().__init__(reason)
        self.reason = reason


class ContainedProgram:
    """A process that runs a program. Leaving the `with` block ends it and removes its directory."""

    def __init__(
        self, files: Mapping[str, str], stdin: str, tests: range, limits: Limits, *, keeps_errors: bool = False
    ) -> None:
        """Start the process. `tests` are the numbers of the tests in `tests.py` to run. Without tests, the program
        reads `stdin`.

        With `keeps_errors`, standard error is part of the output.
        """
        check_confinement()
        self._limits = limits
        self._output, self._has_closed, self._has_ended = b"", False, False
        self.used_s = 0.0
        """Seconds of the program's time used so far."""
        with contextlib.ExitStack() as stack:
            self._directory = stack.enter_context(_private_directory())
            for name, text in files.items():
                (self._directory / name).write_text(text, encoding="utf-8", errors="replace", newline="")
            self._process = stack.enter_context(
                self._start(stdin, tests, subprocess.STDOUT if keeps_errors else subprocess.DEVNULL)
            )
            stack.callback(self._process.kill)
            self._pidfd = os.pidfd_open(self._process.pid)
            stack.callback(os.close, self._pidfd)
            assert self._process.stdout is not None, "stdout is a pipe"
            self._pipe, self._poll = self._process.stdout.fileno(), select.poll()
            for descriptor in (self._pipe, self._pidfd):
                self._poll.register(descriptor, select.POLLIN)
            if (first_line := self.line(_START_S).decode(errors="replace")) != contained.READY:
                raise RewardError(f"cannot start a contained process: {first_line or 'it exited immediately'}")
            self.used_s = 0.0
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def line(self, limit_s: float) -> bytes:
        """Return the next line of its output, or nothing if it has ended without one."""
        self._read_until(lambda: b"\n" in self._output or self._has_closed, limit_s)
        line, newline, self._output = self._output.partition(b"\n")
        return line if newline else b""

    def rest(self, limit_s: float) -> tuple[int, bytes]:
        """Wait for its end, and return its status and its output."""
        self._read_until(lambda: self._has_closed and self._has_ended, limit_s)
        return self._process.wait(), self._output

    def _start(self, stdin: str, tests: range, errors: int) -> subprocess.Popen[bytes]:
        most = {
            resource.RLIMIT_AS: self._limits.memory_bytes,
            resource.RLIMIT_CPU: int(self._limits.program_s) + 2,
            resource.RLIMIT_FSIZE: self._limits.file_bytes,
            resource.RLIMIT_NOFILE: _MAX_DESCRIPTORS,
            resource.RLIMIT_CORE: 0,
        }
        limits = ",".join(f"{limit}:{value}" for limit, value in most.items())
        with (
            _descriptor(_sealed(stdin)) as stdin_file,
            _descriptor(landlock_ruleset(_READABLE, self._directory)) as ruleset,
        ):
            words = [os.getpid(), ruleset, seccomp_filter().hex(), limits, tests.start, tests.stop, *_PACKAGES]
            return subprocess.Popen(
                [*_PYTHON, *map(str, words)],
                stdin=stdin_file,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=self._directory,
                env=_VARIABLES | {"HOME": str(self._directory), "TMPDIR": str(self._directory)},
                pass_fds=[ruleset],
                start_new_session=True,
            )

    def _read_until(self, is_done: Callable[[], bool], limit_s: float) -> None:
        begin, looked_s = self._use(), time.monotonic()
        try:
            while not is_done():
                for descriptor, _ in self._poll.poll(_LOOK_S * 1000):
                    self._take(descriptor)
                if len(self._output) > self._limits.output_bytes:
                    raise ProgramEnded("output")
                if time.monotonic() - looked_s >= _LOOK_S:
                    looked_s = time.monotonic()
                    self._check(self._use(), begin, limit_s)
        finally:
            self.used_s += _own_s(self._use(), begin)

    def _take(self, descriptor: int) -> None:
        """Read its output, or note that it has closed its output or ended."""
        data = os.read(descriptor, 1 << 16) if descriptor == self._pipe else b""
        self._output += data
        if not data:
            self._poll.unregister(descriptor)
            self._has_closed |= descriptor == self._pipe
            self._has_ended |= descriptor == self._pidfd

    def _check(self, use: tuple[float, float, int], begin: tuple[float, float, int], limit_s: float) -> None:
        if _own_s(use, begin) >= limit_s:
            raise ProgramEnded("time")
        if use[2] > _MAX_THREADS:
            raise ProgramEnded("threads")
        num_files = num_bytes = 0
        with os.scandir(self._directory) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    num_bytes += 512 * entry.stat(follow_symlinks=False).st_blocks
                num_files += 1
                if num_files > _MAX_FILES or num_bytes > self._limits.file_bytes:
                    raise ProgramEnded("files")

    def _use(self) -> tuple[float, float, int]:
        """Return its CPU seconds, the clock time without waiting for a processor, and its number of threads."""
        process, waited_ns = Path("/proc", str(self._process.pid)), 0
        fields = (process / "stat").read_bytes().rpartition(b")")[2].split()
        for task in (process / "task").iterdir():
            # a thread that has just ended, or a kernel without this counter
            with contextlib.suppress(OSError, IndexError):
                waited_ns += int((task / "schedstat").read_bytes().split()[1])
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S, time.monotonic() - waited_ns / 1e9, int(fields[17])


def _own_s(use: tuple[float, float, int], begin: tuple[float, float, int]) -> float:
    """Return the program's own seconds between two checks. Time in which the machine was busy does not count."""
    return max(use[0] - begin[0], use[1] - begin[1])


def _sealed(text: str) -> int:
    """Return a file in memory that no process can change."""
    file = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(file, "w", encoding="utf-8", errors="replace", newline="", closefd=False) as opened:
        opened.write(text)
    os.lseek(file, 0, os.SEEK_SET)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
    return file


@contextlib.contextmanager
def _descriptor(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _private_directory() -> Iterator[Path]:
    """Create a directory, and hold a lock on it while it is used."""
    _remove_stale(tempfile.gettempdir())
    lock = None
    while lock is None:  # another process may remove it as stale before the lock is taken
        directory = Path(tempfile.mkdtemp(prefix=_PREFIX))
        lock = _lock(directory)
    with _descriptor(lock):
        try:
            yield directory
        finally:
            shutil.rmtree(directory)


@cache
def _remove_stale(temporary: str) -> None:
    """Remove the directories of workers that were killed while a program ran. Runs once per process."""
    for path in Path(temporary).glob(f"{_PREFIX}*"):
        if (lock := _lock(path)) is not None:
            with _descriptor(lock):
                shutil.rmtree(path, ignore_errors=True)


def _lock(directory: Path) -> int | None:
    """Return a descriptor that holds the lock of a directory. Return None if it is gone, held, or another user's."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held = os.fstat(descriptor)
        if held.st_uid == os.getuid() and held.st_nlink > 0:
            return descriptor
    os.close(descriptor)
    return None
