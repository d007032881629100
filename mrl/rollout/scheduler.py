"""Which replica generates what: shares by remaining tokens, and what becomes of the requests of one that died."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from mrl.errors import RolloutError
from mrl.rollout.requests import Generated, GenerationRequest

MAX_IN_FLIGHT = 1024
"""Requests that one replica holds at most; the rest goes to whoever is done first."""
MAX_DEATHS = 3
"""Replicas that may die while one set of requests is under way."""


class RequestScheduler:
    """The requests of one `generate`, from waiting to finished."""

    def __init__(self, requests: Sequence[GenerationRequest], num_replicas: int) -> None:
        self._waiting = deque(requests)
        self._in_flight: list[dict[str, GenerationRequest]] = [{} for _ in range(num_replicas)]
        self._deaths_of_prompt: Counter[str] = Counter()
        self._num_deaths = 0

    @property
    def num_left(self) -> int:
        """Requests that are not finished."""
        return len(self._waiting) + sum(map(len, self._in_flight))

    def num_in_flight(self, replica: int) -> int:
        """Number of requests that a replica has."""
        return len(self._in_flight[replica])

    def assign(self, replica: int, num_sharing: int) -> list[GenerationRequest]:
        """More requests for a replica, until it has its share of the tokens that are left.

        A prompt that was in flight at two replicas that died is sent alone: if a third dies, it is the cause.
        """
        in_flight = self._in_flight[replica]
        left = sum(r.max_tokens for requests in (self._waiting, *map(dict.values, self._in_flight)) for r in requests)
        has = sum(request.max_tokens for request in in_flight.values())
        taken: list[GenerationRequest] = []
        while self._waiting and len(in_flight) < MAX_IN_FLIGHT and has * num_sharing < left:
            request = self._waiting[0]
            prompts = {other.prompt for other in in_flight.values()} | {request.prompt}
            if len(prompts) > 1 and any(self._deaths_of_prompt[prompt] > 1 for prompt in prompts):
                break
            taken.append(self._waiting.popleft())
            in_flight[request.key] = request
            has += request.max_tokens
        return taken

    def finish(self, replica: int, samples: Sequence[Generated]) -> None:
        """Note what a replica has finished."""
        for sample in samples:
            del self._in_flight[replica][sample.key]

    def requeue(self, replica: int, reason: str) -> int:
        """Put back what a dead replica had; how many that were. Stops where deaths do not end."""
        lost = list(self._in_flight[replica].values())
        self._in_flight[replica].clear()
        self._num_deaths += 1
        prompts = dict.fromkeys(request.prompt for request in lost)
        self._deaths_of_prompt.update(prompts.keys())
        suspects = [prompt for prompt in prompts if self._deaths_of_prompt[prompt] > 1]
        if len(suspects) == 1:
            raise RolloutError(
                f"this prompt was being generated from when {self._deaths_of_prompt[suspects[0]]} replicas died, the "
                f"last of them: {reason}",
                where=f"prompt {suspects[0]}",
                fix="take it out of the data, or find out what it does to the engine",
            )
        if self._num_deaths > MAX_DEATHS:
            raise RolloutError(f"{self._num_deaths} replicas died during one rollout, the last of them: {reason}")
        self._waiting.extendleft(reversed(lost))
        # Suspects come last: what is innocent need not wait for them.
        self._waiting = deque(sorted(self._waiting, key=lambda request: self._deaths_of_prompt[request.prompt] > 1))
        return len(lost)
