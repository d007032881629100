"""The sections `reward` and `judge`: functions that score responses, and the processes that run them."""

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
"""Location of each built-in reward function. Any other name is `package.module:function`."""


@dataclass(frozen=True, kw_only=True)
class RewardFunctionConfig:
    """One function of the weighted sum that is the reward."""

    name: Text
    """A built-in function such as `gsm8k`, or your own as `package.module:function`."""
    weight: float = 1.0
    """Factor of its score. 0 only records the score in the metrics."""
    sources: list[Text] | None = None
    """Patterns (`gsm8k`, `math/*`; a star matches any text) of the data sources that it scores. Null or an empty list
    scores all. A source without a function of nonzero weight is an error before the run."""
    group: bool = False
    """Call it once for all samples of a prompt, with a list of samples, for a list of results: for pairwise and
    relative rewards. If it fails, all samples of the prompt have failed."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for the function."""

    def scores(self, data_source: str) -> bool:
        return not self.sources or any(fnmatchcase(data_source, pattern) for pattern in self.sources)


@dataclass(frozen=True, kw_only=True)
class ModelScoreConfig:
    """How a reward model's scores are transformed: mean and std, then clip, then weight."""

    mean: float = 0.0
    """Subtracted from each score, as `val/score/mean` of `mrl rm`."""
    std: Share = 1.0
    """Divisor after that, as `val/score/std` of `mrl rm`."""
    running: bool = False
    """Use the mean and std of all scores so far in training, including this step, instead of `mean` and `std`."""
    clip: Share | None = None
    """Largest distance from 0 after that. Null does not clip."""
    weight: float = 1.0
    """Last factor, before the score is added to that of the reward functions. 0 only records it."""
    truncated_score: float | None = None
    """Score, before `weight`, of a response that was cut off by its length. Null lets the model judge it; a model
    trained with `mrl rm` has never seen a response without an end."""


def label_of(role: str) -> str:
    """Return the name of a role's reward model in metrics: `model`, or its own name if there are several."""
    return role.partition(".")[2] or "model"


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """How responses are scored by functions in worker processes."""

    functions: dict[PlainName, RewardFunctionConfig] = field(default_factory=dict)
    """Name of each function in metrics -> the function. May be empty if a reward model scores."""
    manager: Text | None = None
    """Your own class instead of RewardManager as `package.module:class`, with the same constructor. Null uses mrl's
    class."""
    num_workers: Count = 4
    """Number of processes that score in parallel."""
    concurrency: Count = 1
    """Samples that each process handles at once. Use more than one for `async def` functions that wait, such as `judge`
    and `http`. Their limits then count every second, and a function that computes blocks the others in its process."""
    limit_s: Seconds = 10.0
    """Time for all functions on one sample together, from the moment a worker starts on it, and likewise for those with
    `group` on the samples of one prompt. Time in the queue does not count. Time in which the worker is ready to run but
    no core is free does not count either (`mrl/rewards/clock.py`)."""
    start_limit_s: Seconds = 60.0
    """Time for a worker to import the functions and to run `warm_up()` in modules that define it."""
    memory_bytes: Annotated[int, at_least(1 << 27)] = 2 << 30
    """Limit of a worker's address space."""
    max_samples_per_s: Seconds | None = None
    """Samples started per second by all workers together, for a service with a rate limit. Null sets no limit."""
    samples_per_worker: Count = 1000
    """Samples after which a worker process is replaced, so that a memory leak makes no sample fail. With 1, no sample
    sees state left by another."""
    max_abs_score: Amount | None = None
    """Largest absolute value of the weighted sum; more is a failure, because a model's text may trick the function that
    scores it. Null sets no limit."""
    retries: NotNegative = 1
    """How often a failed sample is retried."""
    on_failure: Literal["drop", "stop"] = "drop"
    """Whether a sample that still fails is left out of the update and counted, or stops the run. It never gets score
    0."""
    max_failed_share: Proportion = 0.05
    """Share of the samples of a step that may fail. More stop the run."""
    environment: dict[PlainName, Text] = field(default_factory=dict)
    """Environment variables for the functions (`JUDGE_API_KEY: ${oc.env:JUDGE_API_KEY}`). Variables of the run that may
    hold secrets are not passed on."""

    def scores(self, data_source: str) -> bool:
        return any(function.weight and function.scores(data_source) for function in self.functions.values())

    def told(self, environment: Mapping[str, str]) -> RewardConfig:
        return replace(self, environment={**self.environment, **environment})


JUDGE = "judge"
"""Name of the role and of the reward function; the run's own servers also use it as the name of their model."""
URLS_VARIABLE, KEY_VARIABLE = "MRL_JUDGE_URLS", "MRL_JUDGE_API_KEY"
"""Variables from which reward workers learn how to reach the run's own judge servers."""


@dataclass(frozen=True, kw_only=True)
class JudgeConfig:
    """A language model that judges responses. The run serves it with its own engines, in the pool of the role
    `judge`."""

    path: Text
    """A directory or a name on the hub, as in `model.path`. The model needs a chat template."""
    tp: Count = 1
    """Tensor parallel size of one engine. As many engines start as fit on the pool."""
    max_tokens: Count | None = None
    """Longest question including its answer. Null uses the model's own limit."""
    vllm: dict[str, Any] = field(default_factory=dict)
    """Passed on to vLLM's engine arguments, as in `rollout.vllm`; also settings of how the judge's model is loaded and
    how it answers."""


@dataclass(frozen=True, kw_only=True)
class JudgeService:
    """The model that judges, and the timeouts and retries of its requests."""

    url: Annotated[str, matching(r"https?://[^\s/]\S*", "an address that begins with http:// or https://")] | None = (
        None
    )
    """Address of an OpenAI-compatible server, without `/chat/completions`: `http://host:8000/v1`. Null uses the run's
    own judge, described in the section `judge`."""
    model: Text | None = None
    """Name of the model on that server. Null with the run's own judge."""
    key_variable: Text | None = None
    """Variable in reward.environment that holds the bearer key."""
    max_tokens: Count = 1024
    temperature: Amount = 0.0
    timeout_s: Seconds = 8.0
    attempts: Count = 3
    backoff_s: Amount = 0.5
    """Pause before the second attempt; it doubles before each further one."""


@dataclass(frozen=True, kw_only=True)
class JudgeVerdict:
    """How the judge's answer is converted to a score."""

    pattern: str = r"(?i)\bscore\W{1,5}?(-?\d+(?:\.\d+)?)"
    """Regular expression with one group. Its last match is the verdict."""
    values: dict[str, float] = field(default_factory=dict)
    """Score of each verdict (`{yes: 1, no: 0}`), case-insensitive. Empty if verdicts are numbers."""
    lowest: float = 0.0
    """Verdict that scores 0. A lower number is not a verdict."""
    highest: float = 10.0
    """Verdict that scores 1. A higher number is not a verdict."""


@dataclass(frozen=True, kw_only=True)
class JudgeOptions:
    """Contents of `reward.functions.NAME.options` for `judge`."""

    service: JudgeService
    template: Annotated[str, Bound("a text, or a file", lambda text: bool(text.strip()))]
    """Question for the judge, with {response} and optionally {prompt} and {ground_truth}; or a file that contains
    it."""
    verdict: JudgeVerdict = field(default_factory=JudgeVerdict)
