"""The options of the reward function `judge`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from mrl.config.bounds import Amount, Bound, Count, Seconds, Text, matching


@dataclass(frozen=True, kw_only=True)
class JudgeService:
    """Which model judges, and how patiently it is asked."""

    url: Annotated[str, matching(r"https?://[^\s/]\S*", "an address that begins with http:// or https://")]
    """Of an OpenAI-compatible server, up to where `/chat/completions` follows: `http://host:8000/v1`."""
    model: Text
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
