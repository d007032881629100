"""Clocks of other hosts, and the processes of a trace."""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from mrl.controller import RunContext
from mrl.controller.traced import ClockOffset, clock_offset
from mrl.observe.trace import read_rows
from mrl.spans import clock_of_host, read_spans
from tests.conftest import MakeGroup


def test_the_quickest_answer_says_how_far_a_clock_is_off() -> None:
    ahead_ns, delays = 7_000_000_000, itertools.cycle([0.02, 0.0, 0.03])

    def ask() -> tuple[str, int]:
        time.sleep(next(delays))
        return "another host", time.monotonic_ns() + ahead_ns

    offset = clock_offset(ask)
    assert offset is not None
    assert abs(offset.offset_ns + ahead_ns) <= offset.uncertainty_ns < 5_000_000


def test_processes_of_one_kernel_share_its_clock() -> None:
    assert clock_offset(lambda: (clock_of_host()[0], 0)) == ClockOffset(0, 0)
    assert clock_offset(lambda: None) is None


@pytest.mark.slow
def test_a_group_is_traced_and_a_rank_without_answers_is_named(
    doomed_workers: MakeGroup, run_context: RunContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced, rank_workers = run_context.traced, doomed_workers()
    before = (tmp_path / "before", tmp_path / "second")
    for directory in before:
        directory.mkdir()
    traced.begin(before[0])
    submit = rank_workers.submit

    def submit_slowly(*args: Any) -> Any:
        """The workers begin before the driver has submitted the whole call."""
        future = submit(*args)
        time.sleep(0.3)
        return future

    monkeypatch.setattr(rank_workers, "submit", submit_slowly)
    rank_workers.greet("you")
    driver, *ranks = [process for process in traced.end(os.getpid()) if process.role in ("driver", rank_workers.role)]
    assert [(process.name, process.problem) for process in ranks] == [
        (f"{rank_workers.role} rank {rank}", "") for rank in range(4)
    ]
    for process in ranks:
        assert process.clock == ClockOffset(0, 0)
        (greeting,) = [span for span in read_spans(process.path)[""] if span.name == "greet"]
        (call,) = [span for span in read_spans(driver.path)[""] if span.name == f"{rank_workers.role}.greet"]
        assert call.begin <= greeting.begin <= (greeting.end or 0) <= (call.end or 0), "on one clock"
    os.kill(ranks[2].pid, signal.SIGSTOP)  # its process ends before it can answer
    traced.begin(before[1])
    rank_workers.shutdown()
    ended = [process for process in traced.end(os.getpid()) if process.role == rank_workers.role]
    rows = read_rows(ended)
    assert [row.name for row in rows] == [process.name for process in ranks], "processes without spans have rows"
    assert {row.problem for row in rows} == {"its process has ended: shut down"}
