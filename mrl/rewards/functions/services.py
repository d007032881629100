"""Scores from services: any HTTP service, or the verdict of another language model.

A judge has an OpenAI-compatible address, or is served by the run's own engines.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from http.client import HTTPException
from typing import Any

from mrl.config.reward import JUDGE, KEY_VARIABLE, URLS_VARIABLE, JudgeService, JudgeVerdict
from mrl.errors import RewardError
from mrl.files import read_text
from mrl.redaction import REDACTED
from mrl.rewards.sample import Sample

_WORTH_ANOTHER_TRY = {408, 425, 429, 500, 502, 503, 504}


class _NoAnswer(Exception):
    """A failed attempt that may succeed when retried."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Does not follow redirects: the key and the sample would be sent to another host."""

    def redirect_request(self, *arguments: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)
_DIRECT_OPENER = urllib.request.build_opener(_NoRedirects, urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Service:
    url: str
    timeout_s: float
    attempts: int
    backoff_s: float
    key_variable: str | None
    max_bytes: int = 64 << 10
    uses_proxies: bool = True
    """Whether requests use the proxies of the environment."""

    def post(self, question: Any) -> Any:
        """Return the answer. If it is missing or not JSON, raise an error without the key."""
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.key_variable is not None:
            if self.key_variable not in os.environ:
                fix = "add it to reward.environment"
                raise RewardError(f"{self.key_variable} is not set for reward workers", fix=fix)
            headers["Authorization"] = f"Bearer {os.environ[self.key_variable]}"
        request = urllib.request.Request(self.url, json.dumps(question).encode(), headers)
        try:
            for attempt in range(self.attempts):
                try:
                    return _posted(request, self)
                except _NoAnswer as error:
                    reason = error
                if attempt + 1 < self.attempts:
                    time.sleep(self.backoff_s * 2**attempt)
            raise RewardError(f"gave no answer in {self.attempts} attempts; the last: {reason}")
        except RewardError as error:
            raise RewardError(self.hide(f"{self.url.partition('?')[0]} {error.what}")) from None

    def hide(self, text: str) -> str:
        """Return the text without the key, which a service may have sent back."""
        key = os.environ.get(self.key_variable or "")
        return text.replace(key, REDACTED) if key else text


def _posted(request: urllib.request.Request, service: Service) -> Any:
    opener, max_bytes = _OPENER if service.uses_proxies else _DIRECT_OPENER, service.max_bytes
    try:
        with opener.open(request, timeout=service.timeout_s) as answer:
            body = answer.read(max_bytes + 1)
            # `read` with a size treats the end of the stream as the end of the body.
            if answer.length and len(body) <= max_bytes:
                raise _NoAnswer(f"the body ended {answer.length} bytes too early")
    except urllib.error.HTTPError as error:
        if error.code in _WORTH_ANOTHER_TRY:
            raise _NoAnswer(f"status {error.code}") from error
        unfollowed = "; redirects are not followed" if 300 <= error.code < 400 else ""
        raise RewardError(f"answered with status {error.code} {error.reason}{unfollowed}") from error
    except (OSError, HTTPException) as error:
        raise _NoAnswer(f"{type(error).__name__}: {error}") from error
    if len(body) > max_bytes:
        raise RewardError(f"answered with more than {max_bytes} bytes")
    try:
        return json.loads(body)
    except ValueError as error:
        raise _NoAnswer(f"not JSON: {body[:80]!r}") from error


async def http(
    sample: Sample,
    url: str,
    timeout_s: float = 5.0,
    attempts: int = 3,
    backoff_s: float = 0.5,
    key_variable: str | None = None,
) -> Any:
    """Score with the service at `url`: POST the sample as JSON, and return its answer: a number, or numbers by name
    with `score`, and the text that it judged as `"answer"`.

    No answer within `timeout_s`, a broken or unreadable answer, and a temporary status (408, 425, 429, 5xx) are
    retried, up to `attempts` times in total, after `backoff_s`, then twice that, and so on. Any other status, including
    a redirect, is an error at once. `key_variable` is the variable of reward.environment that holds the bearer key. The
    limit of the sample applies to all attempts together; reward.max_samples_per_s limits the rate.
    """
    service = Service(url, timeout_s, attempts, backoff_s, key_variable)
    return await asyncio.to_thread(service.post, asdict(sample))


_PLACE = re.compile(r"\{(prompt|response|ground_truth)\}")
_COUNTS = ("prompt_tokens", "completion_tokens")


@dataclass(frozen=True)
class _Answer:
    """The judge's verdict, and the tokens that it used."""

    verdict: str
    num_tokens: Mapping[str, int]
    is_new: Iterator[bool] = field(default_factory=lambda: iter((True,)))
    """Yields one item: the caller that takes it asked the judge, later callers reused the answer."""


async def judge(
    sample: Sample, service: dict[str, Any], template: str, verdict: dict[str, Any] | None = None
) -> dict[str, float]:
    """Score the judge's verdict on the response: a number between `lowest` and `highest`, scaled to 0 to 1, or one of
    `values`.

    `template` is the question, with {response}, {prompt} (as rendered) and {ground_truth}, or a file that contains it.
    The verdict is the group of the last match of `pattern`; an answer without a verdict is a failure, never a 0. A
    worker asks the same question once; `asked` is 1 if it was asked for this sample, and the judge's tokens are
    counted. The limit of the sample applies to all attempts together. `mrl/config/reward.py` documents `service` and
    `verdict`.
    """
    reading = JudgeVerdict(**(verdict or {}))
    truth = sample.ground_truth
    truth = truth if isinstance(truth, str) else json.dumps(truth, ensure_ascii=False)
    values = {"prompt": sample.prompt, "response": sample.response, "ground_truth": truth}
    # In one pass, so that placeholders inside a response are not filled in.
    question = _PLACE.sub(lambda place: values[place[1]], _template(template))
    model = JudgeService(**service)
    try:
        answer = await asyncio.to_thread(_ask, model, question, reading.pattern)
        value = _score(answer.verdict, reading)
    except RewardError as error:
        raise RewardError(_posting(model).hide(str(error))) from None
    asked = next(answer.is_new, False)
    tokens = {name: float(number) if asked else 0.0 for name, number in answer.num_tokens.items()}
    return {"score": value, "asked": float(asked), **tokens}


def _posting(model: JudgeService) -> Service:
    """Return the service of a judge: at its address, or one of the run's own engines."""
    url, key_variable = model.url, model.key_variable
    if url is None:
        if URLS_VARIABLE not in os.environ:
            raise RewardError("service.url is not set, and this run has no judge engine")
        url, key_variable = random.choice(os.environ[URLS_VARIABLE].split()), KEY_VARIABLE
    url = f"{url.rstrip('/')}/chat/completions"
    return Service(url, model.timeout_s, model.attempts, model.backoff_s, key_variable, max_bytes=4 << 20)


@lru_cache(maxsize=1000)
def _ask(model: JudgeService, question: str, pattern: str) -> _Answer:
    """Return the judge's answer. An invalid answer is an error, and is requested again next time."""
    message = {"role": "user", "content": question}
    limits = {"max_tokens": model.max_tokens, "temperature": model.temperature}
    answer = _posting(model).post({"model": model.model or JUDGE, "messages": [message], **limits})
    try:
        text = answer["choices"][0]["message"]["content"]
        usage = answer.get("usage") or {}
        num_tokens = {name: int(usage[name]) for name in _COUNTS if name in usage}
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise RewardError(f"the judge's answer is not a chat completion: {error!r:.100}") from error
    if not isinstance(text, str):
        raise RewardError(f"the judge wrote no text: its message contains {text!r:.100}")
    matches = list(re.finditer(pattern, text))
    if not matches:
        raise RewardError(f"the judge's answer has no verdict; it ends with {text[-200:]!r}")
    return _Answer(str(matches[-1][1]).strip(), num_tokens)


def _score(verdict: str, reading: JudgeVerdict) -> float:
    if reading.values:
        worth = {name.casefold(): value for name, value in reading.values.items()}
        if verdict.casefold() not in worth:
            raise RewardError(f"the verdict {verdict!r:.100} is not one of {', '.join(reading.values)}")
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
        raise RewardError(f"the template has no {{response}}, and is not a readable file: {error}") from error
    if "{response}" not in text:
        raise RewardError("the template has no {response}", where=template)
    return text
