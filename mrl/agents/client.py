"""The run's side of the environments: requests to their processes, and the answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

from mrl.agents.environment import Answer, Task, Turn, from_json, to_json
from mrl.agents.worker import MAX_ANSWER_BYTES
from mrl.config.agent import AgentConfig
from mrl.errors import AgentError
from mrl.events import Event, Warned
from mrl.rewards.messages import GOES_ON
from mrl.rewards.outcome import Failure, read_again, read_failure
from mrl.rewards.pool import WorkerPool

Asker = TypeVar("Asker")


@dataclass(frozen=True)
class EnvironmentAnswer:
    said: Answer
    seconds: float


@dataclass(frozen=True)
class Again:
    """A conversation that must start again although it has not failed itself."""

    why: str


class EnvironmentClient(Generic[Asker]):
    """Environments of many conversations, identified by tickets. A separate thread waits for their answers."""

    def __init__(self, pool: WorkerPool, write: Callable[[Event], None]) -> None:
        self._pool, self._write = pool, write
        self._reader = ThreadPoolExecutor(1, "environments")
        self._receiving: Future[list[tuple[int, bytes]]] | None = None
        self._asked: dict[int, tuple[Asker, bool]] = {}
        """Ticket -> who asked, and whether the answer is wanted (it is not when an environment is closed)."""
        self._num_tickets = 0

    def begin(self, asker: Asker, environment: str, task: Task) -> int:
        """Request the beginning of a conversation. Return the ticket that identifies it."""
        self._num_tickets += 1
        self._asked[self._num_tickets] = (asker, True)
        self._pool.submit(self._num_tickets, json.dumps({"begin": environment, "task": to_json(task)}).encode())
        return self._num_tickets

    def step(self, ticket: int, asker: Asker, turn: Turn) -> None:
        self._asked[ticket] = (asker, True)
        self._pool.submit(ticket, GOES_ON + json.dumps(to_json(turn)).encode() + b"}")

    def let_go(self, ticket: int, asker: Asker) -> None:
        """Make an environment close its resources, and ignore its answer."""
        self._asked[ticket] = (asker, False)
        self._pool.submit(ticket, GOES_ON + b"null}")

    def arriving(self) -> Future[Any] | None:
        """Return a future that is done when an answer has arrived. Return None if nothing is pending."""
        if self._receiving is None and self._asked:
            self._receiving = self._reader.submit(self._pool.receive)
        return self._receiving

    def answers(self) -> list[tuple[Asker, EnvironmentAnswer | Again | Failure]]:
        if self._receiving is None or not self._receiving.done():
            return []
        received, self._receiving = self._receiving.result(), None
        collected = []
        for ticket, body in received:
            asker, is_wanted = self._asked.pop(ticket)
            answer = _read(body)
            if is_wanted:
                collected.append((asker, answer))
            elif isinstance(answer, Failure):
                self._write(Warned("agent", f"an environment could not close: {answer.kind}: {answer.detail}"))
        return collected

    def close(self) -> None:
        self._pool.close()
        self._reader.shutdown(cancel_futures=True)


def environment_pool(config: AgentConfig) -> WorkerPool:
    section_json = json.dumps(asdict(config)).encode()
    return WorkerPool("agent", "mrl.agents.worker", section_json, config.environment, MAX_ANSWER_BYTES + 1024)


def _read(body: bytes) -> EnvironmentAnswer | Again | Failure:
    """Return the answer of a process, after checking it: the process runs the user's code."""
    if reason := read_again(body):
        return Again(f"next to another conversation: {reason}")
    try:
        answer = json.loads(body)
        if "failure" in answer:
            return read_failure(answer, 1)
        if answer.get("done", "") is None:
            return Again("its environment was closed")
        answered = from_json(answer["step"] if "step" in answer else answer["done"])
        if isinstance(answered, Task | Turn):
            raise AgentError(f"a {type(answered).__name__} is not an answer")
        return EnvironmentAnswer(answered, float(answer["seconds"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, AgentError) as error:
        return Failure("crashed", f"the reply of its process cannot be read: {error!r:.200}", 0.0)
