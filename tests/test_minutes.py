"""A package of tests over its budget fails the session if that is enabled, and is only reported otherwise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
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
    minutes, exit_status = finished(fails, tests__algos__test_a=59.0, tests__algos__test_b=2.0, tests__test_hub=9.0)
    (line,) = minutes.over()
    assert line.startswith("tests/algos takes 1.0 minutes and may take 1 ")
    assert exit_status == status


def test_what_has_no_budget_of_its_own_shares_one() -> None:
    minutes, exit_status = finished(True, tests__test_hub=16.0, tests__new__test_a=15.0, tests__algos__test_a=60.0)
    assert [line.split(" takes")[0] for line in minutes.over()] == ["tests/the rest"]
    assert exit_status == pytest.ExitCode.TESTS_FAILED


@pytest.mark.parametrize("besides", [(), ("-n", "2")])
@pytest.mark.parametrize(("budget", "status"), [(0.0, pytest.ExitCode.TESTS_FAILED), (1.0, pytest.ExitCode.OK)])
def test_a_session_over_packages_that_have_conftests_of_their_own(
    tmp_path: Path, budget: float, status: pytest.ExitCode, besides: tuple[str, ...]
) -> None:
    register = f'config.pluginmanager.register(Minutes({{"b": {budget}, "the rest": 1.0}}, fails=True))'
    (tmp_path / "conftest.py").write_text(
        f"from tests.minutes import Minutes\n\n\ndef pytest_configure(config):\n    {register}\n"
    )
    for package in ("a", "b"):
        directory = tmp_path / "tests" / package
        directory.mkdir(parents=True)
        (directory / "conftest.py").touch()
        (directory / f"test_{package}.py").write_text("def test_it():\n    pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", str(tmp_path), *besides, "tests"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={"PATH": "", "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert "2 passed" in done.stdout
    assert ("tests/b takes" in done.stdout) == (budget == 0)
