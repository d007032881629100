"""Assignment of requests to replicas, and detection of slow replicas.

Shares are balanced by remaining tokens. Requests of a dead replica go to others.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from mrl.errors import RolloutError
from mrl.events import EventLog, Warned
from mrl.rollout.capacity import MAX_SEQUENCES
from mrl.rollout.requests import Generated, GenerationRequest

MAX_IN_FLIGHT = MAX_SEQUENCES
"""Largest number of requests of one replica, unless it processes more at a time.

Later requests go to any free replica.
"""
MAX_DEATHS = 3
"""Number of replicas that may die during one set of requests."""
_CANNOT_SERVE = "see its error above; change rollout.engine or rollout.vllm, or use a model that the engine supports"


class RequestScheduler:
    """Requests of one `generate` call, from waiting to finished."""

    def __init__(
        self, requests: Sequence[GenerationRequest], num_replicas: int, max_in_flight: int = MAX_IN_FLIGHT
    ) -> None:
        self._max_in_flight = max_in_flight
        self._waiting: dict[int | None, deque[GenerationRequest]] = {
            home: deque() for home in (None, *range(num_replicas))
        }
        self._in_flight: list[dict[str, GenerationRequest]] = [{} for _ in range(num_replicas)]
        self._deaths_of_prompt: Counter[str] = Counter()
        self._num_deaths = 0
        self._num_without_service = 0
        self._num_wrong = 0
        self.add(requests)

    def add(self, requests: Iterable[GenerationRequest]) -> None:
        """Append requests to the queue of their home replica, or to the queue for any free replica."""
        for request in requests:
            self._waiting[request.home].append(request)

    @property
    def num_left(self) -> int:
        return sum(map(len, self._waiting.values())) + sum(map(len, self._in_flight))

    def assign(self, replica: int, num_sharing: int) -> list[GenerationRequest]:
        """Assign more requests to a replica, up to its share of the remaining tokens.

        If two replicas died with the same prompt under way, it is sent alone: if a third one dies, the prompt is the
        cause.
        """
        in_flight = self._in_flight[replica]
        queues = (*self._waiting.values(), *map(dict.values, self._in_flight))
        num_left = sum(request.max_tokens for requests in queues for request in requests)
        num_assigned = sum(request.max_tokens for request in in_flight.values())
        assigned: list[GenerationRequest] = []
        while (
            len(in_flight) < self._max_in_flight
            and num_assigned * num_sharing < num_left
            and (queue := self._queue_for(replica))
        ):
            request = queue[0]
            prompts = {other.prompt for other in in_flight.values()} | {request.prompt}
            if len(prompts) > 1 and any(self._deaths_of_prompt[prompt] > 1 for prompt in prompts):
                break
            assigned.append(queue.popleft())
            in_flight[request.key] = request
            num_assigned += request.max_tokens
        return assigned

    def take(self, replica: int, keys: Sequence[str]) -> list[GenerationRequest]:
        """Assign these requests to a replica, or none of them if one has not been added yet."""
        waiting = {request.key: request for queue in self._waiting.values() for request in queue}
        if not all(key in waiting for key in keys):
            return []
        assigned = [waiting[key] for key in keys]
        for request in assigned:
            self._waiting[request.home].remove(request)
            self._in_flight[replica][request.key] = request
        return assigned

    def _queue_for(self, replica: int) -> deque[GenerationRequest]:
        """Return the replica's queue or else the common one; for an idle replica, the longest queue of any."""
        queue = self._waiting[replica] or self._waiting[None]
        return queue or (deque() if self._in_flight[replica] else max(self._waiting.values(), key=len))

    def finish(self, replica: int, samples: Sequence[Generated]) -> None:
        for sample in samples:
            del self._in_flight[replica][sample.key]

    def in_flight(self, replica: int) -> Mapping[str, GenerationRequest]:
        return self._in_flight[replica]

    def forgive(self) -> None:
        """Reset the counts of deaths and wrong answers."""
        self._num_deaths = self._num_without_service = self._num_wrong = 0

    def reject(self, replica: int, problem: str) -> None:
        """Requeue the requests of a replica whose answer is impossible. The second such answer stops the rollout."""
        self._num_wrong += 1
        if self._num_wrong > 1:
            raise RolloutError(
                f"replicas returned {self._num_wrong} impossible answers; none of them was trained on. The "
                f"last one, from replica {replica}: {problem}",
                fix="run `mrl env` and `mrl verify` on its node: a kernel, driver or device may be broken",
            )
        self._put_back(replica)

    def requeue(self, replica: int, message: str, *, has_served: bool) -> int:
        """Requeue the requests of a dead replica, and return their number. Raise an error if replicas keep dying.

        Prompts are only blamed for replicas that served other samples before. Otherwise the replica itself is the
        cause.
        """
        lost = self._put_back(replica)
        self._num_deaths += 1
        self._num_without_service += not has_served
        reason = message.partition("\n")[0]
        prompts = dict.fromkeys(request.prompt for request in lost)
        self._deaths_of_prompt.update(prompts.keys())
        suspects = [prompt for prompt in prompts if self._deaths_of_prompt[prompt] > 1]
        is_too_many, is_engine = self._num_deaths > MAX_DEATHS, self._num_without_service == self._num_deaths
        if len(suspects) == 1 and (has_served or (is_too_many and not is_engine)):
            raise RolloutError(
                f"{self._deaths_of_prompt[suspects[0]]} replicas died while they generated from this prompt; the "
                f"last error: {reason}",
                where=f"prompt {suspects[0]}",
                fix="remove it from the data, or find out how it breaks the engine",
            )
        if is_too_many and is_engine:
            problem = f"{self._num_deaths} replicas died before they finished a single sample: the engine cannot"
            raise RolloutError(f"{problem} serve this model here. The last error: {message}", fix=_CANNOT_SERVE)
        if is_too_many:
            raise RolloutError(f"{self._num_deaths} replicas died during one rollout. The last error: {reason}")
        # Suspects come last, the worst at the end: other prompts need not wait, and show which replicas work.
        deaths = self._deaths_of_prompt
        waiting = sorted(self._waiting[None], key=lambda request: max(1, deaths[request.prompt]))
        self._waiting[None] = deque(waiting)
        return len(lost)

    def _put_back(self, replica: int) -> list[GenerationRequest]:
        """Move a replica's requests, running and waiting, to the common queue. Return the running ones."""
        lost = [replace(request, home=None) for request in self._in_flight[replica].values()]
        waited = [replace(request, home=None) for request in self._waiting[replica]]
        self._in_flight[replica].clear()
        self._waiting[replica].clear()
        self._waiting[None].extendleft(reversed(lost + waited))
        return lost


