"""What a run under `soak.py` has of its own: a reward and a tracker that fail once where a file tells them to."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

from mrl.rewards.sample import Sample

_FOLDER = "SOAK_FAULTS"


def _told(directory: str, what: str) -> bool:
    """Return whether to fail like this now: whoever takes the file away is the one who does."""
    try:
        Path(directory, what).unlink()
    except FileNotFoundError:
        return False
    return True


def reward(sample: Sample) -> float:
    """Return another score for another response, if nobody told it to fail."""
    directory = os.environ[_FOLDER]
    if _told(directory, "die"):
        os.kill(os.getpid(), signal.SIGKILL)
    if _told(directory, "raise"):
        raise ValueError("told to")
    if _told(directory, "hang"):
        time.sleep(1000)
    if _told(directory, "crawl"):
        time.sleep(2)
    return crc32(sample.response.encode()) / 2**32


class Tracker:
    """Takes nothing, and raises where it is told to."""

    def __init__(self, run: str, directory: Path, config: Mapping[str, Any], step: int) -> None:
        self._faults = str(directory.parent.parent / "faults")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take nothing."""
        if _told(self._faults, "tracker"):
            raise OSError("told to")

    def close(self) -> None:
        """Nothing is left."""
