"""A package of tests that takes longer than it may fails the session that asks for it, and is told in all others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.minutes import Minutes


def finished(fails: bool, **seconds: float) -> tuple[Minutes, Any]:
    minutes = Minutes({"algos": 1.0, "the rest": 0.5}, fails)
    for test, duration in seconds.items():
        report: Any = SimpleNamespace(nodeid=test.replace("__", "/") + ".py::test_it[tests/x::y]", duration=duration)
        minutes.pytest_runtest_logreport(report)
    session = SimpleNamespace(exitstatus=pytest.ExitCode.OK)
    minutes.pytest_sessionfinish(session)  # type: ignore[arg-type]
    return minutes, session.exitstatus


@pytest.mark.parametrize(("fails", "status"), [(True, pytest.ExitCode.TESTS_FAILED), (False, pytest.ExitCode.OK)])
def test_a_package_over_its_minutes(fails: bool, status: pytest.ExitCode) -> None:
    minutes, left_with = finished(fails, tests__algos__test_a=59.0, tests__algos__test_b=2.0, tests__test_hub=9.0)
    (said,) = minutes.over()
    assert said.startswith("tests/algos takes 1.0 minutes and may take 1 ")
    assert left_with == status


def test_what_has_no_budget_of_its_own_shares_one() -> None:
    minutes, left_with = finished(True, tests__test_hub=16.0, tests__new__test_a=15.0, tests__algos__test_a=60.0)
    assert [said.split(" takes")[0] for said in minutes.over()] == ["tests/the rest"]
    assert left_with == pytest.ExitCode.TESTS_FAILED
