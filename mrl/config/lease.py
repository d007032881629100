"""Who holds a run directory, where `flock` may hold on one host only: a shared file system need not know it."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_BEAT_S = 3.0
_WATCH_S = 15.0
"""How long a holder on another host is watched that has not said that it ended."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@contextmanager
def lease(path: Path) -> Iterator[str]:
    """Hold a file, which says who does and that he lives; yields the holder on another host, or nothing.

    Called under a lock that holds on this host. Clocks of hosts are not compared: a holder lives whose word changes.
    """
    if holder := _living_elsewhere(path):
        yield holder
        return
    ended = threading.Event()
    _write(path, 0)
    beats = threading.Thread(target=_beat, args=(path, ended), name="lease", daemon=True)
    beats.start()
    try:
        yield ""
    finally:
        ended.set()
        beats.join()
        with suppress(OSError):  # the directory may have become read-only: who comes next waits for a sign of life
            path.unlink(missing_ok=True)


def _living_elsewhere(path: Path) -> str:
    words = _read(path)
    if len(words) != 4 or words[0] == _boot_id():
        return ""
    deadline = time.monotonic() + _WATCH_S
    while time.monotonic() < deadline:
        time.sleep(_BEAT_S / 4)
        now = _read(path)
        if not now:
            return ""  # it has just ended
        if now != words:
            return f"pid {words[2]} on {words[1]}"
    return ""


def _beat(path: Path, ended: threading.Event) -> None:
    number = 0
    while not ended.wait(_BEAT_S):
        number += 1
        if (words := _read(path)) and words[:1] + words[2:3] != [_boot_id(), str(os.getpid())]:
            sys.stderr.write(
                f"{path}: pid {words[2]} on {words[1]} took over this run while this process stood still\n"
            )
            os._exit(1)  # not a step further: two would write the same checkpoints
        try:
            _write(path, number)
        except OSError:  # a full disk; what the run itself writes there says more
            continue


def _write(path: Path, number: int) -> None:
    aside = path.with_suffix(".new")
    aside.write_text(f"{_boot_id()} {os.uname().nodename} {os.getpid()} {number}\n")
    aside.replace(path)  # opened anew by readers, so that no host's cache hides it


def _read(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _boot_id() -> str:
    return _BOOT_ID.read_text().strip()
