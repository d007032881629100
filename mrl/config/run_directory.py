"""The directory of a run: readable by its owner alone, used by one process at a time, with the configuration in it.

`flock` may hold on one host only, for a shared file system need not know it: who holds the directory says so in a file.
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
from mrl.config.load import MODELS_FILE, VERBS, Resolved, config_kind
from mrl.config.render import render
from mrl.config.schema import RunConfig
from mrl.errors import ConfigError, Problem

CHECKPOINTS, EVENTS = "checkpoints", "events.jsonl"
_STEP = "step-"
_DIGITS = re.compile(f"^{_STEP}([0-9]{{6,18}})$")
_ASIDE, _LEASE = "attempt-", ".lease"


def checkpoint_of(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"{_STEP}{step:06d}"


def steps_in(checkpoints: Path) -> list[int]:
    """Return the steps that have a checkpoint there, whole or damaged, the newest last."""
    names = [path.name for path in checkpoints.glob(f"{_STEP}*")]
    numbers = [(int(digits[0]), name) for name in names if (digits := _DIGITS.findall(name))]
    return sorted(step for step, name in numbers if checkpoint_of(checkpoints, step).name == name)


@contextmanager
def open_run_directory(
    resolved: Resolved[Any], *, may_go_on: bool, warn: Callable[[str], None] = lambda message: None
) -> Iterator[Path]:
    """Hold `run.dir/run.name` for the length of a run: a new one, or one whose checkpoints the run goes on from.

    What an attempt with another configuration left there, and no checkpoint, is set aside.
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
                what, fix = f"{holder} is running this run", "wait for it, or choose another run.name or run.dir"
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
        what = f"the run directory cannot be made: {error.strerror}"
        raise _refused(error.filename or directory, "run.dir", what) from error


def _hold(lock: int, directory: Path) -> str:
    """Lock the directory; return who has it on this host already, or nothing."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "another process"
    except OSError as error:
        what, fix = f"it cannot be locked: {error.strerror}", "a run.dir on a file system that knows flock"
        raise _refused(directory, "run.dir", what, fix) from error
    return ""


def _prepare(resolved: Resolved[Any], directory: Path, may_go_on: bool, warn: Callable[[str], None]) -> None:
    config = directory / "config.yaml"
    # A run that began here and ended before it could save may begin again.
    began_here = config.is_file() and files.read_text(config) == render(resolved)
    goes_on = may_go_on and (bool(steps_in(directory / CHECKPOINTS)) or began_here)
    others = [path for path in directory.iterdir() if not path.name.startswith((".lock", _LEASE, _ASIDE))]
    if others and not goes_on and not (may_go_on and config.is_file()):
        fix = "choose another run.name or run.dir, or move that directory away"
        what = "this directory holds something already, and no checkpoint to go on from"
        raise _refused(directory, "run.name", what, fix)
    if goes_on:
        _check_kind(resolved, directory)
    with _making(directory):
        if others and not goes_on:
            what = "an earlier attempt with another configuration left no checkpoint"
            warn(f"{what}; `mrl show` prints how it ended, and it is kept in {_set_aside(others)}")
        directory.chmod(0o700)  # mkdir's mode is cut by the umask, and the directory may have been there, empty
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
    """Refuse to go on by `mrl sft` from what `mrl train` saved, and the like."""
    began = config_kind(str(directory / "config.yaml"))
    if began is not None and began is not type(resolved.config):
        now = VERBS[type(resolved.config)]
        what = f"a run of `mrl {VERBS[began]}` has checkpoints here, and `mrl {now}` cannot go on from them"
        raise _refused(directory, "run.name", what, "choose another run.name or run.dir")


def _set_aside(paths: Sequence[Path]) -> Path:
    """Move what an attempt left into a directory of its own beside it."""
    number = 1 + len(list(paths[0].parent.glob(f"{_ASIDE}*")))
    aside = paths[0].parent / f"{_ASIDE}{number}"
    aside.mkdir(mode=0o700)
    for path in paths:
        path.rename(aside / path.name)
    return aside


# --- who holds it, where `flock` may hold on one host only -----------------------------------------------------------

_BEAT_S = 3.0
_GONE_BEATS = 2
"""In a row that find no directory before it counts as removed."""
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
    _beat_once(path, 0)
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
    words = _holder_words(path)
    if len(words) != 4 or words[0] == _boot_id():
        return ""
    deadline = time.monotonic() + _WATCH_S
    while time.monotonic() < deadline:
        time.sleep(_BEAT_S / 4)
        now = _holder_words(path)
        if not now:
            return ""  # it has just ended
        if now != words:
            return f"pid {words[2]} on {words[1]}"
    return ""


def _beat(path: Path, ended: threading.Event) -> None:
    number = num_gone = 0
    while not ended.wait(_BEAT_S):
        number += 1
        if (words := _holder_words(path)) and words[:1] + words[2:3] != [_boot_id(), str(os.getpid())]:
            sys.stderr.write(
                f"{path}: pid {words[2]} on {words[1]} took over this run while this process stood still\n"
            )
            os._exit(1)  # not a step further: two would write the same checkpoints
        try:
            _beat_once(path, number)
        except FileNotFoundError:
            num_gone += 1
            if num_gone >= _GONE_BEATS:  # the run would wait for minutes for what it keeps there
                what = "the run's directory has been removed or renamed, so that nothing can be saved any more"
                sys.stderr.write(f"{path.parent}: {what}; the run ends\n")
                os._exit(1)
        except OSError:  # a full disk; what the run itself writes there says more
            continue
        else:
            num_gone = 0


def _beat_once(path: Path, number: int) -> None:
    aside = path.with_suffix(".new")
    aside.write_text(f"{_boot_id()} {os.uname().nodename} {os.getpid()} {number}\n")
    aside.replace(path)  # opened anew by readers, so that no host's cache hides it


def _holder_words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _boot_id() -> str:
    return _BOOT_ID.read_text().strip()
