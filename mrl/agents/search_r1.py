"""The environment `search_r1`: `<search>` is answered by what a retriever finds, `<answer>` ends the conversation."""

from __future__ import annotations

from mrl.agents.environment import Done, Environment, Observation, Start, Task, Turn
from mrl.agents.formats import search_r1_documents
from mrl.agents.search import client
from mrl.errors import AgentError


class SearchR1(Environment):
    """Search-R1's, with `format: search_r1`; reward functions score the answer.

    A turn that does neither is told so, and costs a turn. A search in the last turn is not made, and not counted:
    nobody would read what it finds. The parts `searches` and `invalid_turns` count both.
    """

    def __init__(
        self, url: str, topk: int = 3, timeout_s: float = 10.0, attempts: int = 6, backoff_s: float = 0.5
    ) -> None:
        """Search at `url`. What may go better later is tried `attempts` times, after `backoff_s`, twice that and so on.

        All of it has to fit into `agent.limit_s`, or the conversation is tried again by then.
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
                found = search_r1_documents(await self._client.search(query))
                return Observation(results=[found], parts=self._parts)
            case [(_, None, str(problem))]:
                self._parts["invalid_turns"] += 1
                return Observation(results=[problem], parts=self._parts)
        raise AgentError(
            f"{turn.calls!r:.200} is no action of Search-R1", where="search_r1", fix="set its format: search_r1"
        )
