"""A score from a service elsewhere: a code sandbox, a reward model behind HTTP, a verifier."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from mrl.rewards.http_post import Service
from mrl.rewards.sample import Sample


async def score(
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
    tried again, `attempts` times in all, after `backoff_s`, then twice that, and so on; any other status, a redirect
    included, is an error at once. `key_variable` names the variable of reward.environment that holds the bearer key.
    The limit of the sample holds for all attempts together; reward.max_samples_per_s bounds the rate.
    """
    service = Service(url, timeout_s, attempts, backoff_s, key_variable)
    return await asyncio.to_thread(service.post, dataclasses.asdict(sample))
