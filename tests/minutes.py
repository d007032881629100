"""Time limits for the tests of each package. `make test` fails if a package takes longer."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import PurePosixPath

import pytest

BUDGETS = {
    "agents": 4.0,
    "algos": 3.0,
    "cli": 3.0,
    "config": 3.0,
    "controller": 11.0,
    "data": 3.0,
    "docs": 3.0,
    "engine": 12.0,
    "fsdp": 4.0,
    "hosts": 1.0,
    "launch": 2.0,
    "plan": 2.0,
    "reference": 4.0,
    "rehearse": 5.0,
    "rewards": 6.0,
    "rollout": 6.0,
    "trainer": 2.0,
    "verify": 4.0,
    "weight_sync": 2.0,
    "the rest": 8.0,
}
"""Minutes of tests, two at a time on two cores: three times the time measured when this was written. If all tests
together take longer than that measurement, the machine is slower or busy, and each package may take longer by the same
factor. Packages below 0.35 minutes share `the rest`."""
MARGIN = 3


@dataclass(eq=False)  # pytest keeps its plugins in sets
class Minutes:
    """Adds up the times of a session's tests over all processes that run them."""

    budgets: dict[str, float]
    fails: bool
    """Whether a package over its budget fails the session. Otherwise it is only reported."""
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        package = "".join(PurePosixPath(report.nodeid.partition("::")[0]).parts[1:2])
        self.seconds[package if package in self.budgets else "the rest"] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.fails and self.over() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.fails:
            taken = ", ".join(f"{name} {self.seconds[name] / 60:.1f}" for name in sorted(self.seconds))
            terminalreporter.write_line(f"minutes by package: {taken}")
        for line in self.over():
            terminalreporter.write_line(line, red=True)

    def over(self) -> list[str]:
        """Return a line for each package over its budget."""
        slowness = max(1.0, sum(self.seconds.values()) / 60 / (sum(self.budgets.values()) / MARGIN))
        return [
            f"tests/{name} takes {seconds / 60:.1f} minutes and may take {slowness * self.budgets[name]:.2g} "
            "(tests/minutes.py): make its slowest tests faster (--durations=20), or mark them slow"
            for name, seconds in sorted(self.seconds.items())
            if seconds > 60 * slowness * self.budgets[name]
        ]


def of_this_session() -> Minutes:
    return Minutes(BUDGETS, fails=os.environ.get("MRL_TEST_BUDGETS") == "1")
