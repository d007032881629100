"""The run directory: readable only by its owner, used by one process at a time, and holding the configuration.

`flock` may work only within one host, because a shared file system need not support it. The process that holds the
directory therefore also writes a lease file.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from mrl import files
from mrl.config.resolved.load import MODELS_FILE, VERBS, Resolved, config_kind
from mrl.config.resolved.render import render
from mrl.config.schema import RunConfig
from mrl.errors import ConfigError, Problem

CHECKPOINTS, EVENTS = "checkpoints", "events.jsonl"
_STEP = "step-"
_DIGITS = re.compile(f"^{_STEP}([0-9]{{6,18}})$")
_ASIDE, _LEASE = "attempt-", ".lease"


def checkpoint_of(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"{_STEP}{step:06d}"


def steps_in(checkpoints: Path) -> list[int]:
    """Return the steps that have a checkpoint, complete or damaged, newest last."""
    names = [path.name for path in checkpoints.glob(f"{_STEP}*")]
    numbers = [(int(digits[0]), name) for name in names if (digits := _DIGITS.findall(name))]
    return sorted(step for step, name in numbers if checkpoint_of(checkpoints, step).name == name)


@contextmanager
def open_run_directory(
    resolved: Resolved[Any], *, may_go_on: bool, warn: Callable[[str], None] = lambda message: None
) -> Iterator[Path]:
    """Hold `run.dir/run.name` for the length of a run: a new directory, or one whose checkpoints the run continues
    from.

    If another configuration ran there and left no checkpoint, move its files aside.
    """
    run: RunConfig = resolved.config.run
    directory = Path(run.dir, run.name)
    with _making(directory):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        holder = _hold(lock, directory)
        with ExitStack() as stack:
            if not holder:
                with _making(directory):
                    holder = stack.enter_context(lease(directory / _LEASE))
            if holder:
                what, fix = (
                    f"{holder} is running this run",
                    "wait for it, or choose another run.name or run.dir",
                )
                raise _refused(directory, "run.name", what, fix)
            _prepare(resolved, directory, may_go_on, warn)
            yield directory
    finally:
        os.close(lock)


def _refused(directory: Path | str, key: str, what: str, fix: str = "") -> ConfigError:
    return ConfigError([Problem(str(directory), key, what, fix)])


@contextmanager
def _making(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = f"cannot create the run directory: {error.strerror}"
        raise _refused(error.filename or directory, "run.dir", what) from error


def _hold(lock: int, directory: Path) -> str:
    """Lock the directory. Return the process on this host that already holds it, or an empty string."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "another process"
    except OSError as error:
        what, fix = f"cannot lock the directory: {error.strerror}", "use a run.dir on a file system that supports flock"
        raise _refused(directory, "run.dir", what, fix) from error
    return ""


def _prepare(resolved: Resolved[Any], directory: Path, may_go_on: bool, warn: Callable[[str], None]) -> None:
    config = directory / "config.yaml"
    # A run that began here and ended before its first checkpoint may start again.
    began_here = config.is_file() and files.read_text(config) == render(resolved)
    continues = may_go_on and (bool(steps_in(directory / CHECKPOINTS)) or began_here)
    existing = [path for path in directory.iterdir() if not path.name.startswith((".lock", _LEASE, _ASIDE))]
    if existing and not continues and not (may_go_on and config.is_file()):
        fix = "choose another run.name or run.dir, or move that directory away"
        what = "this directory is not empty, and has no checkpoint to continue from"
        raise _refused(directory, "run.name", what, fix)
    if continues:
        _check_kind(resolved, directory)
    with _making(directory):
        if existing and not continues:
            what = "an earlier attempt with another configuration left no checkpoint"
            warn(f"{what}; `mrl show` prints how it ended, and it is kept in {_set_aside(existing)}")
        directory.chmod(0o700)  # the umask limits mkdir's mode, and the directory may already have existed, empty
        (directory / "logs").mkdir(exist_ok=True)
        (directory / "logs").chmod(0o700)
        files.write_text(config, render(resolved), mode=0o600)
        if resolved.models:
            files.write_text(directory / MODELS_FILE, f"{json.dumps(dict(resolved.models), indent=2)}\n", mode=0o600)