_TIMES, _ROLLOUTS = 3.0, 3
"""Factor by which a replica must be slower, and for how many rollouts in a row: one long sample is not a fault."""
_LEAST_S = 1.0
"""Seconds of work below which a rate is not meaningful."""


class Pace:
    """Measures the tokens that each replica generates while it has work."""

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._tokens: Counter[int] = Counter()
        self._busy_s: dict[int, float] = defaultdict(float)
        self._num_slow: Counter[int] = Counter()

    def note(self, replica: int, num_tokens: int, seconds: float) -> None:
        self._tokens[replica] += num_tokens
        self._busy_s[replica] += seconds

    def rollout_ends(self) -> None:
        """Compare the replicas, and warn of each that has been slow for long enough."""
        rates = {index: self._tokens[index] / busy_s for index, busy_s in self._busy_s.items() if busy_s >= _LEAST_S}
        for replica, rate in rates.items():
            other_rates = [other for index, other in rates.items() if index != replica]
            usual = statistics.median(other_rates) if other_rates else 0.0
            self._num_slow[replica] = self._num_slow[replica] + 1 if rate * _TIMES < usual else 0
            if self._num_slow[replica] == _ROLLOUTS:
                message = f"it generates {rate:.0f} tokens/s, the others {usual:.0f}, for {_ROLLOUTS} rollouts in a row"
                self._events.write(Warned(f"rollout-{replica}", f"{message}: does another process use its node?"))
        self._tokens.clear()
        self._busy_s.clear()
