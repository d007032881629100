"""How a run ended, from the files in its directory; for `mrl report` and `mrl show`."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path

from mrl.config.resolved.run_directory import EVENTS, is_held
from mrl.events import last_ending, read_events

_VERDICTS = {
    "done": "done",
    "stopped": "stopped and saved after step {step}",
    "interrupted": "interrupted after step {step}",
    "failed": "failed after step {step}",
    "lost": "lost a worker or a node after step {step}",
    "killed": "killed after step {step}",
}


def describe_ending(directory: Path) -> str:
    """Return how the run in this directory ended, or that it has not. The first line is a verdict."""
    path = directory / EVENTS
    if not path.is_file():
        return f"unknown: {directory} has no {EVENTS}"
    if ended := last_ending(path):
        verdict = _VERDICTS.get(ended.cause, ended.cause).format(step=ended.step)
        return f"{verdict}: {ended.why.rstrip()}" if ended.why else verdict
    if is_held(directory):
        return "running"
    (last,) = deque(read_events(path), maxlen=1) or (None,)
    if last is None:
        return "unknown: there are no events"
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last.time))
    return f"killed without a message: the last event is {last.event.kind}, at {when}"
