"""What `mrl demo` can teach: sums, by rule or by preferences, or to look up what no model can know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

MAX_WARM_START = 0.40
RIGHT_PAIRS = "rm/val/accuracy"
"""Of a demo with a judge: the share of held-out pairs that the reward model has the right way round."""


@dataclass(frozen=True, kw_only=True)
class DemoTask:
    """One of the tasks, whose files stand beside this one."""

    algorithms: Mapping[str, str]
    """What rewards teach it by -> the file; the first one is the default."""
    warm_up: str
    """The file of the SFT before."""
    run: str
    """Name of the run by rewards."""
    teacher: str
    unseen: str
    """What it is measured on."""
    num_layers: int
    steps: int
    samples_per_step: int
    updates_per_step: int
    validated_every: int | None = None
    """Steps between validations, of which the best gives the result; null validates at the end."""
    is_judged: bool = False
    """Whether a judge orders pairs of the warmed-up model's answers, and a reward model learns from these."""
    goals: Mapping[str, float]
    """Figure of the last validation -> what it has to be at least; the first is also measured before."""

    also: Mapping[str, str]
    """Figure of the last step -> what it is, where it tells something of how the goals were met."""

    @property
    def solved(self) -> str:
        """Which figure is the share of right answers."""
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
    teacher="a teacher of whom a third search rightly",
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
