"""An endless, seeded sequence of draws over weighted sources that can resume anywhere.

Every source has its own epochs. The order of its rows in an epoch is a pure function of seed, source, epoch and number
of rows. The next source depends on how often each was drawn, so these few counts are the whole state. A sampler that
leaves out useless prompts also stores the resting rows.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from mrl.errors import DataError

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))


@dataclass(frozen=True)
class Draw:
    """One occurrence of a prompt."""

    number: int
    """Number of earlier draws, over all sources."""
    source: str
    epoch: int
    """Epoch of its source."""
    row: int
    """Row in its source."""

    @property
    def uid(self) -> str:
        """Identifier of this occurrence: unique in a run, and the same in every run."""
        return f"{self.source}/{self.epoch}/{self.row}"


class PromptSampler:
    """Draws rows without end. After n draws, a source of share w was drawn w x n times, within one or two."""

    def __init__(
        self, sizes: Mapping[str, int], weights: Mapping[str, float | None], *, seed: int, shuffle: bool
    ) -> None:
        self._order = {
            "seed": seed,
            "shuffle": shuffle,
            "sizes": dict(sizes),
            "weights": _whole_weights(sizes, weights),
        }
        self._seed, self._shuffle, self._sizes = seed, shuffle, dict(sizes)
        self._weights: dict[str, int] = self._order["weights"]  # type: ignore[assignment]
        self._drawn = dict.fromkeys(sizes, 0)
        self._rows: dict[str, tuple[int, npt.NDArray[np.int64]]] = {}

    def draw(self) -> Draw:
        number, total = sum(self._drawn.values()), sum(self._weights.values())
        # The source that is furthest behind its share; ties go to the first.
        source = max(self._sizes, key=lambda name: self._weights[name] * (number + 1) - total * self._drawn[name])
        epoch, position = divmod(self._drawn[source], self._sizes[source])
        self._drawn[source] += 1
        return Draw(number, source, epoch, int(self._rows_of(source, epoch)[position]))

    def learn(self, solved: Mapping[str, float]) -> None:
        """Take the share of solved samples, by the uid of their prompt. This sampler ignores it."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the sequence, as plain JSON."""
        return {"order": self._order, "drawn": dict(self._drawn)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where the state was taken. Everything that determines the order must be unchanged."""
        for name, now in self._order.items():
            if (recorded := state["order"][name]) != now:
                raise DataError(
                    f"cannot continue with the prompts: {name} was {recorded}, but now is {now}",
                    fix="resume with the same data section and files, or start a new run",
                )
        self._drawn = dict(state["drawn"])

    def _rows_of(self, source: str, epoch: int) -> npt.NDArray[np.int64]:
        """Return the order of a source's rows in an epoch. The latest one is cached."""
        if self._rows.get(source, (-1,))[0] != epoch:
            size = self._sizes[source]
            order = shuffled(size, f"{self._seed}/{source}/{epoch}") if self._shuffle else np.arange(size)
            self._rows[source] = epoch, order
        return self._rows[source][1]


def shuffled(size: int, key: str) -> npt.NDArray[np.int64]:
    """Return the numbers below `size` in the order of a hash of key and number (SplitMix64).

    numpy's shuffle is not used, because its order may change with numpy's version: a run must resume after an upgrade.
    """
    start = np.frombuffer(hashlib.blake2b(key.encode(), digest_size=8).digest(), dtype="<u8")
    mixed = np.arange(1, size + 1, dtype=np.uint64) * _STEP + start
    for shift, factor in _MIX:
        mixed = (mixed ^ (mixed >> shift)) * factor
    return np.argsort(mixed ^ (mixed >> np.uint64(31)), kind="stable")


def _whole_weights(sizes: Mapping[str, int], weights: Mapping[str, float | None]) -> dict[str, int]:
    """Return weights as the smallest whole numbers with the same ratio, so that shares are exact in runs of any
    length."""
    exact = {
        name: Fraction(size) if weights[name] is None else Fraction(str(weights[name])) for name, size in sizes.items()
    }
    scale = math.lcm(*(weight.denominator for weight in exact.values()))
    whole = {name: int(weight * scale) for name, weight in exact.items()}
    divisor = math.gcd(*whole.values())
    return {name: weight // divisor for name, weight in whole.items()}


class DifficultySampler(PromptSampler):
    """Like `PromptSampler`, but leaves out prompts that were too easy or too hard when last drawn.

    A prompt rests for `rest` epochs of its source if the share of its solved samples was not strictly between the two
    numbers of `between`. If every prompt of a source rests, the next one is drawn anyway. Prompts that are left out
    count as drawn, so the shares of the sources are shares of the prompts considered.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        weights: Mapping[str, float | None],
        *,
        seed: int,
        shuffle: bool,
        between: Sequence[float] = (-1.0, 1.0),
        rest: int = 1,
    ) -> None:
        super().__init__(sizes, weights, seed=seed, shuffle=shuffle)
        (self._hard, self._easy), self._rest = between, rest
        self._again_in: dict[str, dict[str, int]] = {name: {} for name in self._sizes}
        """Source -> row -> first epoch in which it may be drawn again."""

    def draw(self) -> Draw:
        draw = super().draw()
        for _ in range(sum(self._sizes.values())):
            if self._again_in[draw.source].get(str(draw.row), 0) <= draw.epoch:
                return draw
            draw = super().draw()
        return draw

    def learn(self, solved: Mapping[str, float]) -> None:
        """Record the share of solved samples, by the uid of their prompt."""
        for uid, share in solved.items():
            source, epoch, row = uid.rsplit("/", 2)
            if share >= self._easy or share <= self._hard:
                self._again_in[source][row] = int(epoch) + 1 + self._rest
            else:
                self._again_in[source].pop(row, None)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"again_in": {name: dict(rows) for name, rows in self._again_in.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._again_in = {name: dict(rows) for name, rows in state["again_in"].items()}
