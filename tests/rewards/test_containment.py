"""Any behavior of a reward function only fails its own sample, in time and with a type, and leaves no process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mrl.rewards.manager import RewardManager
from mrl.rewards.outcome import Failure, Score
from tests.rewards import conftest
from tests.rewards import hostile as rewards
from tests.rewards.conftest import Bench, make_sample

LIMIT_S, WORKERS = 0.5, 2
SOURCE = rewards.__file__
RAISING = f"({SOURCE}:{{line}}, raising)"

FAILURES = {
    "endless": ("timeout", "no answer within 0.5 s"),
    "sleep forever": ("timeout", "no answer within 0.5 s"),
    "catastrophic regex": ("timeout", "no answer within 0.5 s"),
    "stop yourself": ("timeout", "no answer within 0.5 s"),
    "daemon and hang": ("timeout", "no answer within 0.5 s"),
    "fork many": ("timeout", "no answer within 0.5 s"),
    "os._exit 3": ("crashed", "its process exited with status 3"),
    "segfault": ("crashed", "its process was ended by signal 11 (Segmentation fault)"),
    "kill yourself": (
        "crashed",
        "its process was ended by signal 9 (Killed; out of memory, or it closed its channel)",
    ),
    "close everything": (
        "crashed",
        "its process was ended by signal 9 (Killed; out of memory, or it closed its channel)",
    ),
    "replace builtins": ("crashed", "its process exited with status 1"),
    "write to every descriptor": (
        "crashed",
        "its process sent an invalid message: a frame of 4294967295 bytes; at most 65536",
    ),
    "answer for another": (
        "crashed",
        "its process sent an invalid message: an answer without a request",
    ),
    "memory": ("memory", "f0: more than 256 MiB"),
    "None": ("bad_result", "f0: the result is None; a `return` may be missing"),
    "generator": ("bad_result", "f0: the result is of type generator, not a number"),
}
RAISED = {
    "SystemExit": "f0: SystemExit: enough",
    "KeyboardInterrupt": "f0: KeyboardInterrupt",
    "ValueError": "f0: ValueError: no answer in row 7",
    "unpicklable": "f0: tests.rewards.hostile.Unpicklable: lock: <built-in function allocate_lock>",
    "unprintable": "f0: tests.rewards.hostile.Unprintable: <exception str() failed>",
    "recursion": "f0: RecursionError: maximum recursion depth exceeded",
}
SCORED = {
    "coroutine": 1.0,
    "child": 1.0,
    "daemon": 1.0,
    "program": 1.0,
    "fork and come back": 1.0,
    "flood": 1.0,
    "meddle": 1.0,
}


def score_among_good_ones(manager: RewardManager, bench: Bench, do: str) -> Score | Failure:
    """Return the outcome of one sample between good ones, which must not be affected. Nothing may be left behind."""
    begin = time.monotonic()
    before, outcome, after = manager.score([make_sample(row_id=1), make_sample(do), make_sample(row_id=3)])
    assert time.monotonic() - begin < LIMIT_S + 10, "a busy machine gives a worker its seconds later"
    assert isinstance(before, Score)
    assert isinstance(after, Score)
    assert (before.value, after.value) == (1.0, 3.0)
    assert len(bench.settle(1 + WORKERS)) == 1 + WORKERS, "the supervisor and its workers, and nothing else"
    return outcome


@pytest.mark.parametrize("do", FAILURES)
def test_failure_is_contained(hostile: tuple[RewardManager, Bench], do: str) -> None:
    outcome = score_among_good_ones(*hostile, do)
    assert isinstance(outcome, Failure)
    assert (outcome.kind, outcome.detail) == FAILURES[do]


@pytest.mark.parametrize("do", RAISED)
def test_exception_is_contained(hostile: tuple[RewardManager, Bench], do: str) -> None:
    outcome = score_among_good_ones(*hostile, do)
    assert isinstance(outcome, Failure)
    assert outcome.kind == "raised"
    assert outcome.detail.startswith(f"{RAISED[do]} ({SOURCE}:")


@pytest.mark.parametrize("do", SCORED)
def test_score_counts_whatever_is_left_behind(hostile: tuple[RewardManager, Bench], do: str) -> None:
    outcome = score_among_good_ones(*hostile, do)
    assert isinstance(outcome, Score)
    assert outcome.value == SCORED[do]


def test_waiting_does_not_count(bench: Bench) -> None:
    manager = bench.manager(num_workers=1, limit_s=0.4)
    outcomes = manager.score([make_sample("sleep", s=0.2) for _ in range(3)])
    assert all(isinstance(outcome, Score) and 0.2 <= outcome.seconds < 0.4 for outcome in outcomes)


def test_what_a_function_changes_does_not_last(bench: Bench) -> None:
    manager = bench.manager(num_workers=1, limit_s=3)
    _, before, _, after = manager.score([make_sample(do) for do in ("ok", "where", "meddle", "where")])
    assert isinstance(before, Score)
    assert isinstance(after, Score)
    assert before.parts == after.parts, "the same process, and back in its directory"
    (later,) = manager.score([make_sample("sleep", s=1.2)])
    assert isinstance(later, Score), "the alarm that was left behind did not go off"


def test_functions_do_not_see_what_others_do_to_a_sample(bench: Bench) -> None:
    manager = bench.manager("tests.rewards.hostile:spoil", "tests.rewards.hostile:count")
    (outcome,) = manager.score([make_sample(row_id=9)])
    assert isinstance(outcome, Score)
    assert outcome.parts == {"f0": 0.0, "f1": 9.0}


def test_workers_have_no_secrets(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MRL_TEST_TOKEN", "canary-5up3r-hidden")
    manager = bench.manager(environment={"MRL_TEST_GIVEN": "yes"})
    (outcome,) = manager.score([make_sample("environment")])
    assert isinstance(outcome, Score)
    assert outcome.value == 2.0
    for pid in bench.processes():
        assert b"canary" not in Path(f"/proc/{pid}/environ").read_bytes()


def test_close_ends_samples_at_work(bench: Bench) -> None:
    manager = bench.manager(limit_s=60)
    for do in ("daemon and hang", "endless", "ok"):
        manager.submit(make_sample(do))
    time.sleep(0.3)
    begin = time.monotonic()
    manager.close()
    assert time.monotonic() - begin < 20, "both would take a minute"
    assert bench.processes() == set()
    manager.close()


def test_close_does_not_wait_for_a_fork_of_the_run(bench: Bench) -> None:
    manager = bench.manager()
    child = os.fork()
    if child == 0:
        time.sleep(60)  # and holds the supervisor's pipe open
        os._exit(0)
    begin = time.monotonic()
    manager.close()
    assert time.monotonic() - begin < 20, "both would take a minute"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


RUN = """
import sys, time
from pathlib import Path
from tests.rewards.conftest import Bench, make_sample
bench = Bench(Path(sys.argv[1]))
bench.marker = sys.argv[2]
manager = bench.manager(limit_s=600)
for do in ("daemon and hang", "endless"):
    manager.submit(make_sample(do))
time.sleep(0.3)
print("working", flush=True)
time.sleep(600)
"""


def test_everything_ends_when_the_run_is_killed(tmp_path: Path) -> None:
    run = subprocess.Popen([sys.executable, "-c", RUN, str(tmp_path), tmp_path.name * 8], stdout=subprocess.PIPE)
    assert run.stdout is not None
    assert run.stdout.readline() == b"working\n"
    assert len(conftest.marked(tmp_path.name * 8)) == 4, "a supervisor, two workers and a daemon"
    run.kill()
    run.wait()
    assert conftest.settle(tmp_path.name * 8, 0, within_s=3) == set()


def test_workers_end_when_the_supervisor_is_killed(bench: Bench) -> None:
    manager = bench.manager(limit_s=600)
    manager.submit(make_sample("endless"))
    time.sleep(0.2)
    os.kill(min(bench.processes()), signal.SIGKILL)
    assert bench.settle(0) == set()
