"""The section `validation`: how the policy is measured, and which of the figures says what the best checkpoint is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from mrl.config.bounds import Count, NotNegative, PlainName, Proportion, Share, Text
from mrl.config.reward import RewardFunctionConfig


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """How the policy is measured on data.validation."""

    every: NotNegative = 0
    """Steps between validations; 0 validates never. The last step is validated as well."""
    first: bool = True
    """Also before training."""
    samples_per_prompt: Count = 1
    """Responses to each prompt; their mean is called mean@samples_per_prompt."""
    k: list[Count] = field(default_factory=list)
    """For which k pass@k and maj@k are computed, all from the same samples; none takes `samples_per_prompt`."""
    greedy: bool = False
    """One response to each prompt, of the likeliest token at every place, in place of samples."""
    temperature: Share = 1.0
    """As rollout.temperature."""
    top_p: Share = 1.0
    """As rollout.top_p."""
    top_k: NotNegative = 0
    """As rollout.top_k."""
    solved_at: Proportion = 1.0
    """A response counts as right from this score on."""
    reward_functions: dict[PlainName, RewardFunctionConfig] = field(default_factory=dict)
    """Functions that score responses in place of those of `reward.functions`, under the same limits."""
    best_metric: Text | None = None
    """The figure that says which checkpoint is the best; null takes `val/score/mean@samples_per_prompt`."""
    best_mode: Literal["max", "min"] = "max"
    """Whether the highest or the lowest is the best."""
    keep_best: bool = False
    """Also save at every step whose validation is the best so far."""
    save_samples: bool = True
    """Write the responses into `samples/validation-NNNNNN.parquet`."""

    @property
    def counts(self) -> list[int]:
        return sorted({*self.k}) or [self.samples_per_prompt]

    @property
    def best(self) -> str:
        return self.best_metric or f"val/score/mean@{self.samples_per_prompt}"

    def figures(self, models: Sequence[str] = (), *, by_rule: bool = True) -> list[str]:
        """Return what is measured of each source and of all together, as it stands behind `val/` or `val/SOURCE/`.

        Without a rule that says what is right there is only what reward models say, by what metrics call them.
        """
        means = [f"{what}/mean@{self.samples_per_prompt}" for what in [*by_rule * ["score", "solved"], *models]]
        kinds = by_rule * ["pass", "maj", *bool(models) * ["best"]]
        return [*means, *(f"solved/{kind}@{k}" for k in self.counts if k > 1 for kind in kinds)]

    def source_of_best(self, figures: Sequence[str]) -> str | None:
        """Return the source that the best goes by, empty for all together; None where it is none of these figures."""
        for figure in figures:
            if self.best == f"val/{figure}":
                return ""
            if self.best.startswith("val/") and self.best.endswith(f"/{figure}"):
                return self.best.removeprefix("val/").removesuffix(f"/{figure}")
        return None
