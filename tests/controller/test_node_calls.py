"""The agent's part of calls, without a cluster: ranks are fakes whose answers come when a test wants them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from enum import StrEnum
from types import SimpleNamespace
from typing import Any

import pytest

from mrl.controller.node_calls import (
    ANSWERED,
    RAISED,
    NodeCalls,
    NodeMessage,
    NodeRank,
    Outcome,
    RanksFailed,
    is_small,
)


class FakeRank:
    """Records the methods that are called on it. Its first returned object is a future of the test."""

    def __init__(self) -> None:
        self.methods: list[str] = []
        self.futures: list[asyncio.Future[Outcome]] = []
        self.call_for_node = SimpleNamespace(options=lambda num_returns: SimpleNamespace(remote=self._call))

    def _call(self, method: str, *_: Any) -> list[Any]:
        self.methods.append(method)
        self.futures.append(asyncio.get_running_loop().create_future())
        return [self.futures[-1], "reference to an answer"]


def run(scenario: Callable[[NodeCalls, list[FakeRank]], Coroutine[Any, Any, None]]) -> None:
    async def go() -> None:
        node, fakes = NodeCalls(), [FakeRank(), FakeRank()]
        await node.adopt("actor", [NodeRank(fake, shard=0, speaks=False) for fake in fakes])
        await asyncio.wait_for(scenario(node, fakes), timeout=5)

    asyncio.run(go())


def message(method: str) -> NodeMessage:
    return NodeMessage(method, [[], {}], None, writes=False)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_ranks_get_calls_in_the_order_of_their_numbers() -> None:
    async def scenario(node: NodeCalls, fakes: list[FakeRank]) -> None:
        later = asyncio.ensure_future(node.call_ranks("actor", 1, message("second")))
        await settle()
        assert fakes[0].methods == [], "the first call has not arrived"
        assert await node.outcomes("actor", 1, 0.0) == [None, None]
        first = asyncio.ensure_future(node.call_ranks("actor", 0, message("first")))
        await settle()
        assert [fake.methods for fake in fakes] == [["first", "second"]] * 2
        for fake in fakes:
            fake.futures[1].set_result([ANSWERED, 7])
        assert await later == [[ANSWERED, 7, None]] * 2, "it does not wait for the first call"
        assert not first.done()
        first.cancel()

    run(scenario)


def test_a_failed_rank_ends_the_call_at_once_and_the_outcomes_are_kept() -> None:
    async def scenario(node: NodeCalls, fakes: list[FakeRank]) -> None:
        call = asyncio.ensure_future(node.call_ranks("actor", 0, message("update")))
        await settle()
        fakes[1].futures[0].set_result([RAISED, "row 7 is bad", 1.0, "traceback"])
        with pytest.raises(RanksFailed):
            await call
        raised = [RAISED, "row 7 is bad", 1.0, "traceback"]
        assert await node.outcomes("actor", 0, 0.01) == [None, raised], "rank 0 is in a collective"
        asyncio.get_running_loop().call_later(0.05, fakes[0].futures[0].set_result, [ANSWERED, None])
        assert await node.outcomes("actor", 0, 4.0) == [[ANSWERED, None, None], raised], "it waits for rank 0"

    run(scenario)


def test_an_agent_keeps_nothing_of_a_call_that_all_ranks_have_answered() -> None:
    async def scenario(node: NodeCalls, fakes: list[FakeRank]) -> None:
        call = asyncio.ensure_future(node.call_ranks("actor", 0, message("update")))
        await settle()
        for fake in fakes:
            fake.futures[0].set_result([ANSWERED, 1])
        await call
        assert node._groups["actor"].calls == {}, "references to columns would keep them in memory"
        assert await node.outcomes("actor", 0, 0.0) == [[ANSWERED, None, None]] * 2

    run(scenario)


class Name(StrEnum):
    """Looks like a string, but needs its class to be read."""

    ACTOR = "actor"


@pytest.mark.parametrize(
    ("value", "small"),
    [
        (None, True),
        ({"loss": 1.5, "parts": [1, (True, b"x")]}, True),
        ("x" * 100_000, False),
        ([0] * 10_000, False),
        ([{"role": Name.ACTOR}], False),
        ({Name.ACTOR: 1}, False),
        (1 + 2j, False),
    ],
    ids=["none", "nested", "long text", "long list", "class in a value", "class in a key", "other type"],
)
def test_agents_read_only_short_values_of_plain_types(value: object, small: bool) -> None:
    assert is_small(value) == small
