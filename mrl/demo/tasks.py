"""Tasks of `mrl demo`: sums, by rule or by preferences, and looking up what no model can know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

MAX_WARM_START = 0.40
RIGHT_PAIRS = "rm/val/accuracy"
"""For a demo with a judge: share of held-out pairs that the reward model ranks correctly."""


@dataclass(frozen=True, kw_only=True)
class DemoTask:
    """One of the tasks, with its configuration files in this directory."""

    algorithms: Mapping[str, str]
    """Algorithm of the reinforcement learning -> its file. The first one is the default."""
    warm_up: str
    """Configuration file of the SFT warm-up."""
    run: str
    """Name of the reinforcement learning run."""
    teacher: str
    unseen: str
    """Description of the evaluation data."""
    num_layers: int
    steps: int
    samples_per_step: int
    updates_per_step: int
    validated_every: int | None = None
    """Steps between validations, the best of which gives the result. Null validates at the end."""
    is_judged: bool = False
    """Whether a judge ranks pairs of the warmed-up model's answers, and a reward model learns from them."""
    goals: Mapping[str, float]
    """Metric of the last validation -> its goal. The first metric is also measured before training."""

    also: Mapping[str, str]
    """Metric of the last step -> its description, if it helps to explain the result."""

    @property
    def solved(self) -> str:
        """Return the metric of the share of right answers."""
        return next(iter(self.goals))


SUMS = DemoTask(
    algorithms={name: f"{name}.yaml" for name in ("ppo", "grpo", "rloo", "reinforce_plus_plus", "remax", "dapo")},
    warm_up="sft.yaml",
    run="ppo",
    teacher="a teacher who is wrong in 64 % of them",
    unseen="problems that are never trained on",
    num_layers=2,
    steps=60,
    samples_per_step=512,
    updates_per_step=4,
    goals={"val/solved/mean@4": 0.80},
    also={},
)
SEARCH = DemoTask(
    algorithms={"grpo": "search.yaml"},
    warm_up="search_sft.yaml",
    run="search",
    teacher="a teacher who searches correctly in a third of them",
    unseen="questions about keys that are never trained on",
    num_layers=3,
    steps=50,
    samples_per_step=256,
    updates_per_step=2,
    goals={"val/solved/mean@1": 0.85, "val/two_hops/solved/mean@1": 0.75},
    also={
        "val/one_hop/solved/mean@1": "right after one hop",
        "val/two_hops/solved/mean@1": "right after two hops",
        "reward/one_hop/facts/searches/mean": "searches where one is needed",
        "reward/two_hops/facts/searches/mean": "searches where two are needed",
    },
)
PREFERENCES = replace(
    SUMS,
    algorithms={"grpo": "preferences.yaml"},
    run="rewarded",
    steps=25,
    validated_every=5,
    is_judged=True,
    goals={"val/solved/mean@4": 0.65, RIGHT_PAIRS: 0.97},
)
TASKS: Mapping[str, DemoTask] = {"sums": SUMS, "search": SEARCH, "preferences": PREFERENCES}
