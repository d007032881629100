"""A worker's log: everything that its process says goes to one file of the run, without secrets.

Warnings of other libraries that are known to mean nothing here (`mrl/harmless.py`) are set aside and never lost: they
stand beside the log, and its tail says how many.
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
    """Make a new directory for the logs of one group of workers: a role that is started again gets another."""
    for attempt in itertools.count(1):
        directory = run_directory / "logs" / f"{role}.{attempt}"
        try:
            directory.mkdir(mode=0o700, parents=True)
        except FileExistsError:
            continue
        return directory
    raise AssertionError("counting ended")


def log_path(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.log"


def stack_path(log: Path) -> Path:
    """Return where a rank writes its Python stacks when it is asked for them."""
    return log.with_suffix(".stack")


def harmless_path(log: Path) -> Path:
    """Return where those warnings of a rank go that are known to be harmless."""
    return log.with_suffix(".harmless")


class _RedactingStream(io.TextIOBase):
    """A text stream that blanks out secrets before they reach the file, and sends what is harmless to another."""

    def __init__(self, descriptor: int, for_harmless: int) -> None:
        self._descriptor = descriptor
        self._for_harmless = for_harmless
        self._num_lost = 0

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def write(self, text: str) -> int:
        """Write it. What a full disk does not take is counted, and told of later: no training ends over a log."""
        lost = f"({self._num_lost} bytes could not be written here)\n" if self._num_lost else ""
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
    """Send this process's output, a crash's traceback, and stacks on request, to the log and its neighbor.

    The file descriptors themselves are redirected, so that what C code prints while it dies is kept too.
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
    """Return the last lines of a log, secrets blanked out; empty if there are none.

    Harmless warnings, which C code and processes of libraries write to it directly, are left out and counted.
    """
    kept, num_left_out = _last_lines(path, num_lines)
    aside = harmless_path(path)
    num_aside = len(aside.read_bytes().splitlines()) if aside.is_file() else 0
    note = f"({num_left_out + num_aside} lines of harmless warnings left out, {num_aside} of them are in {aside.name})"
    return "\n".join([*([note] if num_left_out + num_aside else []), *kept])


def last_words(path: Path) -> str:
    """Return the last line of a log that says something; empty where there is none."""
    return next(filter(str.strip, reversed(_last_lines(path, 10)[0])), "")


def _last_lines(path: Path, num_lines: int) -> tuple[list[str], int]:
    """The last lines without harmless warnings and secrets, and the number of lines that are left out among them."""
    if not path.is_file():
        return [], 0
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - num_lines * 800))
        lines = file.read().decode("utf-8", "replace").splitlines()
    kept = without_harmless(lines)
    return redact_text("\n".join(kept[-num_lines:])).splitlines(), len(lines) - len(kept)


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
