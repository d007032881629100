"""A chat-completions server for external programs: one server per worker process, one path per conversation.

It supports the part of HTTP that OpenAI's clients need: a request with a length, and one answer per connection.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mrl.agents.chat_completion import problem_of

MAX_REQUEST_BYTES = 8 << 20
_MAX_HEAD_BYTES = 64 << 10
MODEL = "policy"
"""Default name of the trained model for programs."""
_REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 409: "Conflict", 413: "Too Large"}


@dataclass(frozen=True, eq=False)
class ChatRequest:
    body: dict[str, Any]
    answered: asyncio.Future[tuple[int, dict[str, Any]]]

    def answer(self, body: dict[str, Any], status: int = 200) -> None:
        if not self.answered.done():
            self.answered.set_result((status, body))

    def refuse(self, status: int, what: str) -> None:
        self.answer(_error(what), status)


@dataclass(eq=False)
class Session:
    key: str
    """Secret part of the session's address, and its API key."""
    models: Sequence[str] = (MODEL,)
    """Names that the program may use for its model."""
    requests: asyncio.Queue[ChatRequest] = field(default_factory=asyncio.Queue)
    score: float | None = None
    parts: dict[str, float] = field(default_factory=dict)


class ChatServer:
    """The server of this process, on the loopback interface."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._server: asyncio.Server | None = None

    async def open(self, models: Sequence[str] = (MODEL,)) -> tuple[Session, str]:
        """Return a session for a model with these names, and its address. The server starts with the first session."""
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", limit=_MAX_HEAD_BYTES)
        session = Session(secrets.token_urlsafe(24), models)
        self._sessions[session.key] = session
        port = self._server.sockets[0].getsockname()[1]
        return session, f"http://127.0.0.1:{port}/c/{session.key}/v1"

    def close(self, session: Session) -> None:
        """Close a session. Pending requests are answered with an error."""
        self._sessions.pop(session.key, None)
        while not session.requests.empty():
            session.requests.get_nowait().refuse(409, "the conversation is over")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            status, body, streams = await self._answer(reader)
            writer.write(_response(status, body, streams=streams))
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has disconnected
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[int, dict[str, Any], bool]:
        """Return the status and the body for a request, and whether to stream it."""
        try:
            method, path, headers = _head(await reader.readuntil(b"\r\n\r\n"))
            length = int(headers.get("content-length", "0"))
        except (asyncio.LimitOverrunError, ValueError) as error:
            return 400, _error(f"not a request with a length: {error}"), False
        if not 0 <= length <= MAX_REQUEST_BYTES:
            return 413, _error(f"{length} bytes; at most {MAX_REQUEST_BYTES}"), False
        content = await reader.readexactly(length)
        _, _, rest = path.partition("/c/")
        key, _, call = rest.partition("/v1/")
        session = self._sessions.get(key)
        if session is None or not _is_same(headers.get("authorization", ""), f"Bearer {session.key}"):
            return 401, _error("no conversation exists with this address and key"), False
        if (method, call) == ("GET", "models"):
            about = {"object": "model", "created": 0, "owned_by": "mrl"}
            return 200, {"object": "list", "data": [{"id": name, **about} for name in session.models]}, False
        if method != "POST" or call not in ("chat/completions", "score"):
            what = f"use POST chat/completions, POST score or GET models, not {method} {call:.40}"
            return 404, _error(what), False
        try:
            body = json.loads(content)
            if not isinstance(body, dict):
                raise ValueError("not an object")
        except (ValueError, RecursionError) as error:
            return 400, _error(f"the body is not JSON: {error}"), False
        if call == "score":
            return (*_score(session, body), False)
        if problem := problem_of(body, session.models):
            status, what = problem
            return status, _error(what, "model_not_found" if status == 404 else None), False
        request = ChatRequest(body, asyncio.get_running_loop().create_future())
        session.requests.put_nowait(request)
        return (*await request.answered, bool(body.get("stream")))


def _is_same(received: str, key: str) -> bool:
    """Compare as bytes, because `compare_digest` accepts only ASCII text."""
    return secrets.compare_digest(received.encode(), key.encode())


def _head(head: bytes) -> tuple[str, str, Mapping[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    method, path, _ = first.split(" ")
    pairs = (line.partition(":") for line in lines if line)
    return method, path, {name.strip().lower(): value.strip() for name, _, value in pairs}


def _score(session: Session, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Store the score that a program reports, and its parts."""
    score, parts = body.get("score"), body.get("parts") or {}
    if not isinstance(parts, Mapping) or not all(map(_is_number, (score, *parts.values()))):
        return 400, _error('a score must be {"score": 1.0, "parts": {"name": 0.5}}, with finite numbers')
    session.score = float(body["score"])
    session.parts |= {str(name): float(number) for name, number in parts.items()}
    return 200, {}


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False


def _error(what: str, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": what, "type": "invalid_request_error", "param": None, "code": code}}


def _response(status: int, body: dict[str, Any], *, streams: bool) -> bytes:
    kind, content = "application/json", json.dumps(body).encode()
    if streams and status == 200:
        kind, content = "text/event-stream", f"data: {json.dumps(_chunk(body))}\n\ndata: [DONE]\n\n".encode()
    head = f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}"
    return f"{head}\r\nConnection: close\r\n\r\n".encode() + content


def _chunk(body: dict[str, Any]) -> dict[str, Any]:
    """Return an answer as a single chunk, for a client that requested streaming."""
    (choice,) = body["choices"]
    calls = [{"index": number, **call} for number, call in enumerate(choice["message"].get("tool_calls") or ())]
    delta = choice["message"] | ({"tool_calls": calls} if calls else {})
    choices = [{"index": 0, "delta": delta, "finish_reason": choice["finish_reason"]}]
    return {**body, "object": "chat.completion.chunk", "choices": choices}
