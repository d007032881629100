"""The sweep: cases marked `on_demand`, which take hours in total. Each CI run takes a twelfth, chosen by its commit.

`MRL_SWEEP_PART=commit` (or 3/12) keeps one part, and `MRL_SWEEP_MINUTES=3` skips the cases that have not started after
3 minutes. `MRL_SWEEP_RECORD=1` writes the date on which each case last passed to `tests/sweep.json`, which
docs/benchmarks.md shows; a recorded case that fails keeps its record, with the date of the failure. A case without a
record is run and reported, but its failure fails no part.

`MRL_SLOW_HALF=commit` (or 1/2) keeps every second file of the other slow tests, which share their whole runs.
"""

from __future__ import annotations

import json
import math
import subprocess
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "tests" / "sweep.json"
NUM_PARTS = 12


def commit() -> str:
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    return head.stdout.strip()


def chosen_part(choice: str, num_parts: int = NUM_PARTS) -> tuple[int, int]:
    """Return the number of the part, from 0, and the number of parts."""
    if choice == "commit":
        return int(commit(), 16) % num_parts, num_parts
    number, _, total = choice.partition("/")
    return int(number) - 1, int(total)


def part_of(cases: Sequence[str], number: int, num_parts: int) -> list[str]:
    """Return every `num_parts`-th case by name. This spreads the cases of a file, which take similar times."""
    return sorted(cases)[number::num_parts]


class SweepPart:
    """Deselects all cases marked `on_demand` except one part. All other cases run unchanged."""

    def __init__(self, choice: str, minutes: float = math.inf) -> None:
        self.number, self.num_parts = chosen_part(choice)
        self._minutes, self._until = minutes, time.monotonic() + 60 * minutes

    @pytest.hookimpl(trylast=True)  # after `-m`
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        swept = [item.nodeid for item in items if item.get_closest_marker("on_demand")]
        kept = set(part_of(swept, self.number, self.num_parts))
        dropped = [item for item in items if item.nodeid in set(swept) - kept]
        config.hook.pytest_deselected(items=dropped)
        recorded = json.loads(RECORD.read_text(encoding="utf-8"))
        for item in items:
            if item.nodeid in kept and item.nodeid not in recorded:  # fails nothing before it has passed once
                item.add_marker(pytest.mark.xfail(reason="no recorded sweep has passed it", strict=False))
        items[:] = [item for item in items if item.nodeid not in set(swept) - kept]

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if time.monotonic() > self._until:
            pytest.skip(f"the {self._minutes:g} minutes of this part are over")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(f"part {self.number + 1} of {self.num_parts} of the sweep")


class SlowHalf:
    """Deselects every second file of the slow tests that are not in the sweep. All other cases run unchanged."""

    def __init__(self, choice: str) -> None:
        self.number, self.num_parts = chosen_part(choice, 2)

    @pytest.hookimpl(trylast=True)  # after `-m`
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        slow = [item for item in items if item.get_closest_marker("slow") and not item.get_closest_marker("on_demand")]
        files = {item.nodeid.partition("::")[0] for item in slow}
        kept = set(part_of([*files], self.number, self.num_parts))
        dropped = {item.nodeid for item in slow if item.nodeid.partition("::")[0] not in kept}
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in dropped])
        items[:] = [item for item in items if item.nodeid not in dropped]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(f"half {self.number + 1} of the slow tests; the other half is in `make test-slow`")


class SweepRecord:
    """Records when each case last passed, and how long it took."""

    def __init__(self, path: Path = RECORD) -> None:
        self.path = path
        self._seconds: dict[str, float] = defaultdict(float)
        self._failed: set[str] = set()
        self._called: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        if report.when == "call" and report.passed:
            self._called.add(report.nodeid)
        if report.failed:
            self._failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        known = json.loads(self.path.read_text()) if self.path.exists() else {}
        today, tested = time.strftime("%Y-%m-%d"), commit()[:7]
        for case in self._called - self._failed:
            known[case] = {"date": today, "commit": tested, "minutes": round(self._seconds[case] / 60, 1)}
        for case in self._failed & known.keys():  # it stays, so that its part keeps failing until it passes
            known[case]["failed"] = today
        self.path.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
