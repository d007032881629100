"""The server of programs: who may ask, and what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from mrl.agents.chat_server import MAX_REQUEST_BYTES, ChatServer, Session


async def post(address: str, path: str, body: bytes, key: str = "", head: str = "") -> tuple[int, dict[str, Any]]:
    """The status and the body of an answer."""
    host, _, rest = address.removeprefix("http://").partition("/")
    reader, writer = await asyncio.open_connection(*host.split(":"))
    head = head or f"POST /{rest}{path} HTTP/1.1\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(body)}"
    writer.write(f"{head}\r\n\r\n".encode() + body)
    await writer.drain()
    answer = await reader.read()
    writer.close()
    first, _, content = answer.partition(b"\r\n\r\n")
    return int(first.split()[1]), json.loads(content)


def served(act: Callable[[Session, str], Awaitable[None]]) -> None:
    async def run() -> None:
        session, address = await ChatServer().open()
        await act(session, address)

    asyncio.run(asyncio.wait_for(run(), 20))


def test_nobody_asks_without_address_and_key() -> None:
    async def act(session: Session, address: str) -> None:
        for key, where in (("", address), ("x" * 32, address), (session.key, address.replace(session.key, "x" * 32))):
            status, body = await post(where, "/chat/completions", b"{}", key)
            assert (status, body["error"]["message"]) == (401, "no conversation has this address and key")
        assert session.requests.empty()

    served(act)


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/responses", b"{}", 404, "there are POST chat/completions, POST score and GET models, not POST responses"),
        ("/chat/completions", b"[1]", 400, "not an object"),
        ("/chat/completions", b"{", 400, "not JSON"),
        ("/chat/completions", b"[" * 100_000, 400, "not JSON"),
        ("/score", b'{"score": "high"}', 400, "a score is"),
        ("/score", b'{"parts": {"a": 1}}', 400, "a score is"),
    ],
)
def test_what_is_no_request_is_told_so(path: str, body: bytes, status: int, said: str) -> None:
    async def act(session: Session, address: str) -> None:
        answered, content = await post(address, path, body, session.key)
        assert answered == status
        assert said in content["error"]["message"]

    served(act)


@pytest.mark.parametrize("head", ["POST / HTTP/1.1\r\nContent-Length: many", "nonsense"])
def test_what_is_no_http_is_told_so(head: str) -> None:
    async def act(session: Session, address: str) -> None:
        assert (await post(address, "", b"", head=head))[0] == 400

    served(act)


def test_there_is_one_model() -> None:
    async def act(session: Session, address: str) -> None:
        head = f"GET {address[address.index('/c/') :]}/models HTTP/1.1\r\nAuthorization: Bearer {session.key}"
        status, body = await post(address, "", b"", head=head)
        assert (status, [each["id"] for each in body["data"]]) == (200, ["policy"])

    served(act)


def test_a_request_has_its_size() -> None:
    async def act(session: Session, address: str) -> None:
        head = f"POST / HTTP/1.1\r\nContent-Length: {MAX_REQUEST_BYTES + 1}"
        assert (await post(address, "", b"", head=head))[0] == 413

    served(act)


def test_a_score_is_kept_and_what_waits_at_the_end_is_told() -> None:
    async def act(session: Session, address: str) -> None:
        assert await post(address, "/score", b'{"score": 0.5, "parts": {"a": 1}}', session.key) == (200, {})
        assert (session.score, session.parts) == (0.5, {"a": 1.0})

    served(act)
