"""A score from a service elsewhere: a judge model, a code sandbox, a reward model behind HTTP."""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import time
import urllib.error
import urllib.request
from typing import Any

from mrl.errors import RewardError
from mrl.rewards.sample import Sample

_MAX_BYTES = 64 << 10
_WORTH_ANOTHER_TRY = {408, 425, 429, 500, 502, 503, 504}


class _NoAnswer(Exception):
    """An attempt that may go better the next time."""


def score(
    sample: Sample,
    url: str,
    timeout_s: float = 5.0,
    attempts: int = 3,
    backoff_s: float = 0.5,
    key_variable: str | None = None,
) -> Any:
    """What the service at `url` answers to a POST of the sample as JSON: a number, or numbers by name with `score`,
    and the text that it judged as `"answer"`.

    No answer within `timeout_s`, a broken or unreadable one, and a status that may pass (408, 425, 429, 5xx) are
    tried again, `attempts` times in all, after `backoff_s`, then twice that, and so on; any other status is an error
    at once. `key_variable` names the variable of reward.environment that holds the bearer key. The limit of the
    sample holds for all attempts together; reward.max_samples_per_s bounds the rate.
    """
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    if key_variable is not None:
        if key_variable not in os.environ:
            raise RewardError(f"{key_variable} is not set for reward workers", fix="add it to reward.environment")
        headers["Authorization"] = f"Bearer {os.environ[key_variable]}"
    request = urllib.request.Request(url, json.dumps(dataclasses.asdict(sample)).encode(), headers)
    for attempt in range(attempts):
        try:
            return _ask(request, timeout_s)
        except _NoAnswer as error:
            reason = error
        if attempt + 1 < attempts:
            time.sleep(backoff_s * 2**attempt)
    raise RewardError(f"{url} gave no score in {attempts} attempts; the last: {reason}")


def _ask(request: urllib.request.Request, timeout_s: float) -> Any:
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            body = answer.read(_MAX_BYTES + 1)
            # `read` with a size takes the end of the stream for the end of the body.
            if answer.length and len(body) <= _MAX_BYTES:
                raise _NoAnswer(f"the body ended {answer.length} bytes too early")
    except urllib.error.HTTPError as error:
        if error.code in _WORTH_ANOTHER_TRY:
            raise _NoAnswer(f"status {error.code}") from error
        raise RewardError(f"{request.full_url} answered with status {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        raise _NoAnswer(f"{type(error).__name__}: {error}") from error
    if len(body) > _MAX_BYTES:
        raise RewardError(f"{request.full_url} answered with more than {_MAX_BYTES} bytes")
    try:
        return json.loads(body)
    except ValueError as error:
        raise _NoAnswer(f"not JSON: {body[:80]!r}") from error