def is_held(directory: Path) -> bool:
    """Return whether a process on this host uses the directory now."""
    try:
        lock = os.open(directory / ".lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def _check_kind(resolved: Resolved[Any], directory: Path) -> None:
    """Refuse to continue a run with another command, such as `mrl sft` from the checkpoints of `mrl train`."""
    began = config_kind(str(directory / "config.yaml"))
    if began is not None and began is not type(resolved.config):
        now = VERBS[type(resolved.config)]
        what = f"a run of `mrl {VERBS[began]}` has checkpoints here, but `mrl {now}` cannot continue from them"
        raise _refused(directory, "run.name", what, "choose another run.name or run.dir")


def _set_aside(paths: Sequence[Path]) -> Path:
    """Move the files of an earlier attempt into a new directory next to them."""
    number = 1 + len(list(paths[0].parent.glob(f"{_ASIDE}*")))
    aside = paths[0].parent / f"{_ASIDE}{number}"
    aside.mkdir(mode=0o700)
    for path in paths:
        path.rename(aside / path.name)
    return aside


# --- the lease: `flock` may work only within one host -----------------------------------------------------------------

_BEAT_S = 3.0
_GONE_BEATS = 2
"""Consecutive heartbeats without the directory before it counts as removed."""
_WATCH_S = 15.0
"""How long to watch for signs of life from a holder on another host that has not reported its end."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@contextmanager
def lease(path: Path) -> Iterator[str]:
    """Hold a lease file that names this process and shows that it lives. Yield the holder on another host, or an empty
    string.

    Call this under a lock that holds on this host. Clocks of hosts are not compared: a holder lives if its file
    changes.
    """
    if holder := _living_elsewhere(path):
        yield holder
        return
    ended = threading.Event()
    _beat_once(path, 0)
    beats = threading.Thread(target=_beat, args=(path, ended), name="lease", daemon=True)
    beats.start()
    try:
        yield ""
    finally:
        ended.set()
        beats.join()
        # the directory may have become read-only: the next process then waits for a sign of life
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _living_elsewhere(path: Path) -> str:
    words = _holder_words(path)
    if len(words) != 4 or words[0] == _boot_id():
        return ""
    deadline = time.monotonic() + _WATCH_S
    while time.monotonic() < deadline:
        time.sleep(_BEAT_S / 4)
        now = _holder_words(path)
        if not now:
            return ""  # the holder has just ended
        if now != words:
            return f"pid {words[2]} on {words[1]}"
    return ""


def _beat(path: Path, ended: threading.Event) -> None:
    number = num_gone = 0
    while not ended.wait(_BEAT_S):
        number += 1
        if (words := _holder_words(path)) and words[:1] + words[2:3] != [_boot_id(), str(os.getpid())]:
            sys.stderr.write(f"{path}: pid {words[2]} on {words[1]} took over this run while this process was paused\n")
            os._exit(1)  # stop at once: two processes would write the same checkpoints
        try:
            _beat_once(path, number)
        except FileNotFoundError:
            num_gone += 1
            if num_gone >= _GONE_BEATS:  # otherwise the run would wait for minutes for files that it keeps there
                what = "the run's directory was removed or renamed, so nothing can be saved"
                sys.stderr.write(f"{path.parent}: {what}; the run ends\n")
                os._exit(1)
        except OSError:  # a full disk; the run's own writes report more
            continue
        else:
            num_gone = 0


def _beat_once(path: Path, number: int) -> None:
    aside = path.with_suffix(".new")
    aside.write_text(f"{_boot_id()} {os.uname().nodename} {os.getpid()} {number}\n")
    aside.replace(path)  # a new file, so that no host reads it from a cache


def _holder_words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _boot_id() -> str:
    return _BOOT_ID.read_text().strip()
