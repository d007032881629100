"""A verdict of another language model, behind an OpenAI-compatible address or on engines of the run's own."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import random
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from mrl.config.reward import JUDGE, KEY_VARIABLE, URLS_VARIABLE, JudgeService, JudgeVerdict
from mrl.errors import RewardError
from mrl.files import read_text
from mrl.rewards.http_post import Service
from mrl.rewards.sample import Sample

_PLACE = re.compile(r"\{(prompt|response|ground_truth)\}")
_MAX_BYTES = 4 << 20
_COUNTS = ("prompt_tokens", "completion_tokens")


@dataclasses.dataclass(frozen=True)
class _Answer:
    """What the judge wrote, of which the verdict, and what it cost."""

    verdict: str
    num_tokens: Mapping[str, int]
    is_new: Iterator[bool] = dataclasses.field(default_factory=lambda: iter((True,)))
    """Who takes its one item has asked; whoever comes later has not."""


async def score(
    sample: Sample, service: dict[str, Any], template: str, verdict: dict[str, Any] | None = None
) -> dict[str, float]:
    """The judge's verdict on the response: a number between `lowest` and `highest` as 0 to 1, or one of `values`.

    `template` is what it is asked, with {response}, {prompt} (as rendered) and {ground_truth}, or a file with that
    text. The verdict is what the last match of `pattern` holds in its group; an answer without one is a failure, never
    a 0. A worker asks the same question once; `asked` says whether it did, and the tokens of the judge are counted.
    The limit of the sample holds for all attempts together. `mrl/config/judge.py` has all that `service` and
    `verdict` may say.
    """
    reading = JudgeVerdict(**(verdict or {}))
    values = {"prompt": sample.prompt, "response": sample.response, "ground_truth": _text(sample.ground_truth)}
    # In one pass: what a response holds is no place to fill in.
    question = _PLACE.sub(lambda place: values[place[1]], _template(template))
    judge = JudgeService(**service)
    try:
        answer = await asyncio.to_thread(_ask, judge, question, reading.pattern)
        value = _score(answer.verdict, reading)
    except RewardError as error:
        raise RewardError(_posting(judge).hide(str(error))) from None
    asked = next(answer.is_new, False)
    tokens = {name: float(number) if asked else 0.0 for name, number in answer.num_tokens.items()}
    return {"score": value, "asked": float(asked), **tokens}


def _posting(judge: JudgeService) -> Service:
    """Return where it is asked: at its address, or at any of the run's own engines."""
    url, key_variable = judge.url, judge.key_variable
    if url is None:
        if URLS_VARIABLE not in os.environ:
            raise RewardError("service.url is not given, and there is no engine of this run's own to ask")
        url, key_variable = random.choice(os.environ[URLS_VARIABLE].split()), KEY_VARIABLE
    url = f"{url.rstrip('/')}/chat/completions"
    return Service(url, judge.timeout_s, judge.attempts, judge.backoff_s, key_variable, _MAX_BYTES)


@lru_cache(maxsize=1000)
def _ask(judge: JudgeService, question: str, pattern: str) -> _Answer:
    """Return the judge's answer; what is none is an error, and asked again the next time."""
    told = {"role": "user", "content": question}
    limits = {"max_tokens": judge.max_tokens, "temperature": judge.temperature}
    answer = _posting(judge).post({"model": judge.model or JUDGE, "messages": [told], **limits})
    try:
        text = answer["choices"][0]["message"]["content"]
        usage = answer.get("usage") or {}
        num_tokens = {name: int(usage[name]) for name in _COUNTS if name in usage}
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise RewardError(f"the judge's answer is no chat completion: {error!r:.100}") from error
    if not isinstance(text, str):
        raise RewardError(f"the judge wrote no text: its message holds {text!r:.100}")
    found = list(re.finditer(pattern, text))
    if not found:
        raise RewardError(f"the judge's answer has no verdict; it ends with {text[-200:]!r}")
    return _Answer(str(found[-1][1]).strip(), num_tokens)


def _score(verdict: str, reading: JudgeVerdict) -> float:
    if reading.values:
        worth = {name.casefold(): value for name, value in reading.values.items()}
        if verdict.casefold() not in worth:
            raise RewardError(f"the verdict {verdict!r:.100} is none of {', '.join(reading.values)}")
        return float(worth[verdict.casefold()])
    try:
        number = float(verdict)
    except ValueError:
        raise RewardError(f"the verdict {verdict!r:.100} is not a number") from None
    if not reading.lowest <= number <= reading.highest:
        raise RewardError(f"the verdict {number:g} is not between {reading.lowest:g} and {reading.highest:g}")
    return (number - reading.lowest) / (reading.highest - reading.lowest)


@lru_cache(maxsize=8)
def _template(template: str) -> str:
    if "{response}" in template:
        return template
    try:
        text = read_text(template)
    except (OSError, ValueError) as error:
        raise RewardError(f"the template has no {{response}}, and is no file that can be read: {error}") from error
    if "{response}" not in text:
        raise RewardError("the template has no {response}", where=template)
    return text


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
