"""A worker's clock with real processes that run, sleep, stop, compete for cores, and get no core."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mrl.rewards import clock as clocks
from mrl.rewards.clock import WorkerClock
from mrl.rewards.outcome import Failure, Score
from tests.rewards.conftest import Bench, make_sample

BUSY = "while True: pass"
CROWD = "import os\nfor _ in range(4): os.fork()\nwhile True: pass"


@contextmanager
def process(program: str) -> Iterator[int]:
    started = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    try:
        yield started.pid
    finally:
        os.killpg(started.pid, signal.SIGKILL)
        started.wait()


@contextmanager
def no_core_free() -> Iterator[None]:
    """Run eight busy processes per core, each in a session like workers, because Linux may share cores by session."""
    number = 8 * len(os.sched_getaffinity(0))
    busy = [subprocess.Popen([sys.executable, "-c", BUSY], start_new_session=True) for _ in range(number)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def late_after(clock: WorkerClock, limit_s: float, within_s: float) -> float:
    """Return the seconds after which it is late, or `within_s`."""
    while not clock.is_late(limit_s) and clock.seconds < within_s:
        time.sleep(clock.look_in_s(limit_s))
    return clock.seconds


@pytest.mark.parametrize("program", ["import time; time.sleep(100)", "import os; os.kill(os.getpid(), 19)"])
def test_what_sleeps_or_stands_still_is_late_at_the_limit(program: str) -> None:
    with process(program) as pid:
        time.sleep(0.3)
        assert 0.3 <= late_after(WorkerClock(pid), 0.3, 5) < 1.0


def test_what_runs_is_late_once_it_had_its_time() -> None:
    with process(BUSY) as pid:
        clock = WorkerClock(pid)
        begin = clocks._used_s(f"/proc/{pid}")
        late_after(clock, 0.5, 14)
        assert 0.3 <= clocks._used_s(f"/proc/{pid}") - begin < 0.8


def test_what_crowds_itself_gets_no_more() -> None:
    with process(CROWD) as pid:
        time.sleep(0.3)
        assert 0.5 <= late_after(WorkerClock(pid), 0.5, 14) < 5, "its own crowd does not stretch its limit"


def test_a_process_without_a_core_is_not_late() -> None:
    with no_core_free(), process(BUSY) as pid:
        time.sleep(0.3)
        clock = WorkerClock(pid)
        assert late_after(clock, 0.3, 1.5) >= 1.5


@pytest.mark.parametrize(
    ("ran_ns", "waited_s", "state", "late"),
    [
        ((0, 0), 0.0, "S", (True, True)),  # asleep all the time
        ((0, 0), 0.0, "R", (False, False)),  # in one wait, which the kernel has not added yet
        ((5, 9), 0.0, "R", (False, True)),  # it ran in between: no wait is hidden
        ((5, 9), 0.4, "R", (False, False)),  # most of the time it waited
        ((5, 5), 0.4, "S", (False, False)),
    ],
)
def test_two_looks_tell_a_wait_from_a_run(
    ran_ns: tuple[int, int], waited_s: float, state: str, late: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = WorkerClock(os.getpid())
    monkeypatch.setattr(clock, "_waited_s", 0.0)
    monkeypatch.setattr(clock, "_begin", time.monotonic() - 0.5)
    monkeypatch.setattr(WorkerClock, "_family_used", lambda self, limit_s: False)
    monkeypatch.setattr(clocks, "_state", lambda process: state)
    looks = iter(ran_ns)
    monkeypatch.setattr(clocks, "_on_cores", lambda process: (next(looks), waited_s))
    assert (clock.is_late(0.4), clock.is_late(0.4)) == late


def test_cpu_time_of_earlier_samples_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    used_s = [100.0, 100.4, 100.5]
    monkeypatch.setattr(clocks, "_used_s", lambda process: used_s.pop(0))
    monkeypatch.setattr(clocks, "_family", lambda process: [process])
    clock = WorkerClock(os.getpid())
    assert [clock._family_used(0.5) for _ in range(2)] == [False, True]


def test_nobody_gets_more_than_thirty_times_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = WorkerClock(os.getpid())
    monkeypatch.setattr(clocks, "_on_cores", lambda process: (0, 1e9))
    monkeypatch.setattr(WorkerClock, "_family_used", lambda self, limit_s: False)
    monkeypatch.setattr(clock, "_begin", time.monotonic() - 29)
    assert not clock.is_late(1.0)
    monkeypatch.setattr(clock, "_begin", time.monotonic() - 30)
    assert clock.is_late(1.0)


@pytest.mark.slow
def test_a_starved_worker_loses_no_sample(bench: Bench) -> None:
    """Work of 0.2 s on a core takes seconds next to so many processes, and the limit is 0.5 s."""
    manager = bench.manager("tests.rewards.witness:work", num_workers=2, limit_s=0.5)
    with no_core_free():
        *worked, slept = manager.score([*(make_sample(work_s=0.2) for _ in range(4)), make_sample(s=100.0, work_s=0.0)])
    assert all(isinstance(outcome, Score) for outcome in worked), worked
    assert max(outcome.seconds for outcome in worked) > 0.5, "by the clock alone it would be late"
    assert isinstance(slept, Failure)
    assert (slept.kind, slept.seconds < 1.5) == ("timeout", True)
