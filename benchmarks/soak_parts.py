"""The reward and the tracker of a run under `soak.py`, which fail once when a file requests it."""

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


def _is_requested(directory: str, name: str) -> bool:
    """Return whether to fail now. The process that removes the file is the one to fail."""
    try:
        Path(directory, name).unlink()
    except FileNotFoundError:
        return False
    return True


def reward(sample: Sample) -> float:
    """Return a score that depends on the response, unless a failure is requested."""
    directory = os.environ[_FOLDER]
    if _is_requested(directory, "die"):
        os.kill(os.getpid(), signal.SIGKILL)
    if _is_requested(directory, "raise"):
        raise ValueError("requested by the soak")
    if _is_requested(directory, "hang"):
        time.sleep(1000)
    if _is_requested(directory, "crawl"):
        time.sleep(2)
    return crc32(sample.response.encode()) / 2**32


class Tracker:
    """Accepts metrics without keeping them, and raises an error on request."""

    def __init__(self, run: str, directory: Path, config: Mapping[str, Any], step: int) -> None:
        self._faults = str(directory.parent.parent / "faults")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Accept the metrics."""
        if _is_requested(self._faults, "tracker"):
            raise OSError("requested by the soak")

    def close(self) -> None:
        """Do nothing."""
