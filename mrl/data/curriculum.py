"""Which prompts are worth drawing, by what their samples have scored: those that teach nothing rest for a while."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mrl.data.sampler import Draw, PromptSampler


class DifficultySampler(PromptSampler):
    """Draws as `PromptSampler`, but leaves out prompts that were too easy or too hard when they were drawn last.

    A prompt rests for `rest` epochs of its source where the share of its samples that were solved did not lie between
    the two numbers of `between`, themselves excluded. Where every prompt of a source rests, the next one is drawn all
    the same. What is left out counts as drawn, so the shares of the sources are shares of what was looked at.
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
        """Source -> row -> the first epoch in which it may be drawn again."""

    def draw(self) -> Draw:
        draw = super().draw()
        for _ in range(sum(self._sizes.values())):
            if self._again_in[draw.source].get(str(draw.row), 0) <= draw.epoch:
                return draw
            draw = super().draw()
        return draw

    def learn(self, solved: Mapping[str, float]) -> None:
        """Take in the share of samples that were solved, by the uid of their prompt."""
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
