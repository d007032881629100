"""Samples side by side in a worker wait together, and a failure only costs its own sample."""

from __future__ import annotations

import time

import pytest

from mrl.events import Retried
from mrl.rewards.outcome import Failure, Outcome, Score
from tests.rewards.conftest import Bench, make_sample

WAITING = "tests.rewards.waiting:score"


def values(outcomes: list[Outcome]) -> list[float | None]:
    return [outcome.value if isinstance(outcome, Score) else None for outcome in outcomes]


def test_they_wait_together(bench: Bench) -> None:
    manager = bench.manager(WAITING, num_workers=2, concurrency=8, limit_s=5)
    manager.score([make_sample()])
    begin = time.monotonic()
    outcomes = manager.score([make_sample(row_id=row, s=0.5) for row in range(32)])
    assert time.monotonic() - begin < 4, "one after another takes 8 s"
    assert values(outcomes) == list(range(32))


@pytest.mark.parametrize(
    ("do", "kind", "message"),
    [
        ("never", "timeout", "no answer within 1.5 s"),
        ("stubborn", "timeout", "no answer within 1.5 s"),
        ("within", "timeout", "no answer within 1.5 s"),
        ("die", "crashed", "its process exited with status 3"),
    ],
)
def test_who_goes_wrong_fails_alone(bench: Bench, do: str, kind: str, message: str) -> None:
    """Without retries. If the worker is killed, this does not count as an attempt of the other samples."""
    samples = [make_sample(row_id=row, s=0.3) for row in range(12)]
    samples.insert(4, make_sample(do, row_id=99))
    outcomes = bench.manager(WAITING, num_workers=2, concurrency=4, limit_s=1.5).score(samples)
    failed = outcomes.pop(4)
    assert isinstance(failed, Failure)
    assert (failed.kind, failed.detail, failed.attempts) == (kind, message, 1)
    assert values(outcomes) == list(range(12))
    retried = [event for event in bench.events() if isinstance(event, Retried)]
    costs_its_worker = do in ("within", "die")
    assert bool(retried) == costs_its_worker
    workers = {int(outcome.parts["f0/pid"]) for outcome in outcomes if isinstance(outcome, Score)}
    assert costs_its_worker or workers <= bench.processes(), "a waiting function leaves its worker to the others"
    assert all("next to another sample" in event.reason for event in retried)


def test_a_worker_makes_room_for_a_fresh_one_with_nothing_in_hand(bench: Bench) -> None:
    manager = bench.manager(WAITING, num_workers=1, concurrency=8, samples_per_worker=50, limit_s=5)
    outcomes = manager.score([make_sample(row_id=row) for row in range(105)])
    assert values(outcomes) == list(range(105))
    assert len({outcome.parts["f0/pid"] for outcome in outcomes if isinstance(outcome, Score)}) == 3


def test_a_worker_whose_memory_ran_out_makes_room_for_a_fresh_one(bench: Bench) -> None:
    manager = bench.manager(WAITING, num_workers=1, concurrency=2, limit_s=5)
    (failed,) = manager.score([make_sample("hoard")])
    assert isinstance(failed, Failure)
    assert failed.kind == "memory"
    outcomes = [manager.score([make_sample(row_id=row)])[0] for row in range(4)]
    assert values(outcomes) == list(range(4))
    workers = [outcome.parts["f0/pid"] for outcome in outcomes if isinstance(outcome, Score)]
    assert workers[0] != workers[1] == workers[2] == workers[3], "the first took what was promised to it already"


def test_functions_that_do_not_wait_take_turns(bench: Bench) -> None:
    manager = bench.manager("tests.rewards.waiting:score_now", num_workers=1, concurrency=4, limit_s=5)
    assert values(manager.score([make_sample(row_id=row) for row in range(8)])) == list(range(8))
