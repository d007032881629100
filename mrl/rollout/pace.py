"""Engines that are far slower than the others, rollout after rollout: named with their numbers."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict

from mrl.events import EventLog, Warned

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
        """Add what it finished in some seconds of work."""
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
