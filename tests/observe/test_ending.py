"""How a run ended, according to its directory alone."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from mrl.cli.main import main
from mrl.events import EventLog, PhaseBegin, RunEnded, RunStarted
from mrl.observe.ending import describe_ending
from tests.apart import ROOT


def write(directory: Path, *events: RunStarted | RunEnded | PhaseBegin) -> None:
    log = EventLog(directory / "events.jsonl")
    for event in events:
        log.write(event)
    log.close()


@pytest.mark.parametrize(
    ("ended", "described"),
    [
        (RunEnded("done", "", 3), "done"),
        (RunEnded("stopped", "SIGTERM", 2), "stopped and saved after step 2: SIGTERM"),
        (RunEnded("failed", "disk full\n  fix: free space\n", 1), "failed after step 1: disk full\n  fix: free space"),
        (None, "killed without a message: the last event is phase_begin, at "),
    ],
)
def test_the_ending_is_that_of_the_last_attempt(ended: RunEnded | None, described: str, tmp_path: Path) -> None:
    write(tmp_path, RunStarted("run", "1"), RunEnded("lost", "an earlier attempt", 1))
    write(tmp_path, RunStarted("run", "1"), PhaseBegin("start", 1), *([ended] if ended else []))
    assert describe_ending(tmp_path).startswith(described)


def test_a_run_whose_directory_is_held_is_running(tmp_path: Path) -> None:
    write(tmp_path, RunStarted("run", "1"))
    lock = os.open(tmp_path / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert describe_ending(tmp_path) == "running"
    os.close(lock)
    assert describe_ending(tmp_path).startswith("killed without a message")


def test_report_and_show_print_how_a_run_failed_before_its_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, RunStarted("run", "1"), RunEnded("failed", "no model there\n  fix: model.path=...", 0))
    (tmp_path / "config.yaml").write_text((ROOT / "configs" / "laptop-ppo.yaml").read_text())
    assert main(["show", str(tmp_path)]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert (first, second) == (f"# run {tmp_path}: failed after step 0: no model there", "#   fix: model.path=...")
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path}: failed after step 0: no model there\n  fix: ")
    assert "How it ended: failed after step 0: no model there." in (tmp_path / "report.html").read_text()
