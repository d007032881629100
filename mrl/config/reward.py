"""The section `reward`: which functions score responses, and the processes that they run in; the section `judge`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from mrl.config.bounds import (
    Amount,
    Bound,
    Count,
    NotNegative,
    PlainName,
    Proportion,
    Seconds,
    Share,
    Text,
    at_least,
    matching,
)

_FILES = {
    "ifeval": ("ifeval",),
    "math": ("countdown", "dapo", "digits", "gsm8k", "math"),
    "programs": ("code",),
    "services": ("http", "judge"),
    "symbolic": ("math_verify", "prime"),
    "text": ("exact_match", "f1", "format", "length", "multiple_choice", "overlong", "search_r1"),
}
BUILT_IN = {name: f"mrl.rewards.functions.{file}:{name}" for file, names in _FILES.items() for name in names}
"""Where each of mrl's own reward functions is; any other name is `package.module:function`."""


@dataclass(frozen=True, kw_only=True)
class RewardFunctionConfig:
    """One of the functions whose weighted sum is the reward."""

    name: Text
    """A built-in function such as `gsm8k`, or your own as `package.module:function`."""
    weight: float = 1.0
    """What its score is multiplied by; 0 only records it in the metrics."""
    sources: list[Text] | None = None
    """The data sources whose samples it scores, as patterns (`gsm8k`, `math/*`: a star stands for any text); null or
    none scores all. A source that no function with a weight scores is an error before the run."""
    group: bool = False
    """Call it once for all samples of a prompt, with a list of them, for a list of results: for pairwise and relative
    rewards. Where it fails, each of these samples has failed."""
    options: dict[str, Any] = field(default_factory=dict)
    """Passed on to the function as keywords."""

    def scores(self, data_source: str) -> bool:
        return not self.sources or any(fnmatchcase(data_source, pattern) for pattern in self.sources)


@dataclass(frozen=True, kw_only=True)
class ModelScoreConfig:
    """What becomes of a reward model's scores, in this order: mean and std, clip, weight."""

    mean: float = 0.0
    """What is taken from each score, as `val/score/mean` of `mrl rm`."""
    std: Share = 1.0
    """What it is divided by then, as `val/score/std` of `mrl rm`."""
    running: bool = False
    """Whether mean and std are those of all that it has scored in training, this step included, in place of these."""
    clip: Share | None = None
    """What is farther from 0 by then is cut to this; null cuts nothing."""
    weight: float = 1.0
    """What is multiplied at last, before it is added to the score of the reward functions; 0 only records it."""
    truncated_score: float | None = None
    """What a response that its length cut off gets before `weight`, in place of a score; null has the model judge it,
    which has been shown none without an end where `mrl rm` made it."""


def label_of(role: str) -> str:
    """Return what metrics call the reward model of a role: `model`, or its name where there are several."""
    return role.partition(".")[2] or "model"


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """How responses are scored: by functions, in worker processes."""

    functions: dict[PlainName, RewardFunctionConfig] = field(default_factory=dict)
    """What metrics call each function -> which one it is; there may be none where a reward model scores."""
    manager: Text | None = None
    """Your own class in the place of mrl's RewardManager as `package.module:class`, made like it; null takes mrl's."""
    num_workers: Count = 4
    """Processes that score at the same time."""
    concurrency: Count = 1
    """Samples that each of them has in hand: more than one is for functions that are `async def` and wait, as `judge`
    and `http` do. Their limits then count every second, and who computes holds up the others of its process."""
    limit_s: Seconds = 10.0
    """For all functions on one sample together, from when a worker begins with it, and likewise for those with
    `group` on one prompt's samples. Neither the queue counts nor the seconds in which the worker is ready to run and
    no core is free (`mrl/rewards/clock.py`)."""
    start_limit_s: Seconds = 60.0
    """For a worker to import the functions, and to run the `warm_up()` of their modules where they have one."""
    memory_bytes: Annotated[int, at_least(1 << 27)] = 2 << 30
    """Address space of a worker."""
    max_samples_per_s: Seconds | None = None
    """Samples begun per second by all workers together, for a service that allows no more; null is no bound."""
    samples_per_worker: Count = 1000
    """Then a fresh process takes its place, so that a function that leaks fails nobody's sample; 1 lets none see
    what another has left there."""
    max_abs_score: Amount | None = None
    """A weighted sum farther from 0 is a failure: what scores a model's text may be tricked by it. Null is no bound."""
    retries: NotNegative = 1
    """How often a sample that failed is tried again."""
    on_failure: Literal["drop", "stop"] = "drop"
    """A sample that still fails is left out of the update and counted, or stops the run. It is never scored 0."""
    max_failed_share: Proportion = 0.05
    """Share of the samples of a step that may fail; more stop the run."""
    environment: dict[PlainName, Text] = field(default_factory=dict)
    """Environment variables for the functions (`JUDGE_API_KEY: ${oc.env:JUDGE_API_KEY}`); those of the run that
    may hold secrets are not handed on."""

    def scores(self, data_source: str) -> bool:
        return any(function.weight and function.scores(data_source) for function in self.functions.values())

    def told(self, environment: Mapping[str, str]) -> RewardConfig:
        return replace(self, environment={**self.environment, **environment})


