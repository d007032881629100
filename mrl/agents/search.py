"""Search with Search-R1's protocol, as the tool `search` and as the environment `search_r1`.

A POST of `{"queries": [...], "topk": 3, "return_scores": true}` returns `{"result": [[{"document": {"contents":
...}}]]}`, one list per query. Queries of conversations that wait at the same time share a request. An invalid answer of
the service raises an error, because the conversation did not cause it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

from mrl.agents.environment import Done, Environment, Observation, Start, Task, Turn
from mrl.agents.formats import search_r1_documents
from mrl.errors import AgentError, RewardError
from mrl.rewards.functions.services import Service

_TOGETHER_S = 0.005
_MAX_QUERIES = 256
_CONNECTIONS = 4
_MAX_ANSWER_BYTES = 64 << 20


class SearchClient:
    """One service, shared by all conversations of a process."""

    def __init__(self, url: str, topk: int, timeout_s: float, attempts: int, backoff_s: float) -> None:
        if not url.startswith(("http://", "https://")):
            raise AgentError(f"{url!r} is not an address", where="search", fix="url: http://127.0.0.1:8000/retrieve")
        self._url, self._topk = url, topk
        self._service = Service(url, timeout_s, attempts, backoff_s, None, _MAX_ANSWER_BYTES, uses_proxies=False)
        self._connections = ThreadPoolExecutor(_CONNECTIONS, "search")
        self._waiting: list[tuple[str, asyncio.Future[list[str]]]] = []
        self._num_asked = 0
        self._has_answered = False

    async def expect_answer(self) -> None:
        """Send a test search, unless the service has already answered, so that a service that is down is noticed at
        once."""
        if not self._has_answered:
            await self.search("test")

    async def search(self, query: str) -> list[str]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[str]] = loop.create_future()
        self._waiting.append((query, answer))
        if len(self._waiting) == 1:
            loop.call_later(_TOGETHER_S, self._send)
        return await answer

    def _send(self) -> None:
        """Send the waiting queries. If all connections are busy, queries wait and accumulate until one is free."""
        while self._waiting and self._num_asked < _CONNECTIONS:
            together, self._waiting = self._waiting[:_MAX_QUERIES], self._waiting[_MAX_QUERIES:]
            queries, futures = zip(*together, strict=True)
            posted = asyncio.get_running_loop().run_in_executor(self._connections, self._post, queries)
            self._num_asked += 1
            posted.add_done_callback(partial(self._deliver, futures))

    def _deliver(self, futures: Sequence[asyncio.Future[list[str]]], answer: asyncio.Future[list[list[str]]]) -> None:
        self._num_asked -= 1
        self._send()
        error = answer.exception()
        self._has_answered |= error is None
        for number, future in enumerate(futures):
            if future.done():
                continue  # its conversation was given up
            if error is None:
                future.set_result(answer.result()[number])
            else:
                future.set_exception(AgentError(str(error), where="search"))

    def _post(self, queries: Sequence[str]) -> list[list[str]]:
        answer = self._service.post({"queries": queries, "topk": self._topk, "return_scores": True})
        return [contents[: self._topk] for contents in self._read(answer, len(queries))]

    def _read(self, answer: Any, num_queries: int) -> list[list[str]]:
        result = answer.get("result") if isinstance(answer, dict) else None
        if not isinstance(result, list):
            raise RewardError(f'{self._url} answered without a list in "result": {answer!r:.200}')
        if len(result) != num_queries:
            raise RewardError(f'{self._url} answered {num_queries} queries with {len(result)} lists in "result"')
        return [[self._contents(item) for item in passages] for passages in result]

    def _contents(self, item: Any) -> str:
        document = item.get("document") if isinstance(item, dict) else None
        contents = document.get("contents") if isinstance(document, dict) else None
        if not isinstance(contents, str):
            raise RewardError(f"{self._url} returned a passage without text in document.contents: {item!r:.200}")
        return contents


@cache
def client(url: str, topk: int, timeout_s: float, attempts: int, backoff_s: float) -> SearchClient:
    """Return the client of a service, shared by all callers with the same settings."""
    return SearchClient(url, topk, timeout_s, attempts, backoff_s)


async def search(
    query: str, *, url: str, topk: int = 3, timeout_s: float = 10.0, attempts: int = 6, backoff_s: float = 0.5
) -> str:
    """Search for passages of text.

    Args:
        query: Text to search for.
    """
    passages: Sequence[str] = await client(url, topk, timeout_s, attempts, backoff_s).search(query)
    return search_r1_documents(passages).strip() or "nothing is found"


class SearchR1(Environment):
    """Search-R1's environment, for `format: search_r1`. Reward functions score the answer.

    A turn without a search or an answer gets an error message, and counts as a turn. A search in the last turn is not
    executed or counted, because its result would never be read. The parts `searches` and `invalid_turns` count both.
    """

    def __init__(
        self, url: str, topk: int = 3, timeout_s: float = 10.0, attempts: int = 6, backoff_s: float = 0.5
    ) -> None:
        """Search at `url`. Temporary failures are retried, up to `attempts` times in total, after `backoff_s`, then
        twice that, and so on.

        All attempts must fit into `agent.limit_s`; otherwise the conversation is retried.
        """
        self._client = client(url, topk, timeout_s, attempts, backoff_s)
        self._parts = {"searches": 0.0, "invalid_turns": 0.0}

    async def reset(self, task: Task) -> Start:
        await self._client.expect_answer()
        return Start(messages=task.messages)

    async def step(self, turn: Turn) -> Observation | Done:
        match [(call.name, call.arguments, call.problem) for call in turn.calls]:
            case [("answer", {"answer": str()}, _)]:
                return Done(parts=self._parts)
            case [("search", {"query": str()}, _)] if not turn.left_turns:
                return Observation(results=["no turn is left"], parts=self._parts)
            case [("search", {"query": str(query)}, _)]:
                self._parts["searches"] += 1
                documents = search_r1_documents(await self._client.search(query))
                return Observation(results=[documents], parts=self._parts)
            case [(_, None, str(problem))]:
                self._parts["invalid_turns"] += 1
                return Observation(results=[problem], parts=self._parts)
        raise AgentError(
            f"{turn.calls!r:.200} is not an action of Search-R1", where="search_r1", fix="set format: search_r1"
        )
