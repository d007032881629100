"""A reward function that waits, like a remote one. `sample.extra_info["do"]` selects the kind of wait."""

from __future__ import annotations

import asyncio
import os
import time

from mrl.rewards.sample import Sample


async def score(sample: Sample) -> dict[str, float]:
    await asyncio.sleep(float(sample.extra_info.get("s", 0.0)))
    await ACTIONS[sample.extra_info["do"]]()
    return {"score": float(sample.row_id), "pid": float(os.getpid())}


def score_now(sample: Sample) -> float:
    time.sleep(0.05)
    return float(sample.row_id)


async def at_once() -> None:
    pass


async def never() -> None:
    await asyncio.Event().wait()


async def stubborn() -> None:
    while True:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            continue


async def block() -> None:
    time.sleep(600)


async def within() -> None:
    await asyncio.gather(at_once(), block())


async def die() -> None:
    os._exit(3)


async def hoard() -> None:
    hoarded = []
    while True:
        hoarded.append(bytes(16 << 20))


ACTIONS = {
    "ok": at_once,
    "never": never,
    "stubborn": stubborn,
    "within": within,
    "die": die,
    "hoard": hoard,
}
