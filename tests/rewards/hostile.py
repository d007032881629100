"""Reward functions that fail in every way. `sample.extra_info["do"]` selects the way, `{"ok": x}` scores x."""

from __future__ import annotations

import asyncio
import builtins
import ctypes
import math
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from mrl.rewards.messages import frame, to_json
from mrl.rewards.sample import Sample


class Unpicklable(Exception):
    def __init__(self, first: str, second: object) -> None:
        super().__init__(f"{first}: {second!r}")
        self.lock = threading.Lock()

    def __reduce__(self) -> Any:
        raise TypeError("not to be sent anywhere")


class Unprintable(Exception):
    def __str__(self) -> str:
        raise SystemExit(7)


def score(sample: Sample) -> Any:
    """Do the action of the sample."""
    return ACTIONS[sample.extra_info["do"]](sample)


def count(sample: Sample) -> float:
    """Return the number in the sample."""
    return float(sample.extra_info["ok"])


def spoil(sample: Sample) -> float:
    """Changes what it was given."""
    sample.extra_info.clear()
    sample.extra_info["ok"] = -1
    object.__setattr__(sample, "response", "spoilt")
    return 0.0


def raising(error: BaseException) -> Any:
    raise error


def fail_once(sample: Sample) -> float:
    """Crash in the first attempt only, which a file records."""
    if os.path.exists(sample.extra_info["file"]):
        return 1.0
    open(sample.extra_info["file"], "w").close()
    os._exit(1)


def endless(sample: Sample) -> float:
    while True:
        pass


def leave_child(sample: Sample) -> float:
    if os.fork() == 0:
        note_and_sleep(sample)
    return 1.0


def leave_daemon(sample: Sample) -> float:
    """Start a grandchild in its own session whose parent has ended."""
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            note_and_sleep(sample)
        os._exit(0)
    os.waitpid(child, 0)
    return 1.0


def leave_daemon_and_hang(sample: Sample) -> float:
    leave_daemon(sample)
    return endless(sample)


def leave_program(sample: Sample) -> float:
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    return 1.0


def note_and_sleep(sample: Sample) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(1000)


def fork_and_come_back(sample: Sample) -> float:
    os.fork()
    return 1.0


def fork_many(sample: Sample) -> float:
    for _ in range(6):
        os.fork()
    return endless(sample)


def flood(sample: Sample) -> float:
    for _ in range(200):
        print("x" * 100_000)
        print("y" * 100_000, file=sys.stderr)
    os.write(1, b"z" * 1_000_000)
    return 1.0


def fill_memory(sample: Sample) -> float:
    hoard = []
    while True:
        hoard.append(bytes(16 << 20))


def meddle(sample: Sample) -> float:
    os.chdir("/")
    random.seed(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.alarm(1)
    os.environ["PATH"] = ""
    return 1.0


def write_to_every_descriptor(sample: Sample, data: bytes = b"\xff" * 100) -> float:
    for name in os.listdir("/proc/self/fd"):
        try:
            os.write(int(name), data)
        except OSError:
            continue
    return 1.0


def answer_for_another(sample: Sample) -> float:
    score = {"scores": [{"value": 9.0, "parts": {}}], "seconds": 0.0}
    return write_to_every_descriptor(sample, frame(1_000_000, to_json(score)))


def close_everything(sample: Sample) -> float:
    os.closerange(0, 100)
    return endless(sample)


async def later() -> float:
    await asyncio.sleep(0)
    return 1.0


def score_group(samples: list[Sample]) -> Any:
    """Return each sample's rank by number in its group, or do the action of the first sample."""
    do = samples[0].extra_info["do"]
    if do != "ok":
        return {
            "too few": [1.0] * (len(samples) - 1),
            "one is nan": [math.nan] + [1.0] * (len(samples) - 1),
            "numbers by name": [{"score": 1.0, "size": len(samples)}] * len(samples),
        }.get(do) or ACTIONS[do](samples[0])
    numbers = [sample.extra_info["ok"] for sample in samples]
    return [float(sorted(numbers).index(number)) for number in numbers]


async def score_later(sample: Sample) -> float:
    return await later()


async def score_group_later(samples: list[Sample]) -> list[float]:
    """Return all results at once."""
    return await asyncio.gather(*(later() for _ in samples))


def spoil_group(samples: list[Sample]) -> list[float]:
    """Changes what it was given."""
    for sample in samples:
        sample.extra_info["ok"] = -1
    return [0.0] * len(samples)


ACTIONS: dict[str, Any] = {
    "ok": count,
    "where": lambda sample: {"score": float(os.getcwd() != "/"), "pid": os.getpid()},
    "environment": lambda sample: float("MRL_TEST_TOKEN" in os.environ) + 2 * float("MRL_TEST_GIVEN" in os.environ),
    "fail once": fail_once,
    "sleep": lambda sample: time.sleep(sample.extra_info["s"]) or 1.0,
    "endless": endless,
    "sleep forever": lambda sample: time.sleep(1e6),
    "catastrophic regex": lambda sample: re.match(r"(a+)+$", "a" * 40 + "b"),
    "os._exit 3": lambda sample: os._exit(3),
    "segfault": lambda sample: ctypes.string_at(0),
    "kill yourself": lambda sample: os.kill(os.getpid(), signal.SIGKILL),
    "stop yourself": lambda sample: os.kill(os.getpid(), signal.SIGSTOP),
    "SystemExit": lambda sample: sys.exit("enough"),
    "KeyboardInterrupt": lambda sample: raising(KeyboardInterrupt()),
    "ValueError": lambda sample: raising(ValueError("no answer in row 7")),
    "unpicklable": lambda sample: raising(Unpicklable("lock", threading.Lock)),
    "unprintable": lambda sample: raising(Unprintable()),
    "recursion": lambda sample: score(sample),
    "None": lambda sample: None,
    "nan": lambda sample: math.nan,
    "coroutine": lambda sample: later(),
    "dict of a coroutine": lambda sample: {"score": later()},
    "generator": lambda sample: (number for number in [1.0]),
    "child": leave_child,
    "daemon": leave_daemon,
    "daemon and hang": leave_daemon_and_hang,
    "program": leave_program,
    "fork and come back": fork_and_come_back,
    "fork many": fork_many,
    "flood": flood,
    "memory": fill_memory,
    "meddle": meddle,
    "write to every descriptor": write_to_every_descriptor,
    "answer for another": answer_for_another,
    "close everything": close_everything,
    "replace builtins": lambda sample: vars(builtins).clear(),
}
