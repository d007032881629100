"""Random tests with a time limit: seconds in CI, an hour with MRL_FUZZ_S=3600."""

from __future__ import annotations

import copy
import faulthandler
import itertools
import os
import random
import time
from collections.abc import Iterator
from typing import Any

SECONDS = float(os.environ.get("MRL_FUZZ_S", "4"))
_LEAST = 20
HOSTILE: tuple[Any, ...] = (
    *(None, True, -1, 1.5, 10**30, 1e308, float("nan"), "", "../x", "\0", "\ud800", "<mark>", "x" * 10_000),
    *([], {}, [[]], [None], {"a": 1}, "rank-00009.safetensors"),
)


def rounds(name: str) -> Iterator[random.Random]:
    """Yield random generators by number, equal in each run, until the time is up. The last number shown failed."""
    let_run()
    began = time.monotonic()
    for number in itertools.count():
        if number >= _LEAST and time.monotonic() - began > SECONDS:
            print(f"{name}: {number} rounds")
            return
        yield random.Random(f"{name}/{number}")


def let_run() -> None:
    """Cancel pytest's dump of hanging tests for long runs. It sometimes ends the process of a test that works."""
    if SECONDS > 60:
        faulthandler.cancel_dump_traceback_later()


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Return the bytes with some changed, removed, inserted or repeated."""
    for _ in range(chance.randint(1, 4)):
        at, end = sorted(chance.choices(range(len(data) + 1), k=2))
        match chance.randrange(5):
            case 0:
                data = data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :]
            case 1:
                data = data[:at] + data[min(end, at + 20) :]
            case 2:
                data = data[:at] + data[at : at + 20] + data[at:]
            case 3:
                data = data[:at] + chance.randbytes(chance.randint(1, 9)) + data[at:]
            case _:
                data = data[:at] if chance.random() < 0.2 else data
    return data


def changed(value: Any, chance: random.Random) -> Any:
    """Return a copy of a JSON value with some places replaced or removed."""
    value = copy.deepcopy(value)
    for _ in range(chance.randint(1, 3)):
        path = chance.choice(list(_places(value)))
        new = chance.choice(HOSTILE) if chance.random() < 0.8 else _at(value, chance.choice(list(_places(value))))
        if not path:
            return new
        inner = _at(value, path[:-1])
        if chance.random() < 0.2:
            inner.pop(path[-1])
        else:
            inner[path[-1]] = copy.deepcopy(new)
    return value


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from _places(item, (*path, key))


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value
