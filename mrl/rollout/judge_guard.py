"""Key check for all requests to the judge server: vLLM's own check skips some paths."""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable
from typing import Any

OPEN_PATH = "/health"
SERVER_KEY_VARIABLE = "VLLM_API_KEY"
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class RequireKey:
    """ASGI middleware that rejects requests without the key."""

    def __init__(self, app: Callable[[dict[str, Any], Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ[SERVER_KEY_VARIABLE]}".encode()

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        authorization = dict(scope.get("headers", ())).get(b"authorization", b"")
        is_open = scope["type"] == "lifespan" or scope.get("path") == OPEN_PATH
        if is_open or hmac.compare_digest(authorization, self._expected):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b"the key of this server is missing"})
        else:
            await send({"type": "websocket.close", "code": 1008})
