"""The score that ranks checkpoints: another one is better only if the difference is more than noise between prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mrl.observe.confidence import PairedDifference


@dataclass(frozen=True)
class CheckpointScore:
    value: float
    """Figure of a validation, with its sign changed if lower is better."""
    step: int = 0
    by_prompt: Mapping[str, float] = field(default_factory=dict)
    """The same by prompt. Without it, or with fewer than two prompts in common, each higher value is better."""

    def is_better_than(self, best: CheckpointScore | None) -> bool:
        if best is None:
            return True
        difference = PairedDifference.between(best.by_prompt, self.by_prompt)
        is_risen = difference.mean > 0 and difference.is_beyond_noise
        return self.value > best.value and (difference.num < 2 or is_risen)

    def noise(self, best: CheckpointScore | None) -> str:
        """Say why a higher value is not better, or nothing."""
        if best is None or self.value <= best.value or self.is_better_than(best):
            return ""
        difference = PairedDifference.between(best.by_prompt, self.by_prompt)
        within = f"within noise (±{difference.half_width:.3g}, {difference.num} prompts)"
        if difference.half_width < abs(difference.mean):
            within = f"but only {difference.num_different} of {difference.num} prompts differ"
        more = difference.more("prompt")
        return f"better by {self.value - best.value:.3g}, {within}: best stays at step {best.step}{more}"

    def to_state(self) -> dict[str, Any]:
        return {"best": self.value, "best_step": self.step, "best_by_prompt": dict(self.by_prompt)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> CheckpointScore | None:
        """Return the score in a checkpoint's state. Checkpoints of earlier versions have its value only."""
        if state["best"] is None:
            return None
        return cls(state["best"], state.get("best_step", 0), state.get("best_by_prompt", {}))
