"""The section `judge`, and the options of the reward function of that name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from mrl.config.bounds import Amount, Bound, Count, Seconds, Text, matching

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
    """Passed on to vLLM's engine arguments."""


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
