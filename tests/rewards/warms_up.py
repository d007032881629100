"""A reward function that loads a slow resource in `warm_up`."""

from __future__ import annotations

import os
import time

from mrl.rewards.sample import Sample

loaded: list[str] = []


def warm_up() -> None:
    if "MRL_BROKEN" in os.environ:
        raise OSError("no library")
    time.sleep(0.6)
    loaded.append("library")


def score(sample: Sample) -> float:
    if not loaded:
        warm_up()
    return float(len(loaded))