JUDGE = "judge"
"""The role, the reward function, and the name under which the run's own servers know their model."""
URLS_VARIABLE, KEY_VARIABLE = "MRL_JUDGE_URLS", "MRL_JUDGE_API_KEY"
"""What reward workers are told of the run's own servers."""


@dataclass(frozen=True, kw_only=True)
class JudgeConfig:
    """A language model that judges responses: served by engines of the run's own, in the pool of the role `judge`."""

    path: Text
    """A directory or a name on the hub, as in `model.path`; with a chat template."""
    tp: Count = 1
    """Tensor parallel size of one engine; there are as many engines as fit on the pool."""
    max_tokens: Count | None = None
    """Longest question with its answer; null is what the model can."""
    vllm: dict[str, Any] = field(default_factory=dict)
    """Passed on to vLLM's engine arguments, as `rollout.vllm`; also how the judge's own model is read and answers."""


@dataclass(frozen=True, kw_only=True)
class JudgeService:
    """Which model judges, and how patiently it is asked."""

    url: Annotated[str, matching(r"https?://[^\s/]\S*", "an address that begins with http:// or https://")] | None = (
        None
    )
    """Of an OpenAI-compatible server, up to where `/chat/completions` follows: `http://host:8000/v1`. Null asks the
    run's own, which the section `judge` describes."""
    model: Text | None = None
    """How that server calls the model; null with the run's own."""
    key_variable: Text | None = None
    """The variable of reward.environment that holds the bearer key."""
    max_tokens: Count = 1024
    temperature: Amount = 0.0
    timeout_s: Seconds = 8.0
    attempts: Count = 3
    backoff_s: Amount = 0.5
    """Before the second attempt; then twice that, and so on."""


@dataclass(frozen=True, kw_only=True)
class JudgeVerdict:
    """How the judge's answer becomes a score."""

    pattern: str = r"(?i)\bscore\W{1,5}?(-?\d+(?:\.\d+)?)"
    """A regular expression with one group, whose last match is the verdict."""
    values: dict[str, float] = field(default_factory=dict)
    """What each verdict is worth (`{yes: 1, no: 0}`), whatever its case; none where verdicts are numbers."""
    lowest: float = 0.0
    """The number that scores 0; a lower one is no verdict."""
    highest: float = 10.0
    """The number that scores 1; a higher one is no verdict."""


@dataclass(frozen=True, kw_only=True)
class JudgeOptions:
    """What `reward.functions.NAME.options` holds for `judge`."""

    service: JudgeService
    template: Annotated[str, Bound("a text, or a file", lambda text: bool(text.strip()))]
    """What the judge is asked, with {response} and maybe {prompt} and {ground_truth}; or a file with that text."""
    verdict: JudgeVerdict = field(default_factory=JudgeVerdict)
