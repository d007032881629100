"""The figures of a run that this one repeats: at the first that is another, the repetition is worth nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mrl.errors import AuditFailed
from mrl.observe.metrics import as_written, read_metrics

_OF_THE_CLOCK = ("timing_s/", "perf/", "sync/seconds", "reward/seconds", "agent/environment_s")


def without_clock(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures that do not depend on how fast a machine is."""
    return {name: value for name, value in metrics.items() if not name.startswith(_OF_THE_CLOCK)}


class ReplayedRun:
    """What a run wrote into `metrics.jsonl`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lines = {line["step"]: without_clock(line) for line in read_metrics(directory / "metrics.jsonl")}
        self.num_steps = max(self._lines, default=0)

    def compare(self, step: int, metrics: Mapping[str, float]) -> None:
        """Stop where these figures are not those of the run, to the last bit; steps that it has not done are new."""
        if (expected := self._lines.get(step)) is None:
            return
        found = without_clock(as_written(step, metrics))
        names = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
        if names:
            first = names[0]
            raise AuditFailed(
                f"step {step} of the replay is another than the run's: {len(names)} of {len(expected)} figures differ, "
                f"the first {first}: {found.get(first)} instead of {expected.get(first)}",
                where=str(self.directory),
                fix="the model, the data, the configuration and the machine that the run had; GPUs do not promise it",
            )
