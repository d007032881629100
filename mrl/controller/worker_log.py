"""Log of a worker: all output of its process goes to one file in the run directory, without secrets.

Harmless warnings of other libraries (`mrl/harmless.py`) go to a second file next to the log, whose tail reports their
number.
"""

from __future__ import annotations

import faulthandler
import io
import itertools
import os
import signal
import sys
from pathlib import Path

from mrl.harmless import is_harmless, without_harmless
from mrl.redaction import redact_text

STACK_SIGNAL = signal.SIGUSR2


def make_log_directory(run_directory: Path, role: str) -> Path:
    """Create a new directory for the logs of a worker group. A restarted role gets another directory."""
    for attempt in itertools.count(1):
        directory = run_directory / "logs" / f"{role}.{attempt}"
        try:
            directory.mkdir(mode=0o700, parents=True)
        except FileExistsError:
            continue
        return directory
    raise AssertionError("unreachable: the loop does not end")


def log_path(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.log"


def stack_path(log: Path) -> Path:
    """Return the file for the Python stacks of a rank."""
    return log.with_suffix(".stack")


def harmless_path(log: Path) -> Path:
    """Return the file for a rank's harmless warnings."""
    return log.with_suffix(".harmless")


class _RedactingStream(io.TextIOBase):
    """A text stream that removes secrets, and writes harmless warnings to another file."""

    def __init__(self, descriptor: int, for_harmless: int) -> None:
        self._descriptor = descriptor
        self._for_harmless = for_harmless
        self._num_lost = 0

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def write(self, text: str) -> int:
        """Write the text. If the disk is full, count the lost bytes and report them later: a log must not end a run."""
        lost = f"({self._num_lost} bytes of the log are missing: the disk was full)\n" if self._num_lost else ""
        data = (lost + redact_text(text)).encode("utf-8", "backslashreplace")
        descriptor = self._for_harmless if is_harmless(text) else self._descriptor
        try:
            while data:
                data = data[os.write(descriptor, data) :]
            self._num_lost = 0
        except OSError:
            self._num_lost += len(data) - len(lost)
        return len(text)


def redirect_output(log: Path) -> None:
    """Redirect this process's output, crash tracebacks, and requested stacks to the log and the stack file.

    The file descriptors themselves are redirected, so that output of C code during a crash is kept.
    """
    descriptor = _open(log)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    for_harmless = _open(harmless_path(log))
    sys.stdout = _RedactingStream(1, for_harmless)
    sys.stderr = _RedactingStream(2, for_harmless)
    faulthandler.enable(file=2)
    faulthandler.register(STACK_SIGNAL, file=_open(stack_path(log)), all_threads=True)


def tail(path: Path, num_lines: int) -> str:
    """Return the last lines of a log without secrets; empty if there is no log.

    Harmless warnings that C code and child processes write directly to the log are left out and counted.
    """
    lines, num_left_out = _last_lines(path, num_lines)
    aside = harmless_path(path)
    num_aside = len(aside.read_bytes().splitlines()) if aside.is_file() else 0
    note = f"({num_left_out + num_aside} lines of harmless warnings left out, {num_aside} of them are in {aside.name})"
    return "\n".join([*([note] if num_left_out + num_aside else []), *lines])


def last_words(path: Path) -> str:
    """Return the last non-empty line of a log, or an empty text."""
    return next(filter(str.strip, reversed(_last_lines(path, 10)[0])), "")


def _last_lines(path: Path, num_lines: int) -> tuple[list[str], int]:
    """Return the last lines without harmless warnings and secrets, and the number of lines left out."""
    if not path.is_file():
        return [], 0
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - num_lines * 800))
        lines = file.read().decode("utf-8", "replace").splitlines()
    shown = without_harmless(lines)
    return redact_text("\n".join(shown[-num_lines:])).splitlines(), len(lines) - len(shown)


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
