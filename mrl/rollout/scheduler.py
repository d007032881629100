"""Which replica generates what, and who is far slower than the others.

Shares go by remaining tokens, and the requests of a replica that died to others.
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
"""Requests that one replica holds at most, or more where it works on more; the rest goes to whoever is done first."""
MAX_DEATHS = 3
"""Replicas that may die while one set of requests is under way."""
_CANNOT_SERVE = "what it said is above; another rollout.engine or rollout.vllm settings, or a model that it supports"


class RequestScheduler:
    """The requests of one `generate`, from waiting to finished."""

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
        """Have these wait behind the others: at their home, or for whoever is free first."""
        for request in requests:
            self._waiting[request.home].append(request)

    @property
    def num_left(self) -> int:
        return sum(map(len, self._waiting.values())) + sum(map(len, self._in_flight))

    def assign(self, replica: int, num_sharing: int) -> list[GenerationRequest]:
        """More requests for a replica, until it has its share of the tokens that are left.

        A prompt that was in flight at two replicas that died is sent alone: if a third dies, it is the cause.
        """
        in_flight = self._in_flight[replica]
        everything = (*self._waiting.values(), *map(dict.values, self._in_flight))
        left = sum(request.max_tokens for requests in everything for request in requests)
        has = sum(request.max_tokens for request in in_flight.values())
        taken: list[GenerationRequest] = []
        while len(in_flight) < self._max_in_flight and has * num_sharing < left and (queue := self._queue_for(replica)):
            request = queue[0]
            prompts = {other.prompt for other in in_flight.values()} | {request.prompt}
            if len(prompts) > 1 and any(self._deaths_of_prompt[prompt] > 1 for prompt in prompts):
                break
            taken.append(queue.popleft())
            in_flight[request.key] = request
            has += request.max_tokens
        return taken

    def take(self, replica: int, keys: Sequence[str]) -> list[GenerationRequest]:
        """Assign a replica these requests, or none of them while one is still to come."""
        waiting = {request.key: request for queue in self._waiting.values() for request in queue}
        if not all(key in waiting for key in keys):
            return []
        taken = [waiting[key] for key in keys]
        for request in taken:
            self._waiting[request.home].remove(request)
            self._in_flight[replica][request.key] = request
        return taken

    def _queue_for(self, replica: int) -> deque[GenerationRequest]:
        """Return what waits for this replica, or else for any; of another, the longest queue, where it is idle."""
        queue = self._waiting[replica] or self._waiting[None]
        return queue or (deque() if self._in_flight[replica] else max(self._waiting.values(), key=len))

    def finish(self, replica: int, samples: Sequence[Generated]) -> None:
        for sample in samples:
            del self._in_flight[replica][sample.key]

    def in_flight(self, replica: int) -> Mapping[str, GenerationRequest]:
        return self._in_flight[replica]

    def forgive(self) -> None:
        """Count the deaths and wrong answers from here on."""
        self._num_deaths = self._num_without_service = self._num_wrong = 0

    def reject(self, replica: int, wrong: str) -> None:
        """Put back what a replica had that answered what no engine can; the second such answer stops the rollout."""
        self._num_wrong += 1
        if self._num_wrong > 1:
            raise RolloutError(
                f"replicas answered {self._num_wrong} times what cannot be right; nothing of it was trained on. The "
                f"last, replica {replica}: {wrong}",
                fix="`mrl env` and `mrl verify` on its node: a broken kernel, driver or device",
            )
        self._put_back(replica)

    def requeue(self, replica: int, said: str, *, has_served: bool) -> int:
        """Put back what a dead replica had; how many that were. Stops where deaths do not end.

        A prompt is blamed by the death of a replica that could serve others: one that never did is itself the cause.
        """
        lost = self._put_back(replica)
        self._num_deaths += 1
        self._num_without_service += not has_served
        reason = said.partition("\n")[0]
        prompts = dict.fromkeys(request.prompt for request in lost)
        self._deaths_of_prompt.update(prompts.keys())
        suspects = [prompt for prompt in prompts if self._deaths_of_prompt[prompt] > 1]
        is_too_many, is_engine = self._num_deaths > MAX_DEATHS, self._num_without_service == self._num_deaths
        if len(suspects) == 1 and (has_served or (is_too_many and not is_engine)):
            raise RolloutError(
                f"this prompt was being generated from when {self._deaths_of_prompt[suspects[0]]} replicas died, the "
                f"last of them: {reason}",
                where=f"prompt {suspects[0]}",
                fix="take it out of the data, or find out what it does to the engine",
            )
        if is_too_many and is_engine:
            what = f"{self._num_deaths} replicas died, and none of them had finished a single sample: the engine cannot"
            raise RolloutError(f"{what} serve this model here. The last of them: {said}", fix=_CANNOT_SERVE)
        if is_too_many:
            raise RolloutError(f"{self._num_deaths} replicas died during one rollout, the last of them: {reason}")
        # Suspects come last, the worst of them at the end: what is innocent need not wait, and shows who can serve.
        deaths = self._deaths_of_prompt
        waiting = sorted(self._waiting[None], key=lambda request: max(1, deaths[request.prompt]))
        self._waiting[None] = deque(waiting)
        return len(lost)

    def _put_back(self, replica: int) -> list[GenerationRequest]:
        """Have what a replica had in hand, and what waits for it, go to whoever is free; return what it had."""
        lost = [replace(request, home=None) for request in self._in_flight[replica].values()]
        waited = [replace(request, home=None) for request in self._waiting[replica]]
        self._in_flight[replica].clear()
        self._waiting[replica].clear()
        self._waiting[None].extendleft(reversed(lost + waited))
        return lost


_TIMES, _ROLLOUTS = 3.0, 3
"""How much slower, and for how many rollouts one after another: a single long sample may hold up anybody once."""
_LEAST_S = 1.0
"""Of work, below which a rate says nothing."""


class Pace:
    """Counts what each replica generates in the time in which it has work."""

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._tokens: Counter[int] = Counter()
        self._busy_s: dict[int, float] = defaultdict(float)
        self._num_slow: Counter[int] = Counter()

    def note(self, replica: int, num_tokens: int, seconds: float) -> None:
        self._tokens[replica] += num_tokens
        self._busy_s[replica] += seconds

    def rollout_ends(self) -> None:
        """Compare the replicas, and warn of one that has been slow for long enough."""
        rates = {each: self._tokens[each] / busy_s for each, busy_s in self._busy_s.items() if busy_s >= _LEAST_S}
        for replica, rate in rates.items():
            others = [other for each, other in rates.items() if each != replica]
            usual = statistics.median(others) if others else 0.0
            self._num_slow[replica] = self._num_slow[replica] + 1 if rate * _TIMES < usual else 0
            if self._num_slow[replica] == _ROLLOUTS:
                what = f"it generates {rate:.0f} tokens/s, the others {usual:.0f}, for {_ROLLOUTS} rollouts by now"
                self._events.write(Warned(f"rollout-{replica}", f"{what}: what else runs on its node?"))
        self._tokens.clear()
        self._busy_s.clear()
