"""JSON posted to a service and JSON back, tried again where that may help; its key goes nowhere else."""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from mrl.errors import RewardError
from mrl.redaction import REDACTED

_WORTH_ANOTHER_TRY = {408, 425, 429, 500, 502, 503, 504}


class _NoAnswer(Exception):
    """An attempt that may go better the next time."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Leaves a redirect unfollowed: the key and the sample would go with it, to whatever host it names."""

    def redirect_request(self, *arguments: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)
_DIRECT_OPENER = urllib.request.build_opener(_NoRedirects, urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Service:
    """Where to post to, and how patiently."""

    url: str
    timeout_s: float
    attempts: int
    backoff_s: float
    key_variable: str | None
    max_bytes: int = 64 << 10
    uses_proxies: bool = True
    """Whether it goes through the proxies that the environment names."""

    def post(self, question: Any) -> Any:
        """Return the answer; one that does not come, or not as JSON, is an error that holds no key."""
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.key_variable is not None:
            if self.key_variable not in os.environ:
                fix = "add it to reward.environment"
                raise RewardError(f"{self.key_variable} is not set for reward workers", fix=fix)
            headers["Authorization"] = f"Bearer {os.environ[self.key_variable]}"
        try:
            return self._ask(urllib.request.Request(self.url, json.dumps(question).encode(), headers))
        except RewardError as error:
            raise RewardError(self.hide(f"{self.url.partition('?')[0]} {error.what}")) from None

    def hide(self, text: str) -> str:
        """Return the text without the key, which a service may have sent back."""
        key = os.environ.get(self.key_variable or "")
        return text.replace(key, REDACTED) if key else text

    def _ask(self, request: urllib.request.Request) -> Any:
        for attempt in range(self.attempts):
            try:
                return _answer(request, self)
            except _NoAnswer as error:
                reason = error
            if attempt + 1 < self.attempts:
                time.sleep(self.backoff_s * 2**attempt)
        raise RewardError(f"gave no answer in {self.attempts} attempts; the last: {reason}")


def _answer(request: urllib.request.Request, service: Service) -> Any:
    opener, max_bytes = _OPENER if service.uses_proxies else _DIRECT_OPENER, service.max_bytes
    try:
        with opener.open(request, timeout=service.timeout_s) as answer:
            body = answer.read(max_bytes + 1)
            # `read` with a size takes the end of the stream for the end of the body.
            if answer.length and len(body) <= max_bytes:
                raise _NoAnswer(f"the body ended {answer.length} bytes too early")
    except urllib.error.HTTPError as error:
        if error.code in _WORTH_ANOTHER_TRY:
            raise _NoAnswer(f"status {error.code}") from error
        unfollowed = "; redirects are not followed" if 300 <= error.code < 400 else ""
        raise RewardError(f"answered with status {error.code} {error.reason}{unfollowed}") from error
    except (OSError, http.client.HTTPException) as error:
        raise _NoAnswer(f"{type(error).__name__}: {error}") from error
    if len(body) > max_bytes:
        raise RewardError(f"answered with more than {max_bytes} bytes")
    try:
        return json.loads(body)
    except ValueError as error:
        raise _NoAnswer(f"not JSON: {body[:80]!r}") from error
