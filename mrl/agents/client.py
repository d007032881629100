"""The run's side of the environments: who is asked what, and what comes back of their processes."""

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
    """A conversation that is to begin anew, though it has not failed itself."""

    why: str


class EnvironmentClient(Generic[Asker]):
    """Environments of many conversations, each with a ticket; a thread of its own waits for what they answer."""

    def __init__(self, pool: WorkerPool, write: Callable[[Event], None]) -> None:
        self._pool, self._write = pool, write
        self._reader = ThreadPoolExecutor(1, "environments")
        self._receiving: Future[list[tuple[int, bytes]]] | None = None
        self._asked: dict[int, tuple[Asker, bool]] = {}
        """By ticket: who asks, and whether for more than the environment's end."""
        self._num_tickets = 0

    def begin(self, asker: Asker, environment: str, task: Task) -> int:
        """Ask for the beginning of a conversation; the ticket that is returned names it."""
        self._num_tickets += 1
        self._asked[self._num_tickets] = (asker, True)
        self._pool.submit(self._num_tickets, json.dumps({"begin": environment, "task": to_json(task)}).encode())
        return self._num_tickets

    def step(self, ticket: int, asker: Asker, turn: Turn) -> None:
        self._asked[ticket] = (asker, True)
        self._pool.submit(ticket, GOES_ON + json.dumps(to_json(turn)).encode() + b"}")

    def let_go(self, ticket: int, asker: Asker) -> None:
        """Have an environment close what it has open; nothing of it is heard any more."""
        self._asked[ticket] = (asker, False)
        self._pool.submit(ticket, GOES_ON + b"null}")

    def arriving(self) -> Future[Any] | None:
        """Return what is done when something has been answered; None where nothing is asked."""
        if self._receiving is None and self._asked:
            self._receiving = self._reader.submit(self._pool.receive)
        return self._receiving

    def answers(self) -> list[tuple[Asker, EnvironmentAnswer | Again | Failure]]:
        if self._receiving is None or not self._receiving.done():
            return []
        received, self._receiving = self._receiving.result(), None
        heard = []
        for ticket, body in received:
            asker, is_wanted = self._asked.pop(ticket)
            answer = _read(body)
            if is_wanted:
                heard.append((asker, answer))
            elif isinstance(answer, Failure):
                self._write(Warned("agent", f"an environment could not close: {answer.kind}: {answer.detail}"))
        return heard

    def close(self) -> None:
        self._pool.close()
        self._reader.shutdown(cancel_futures=True)


def environment_pool(config: AgentConfig) -> WorkerPool:
    told = json.dumps(asdict(config)).encode()
    return WorkerPool("agent", "mrl.agents.worker", told, config.environment, MAX_ANSWER_BYTES + 1024)


def _read(body: bytes) -> EnvironmentAnswer | Again | Failure:
    """Return what a process has answered; it runs the user's code, so it is checked."""
    if why := read_again(body):
        return Again(f"beside another: {why}")
    try:
        answer = json.loads(body)
        if "failure" in answer:
            return read_failure(answer, 1)
        if answer.get("done", "") is None:
            return Again("its environment was told to close")
        said = from_json(answer["step"] if "step" in answer else answer["done"])
        if isinstance(said, Task | Turn):
            raise AgentError(f"a {type(said).__name__} is no answer")
        return EnvironmentAnswer(said, float(answer["seconds"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, AgentError) as error:
        return Failure("crashed", f"its answer cannot be read: {error!r:.200}", 0.0)
