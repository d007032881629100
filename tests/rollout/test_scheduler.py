"""Division of the work, and reactions to deaths: bookkeeping without processes."""

from __future__ import annotations

import numpy as np
import pytest

from mrl.errors import RolloutError
from mrl.rollout.requests import Generated, GenerationRequest
from mrl.rollout.scheduler import MAX_DEATHS, RequestScheduler


def request(key: str, max_tokens: int = 10) -> GenerationRequest:
    return GenerationRequest(key, key.partition("/")[0], np.ones(3, np.int32), 0, max_tokens)


def keys(taken: list[GenerationRequest]) -> list[str]:
    return [each.key for each in taken]


def finished(*names: str) -> list[Generated]:
    return [Generated(name, np.ones(1, np.int32), np.zeros(1, np.float32), "stop", 1) for name in names]


def test_work_is_shared_by_tokens_not_by_requests() -> None:
    work = RequestScheduler([request("a", 60), *(request(f"{name}", 10) for name in "bcdefg")], 2)
    assert keys(work.assign(0, 2)) == ["a"]
    assert keys(work.assign(1, 2)) == list("bcdefg")
    assert work.num_left == 7


def test_whoever_is_done_first_takes_of_what_is_left() -> None:
    work = RequestScheduler([request(name) for name in "abcdef"], 2, max_in_flight=2)
    assert keys(work.assign(0, 2)) == ["a", "b"]
    assert keys(work.assign(1, 2)) == ["c", "d"]
    work.finish(1, finished("d"))
    assert keys(work.assign(1, 2)) == ["e"]
    work.finish(1, finished("c", "e"))
    assert keys(work.assign(1, 2)) == ["f"]


def test_what_a_dead_replica_had_comes_first() -> None:
    work = RequestScheduler([request(name) for name in "abcdef"], 3)
    assert keys(work.assign(0, 3)) == ["a", "b"]
    assert keys(work.assign(1, 3)) == ["c", "d"]
    work.finish(0, finished("b"))
    assert work.requeue(0, "killed", has_served=True) == 1
    assert keys(work.assign(2, 1)) == ["a", "e", "f"]
    assert work.num_left == 5


def test_a_prompt_alone_on_two_dead_replicas_is_named() -> None:
    work = RequestScheduler([request("bad/0"), request("bad/1")], 2)
    work.assign(0, 1)
    work.requeue(0, "killed", has_served=True)
    work.assign(1, 1)
    with pytest.raises(RolloutError, match=r"prompt bad: 2 replicas died while .* the last error: killed again"):
        work.requeue(1, "killed again", has_served=True)


def test_suspects_travel_alone_until_one_is_found() -> None:
    work = RequestScheduler([request(f"{prompt}/{sample}") for prompt in ("a", "bad", "c") for sample in (0, 1)], 1)
    for reason in ("first", "second"):
        assert len(work.assign(0, 1)) == 6
        work.requeue(0, reason, has_served=True)
    assert keys(work.assign(0, 1)) == ["a/0", "a/1"]
    assert keys(work.assign(0, 1)) == []
    work.finish(0, finished("a/0", "a/1"))
    assert keys(work.assign(0, 1)) == ["bad/0", "bad/1"]
    with pytest.raises(RolloutError, match=r"prompt bad: .*3 replicas died"):
        work.requeue(0, "third", has_served=True)


def test_deaths_that_do_not_end_stop_the_run() -> None:
    work = RequestScheduler([request(f"{number}") for number in range(9)], 1 + MAX_DEATHS, max_in_flight=1)
    taken = [keys(work.assign(replica, 1)) for replica in range(1 + MAX_DEATHS)]
    assert taken == [["0"], ["1"], ["2"], ["3"]]  # every time another prompt is in flight
    for replica in range(MAX_DEATHS):
        work.requeue(replica, "broken", has_served=replica > 0)
    with pytest.raises(RolloutError, match=f"{MAX_DEATHS + 1} replicas died during one rollout. The last error: x$"):
        work.requeue(MAX_DEATHS, "x\nits log", has_served=False)


def test_a_prompt_that_kills_every_engine_at_its_first_token_is_found_all_the_same() -> None:
    work = RequestScheduler([request(f"{prompt}/{sample}") for prompt in ("bad", "a", "b") for sample in (0, 1)], 1)
    for _ in range(2):  # all travel together, and none of them is ever finished
        work.assign(0, 1)
        work.requeue(0, "killed", has_served=False)
    assert keys(work.assign(0, 1)) == ["bad/0", "bad/1"]  # alone
    work.requeue(0, "killed", has_served=False)
    assert keys(work.assign(0, 1)) == ["a/0", "a/1"]  # the others first: they show whether it can serve
    work.finish(0, finished("a/0", "a/1"))
    assert keys(work.assign(0, 1)) == ["b/0", "b/1"]
    work.finish(0, finished("b/0", "b/1"))
    assert keys(work.assign(0, 1)) == ["bad/0", "bad/1"]
    with pytest.raises(RolloutError, match=r"prompt bad: 4 replicas died while"):
        work.requeue(0, "killed", has_served=True)


def test_a_wrong_answer_is_forgiven_and_two_in_a_row_are_not() -> None:
    work = RequestScheduler([request("a")], 1)
    for forgives in (True, True, False):
        work.assign(0, 1)
        work.reject(0, "token -1")
        if forgives:
            work.forgive()
    work.assign(0, 1)
    with pytest.raises(RolloutError, match=r"2 impossible answers; .* replica 0: token -2"):
        work.reject(0, "token -2")
