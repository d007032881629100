"""The protection of the judge's server, its settings as flags, and its end with the run."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from mrl.config.mesh import Mesh
from mrl.config.reward import JudgeConfig
from mrl.controller import RankInfo, Rendezvous
from mrl.rollout import judge_server
from mrl.rollout.judge_guard import RequireKey
from mrl.rollout.judge_server import JudgeServer, _flag
from tests.rewards.conftest import MARKER, marked, settle

KEY = "not-to-be-told"


async def _app(scope: Any, receive: Any, send: Any) -> None:
    await send("the app's")


def answer(scope: dict[str, Any]) -> list[Any]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return None

    asyncio.run(RequireKey(_app)(scope, receive, send))
    return sent


def http(path: str, *headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return {"type": "http", "path": path, "headers": list(headers)}


def test_nothing_but_its_health_is_told_without_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    right, wrong = (b"authorization", f"Bearer {KEY}".encode()), (b"authorization", b"Bearer something")
    assert answer(http("/v1/chat/completions", right)) == answer(http("/health")) == ["the app's"]
    assert answer({"type": "lifespan"}) == ["the app's"]
    for refused in (http("/invocations"), http("/v1/models", wrong), http("/health/", wrong), http("/metrics")):
        assert answer(refused)[0]["status"] == 401
    assert answer({"type": "websocket", "path": "/v1/realtime", "headers": []}) == [
        {"type": "websocket.close", "code": 1008}
    ]


def test_settings_are_flags() -> None:
    settings = {"a-name": True, "b": False, "c": None, "d": "text", "e": 0.5, "f": {"kind": [1]}}
    flags = [flag for name, value in settings.items() for flag in _flag(name, value)]
    assert flags == ["--a-name", "--no-b", "--d=text", "--e=0.5", '--f={"kind": [1]}']


@pytest.fixture
def marker() -> Iterator[str]:
    marker = uuid.uuid4().hex
    yield marker
    for pid in marked(marker):
        os.kill(pid, signal.SIGKILL)


def kept(marker: str, script: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "mrl.rollout.kept_process", "sh", "-c", script]
    return subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, MARKER: marker}, stderr=subprocess.PIPE)


FAMILY = "setsid sleep 600 & (setsid sh -c 'sleep 601 & sleep 602' &) ; sleep 603"


def test_whoever_lets_go_of_it_leaves_nothing_behind(marker: str) -> None:
    process = kept(marker, FAMILY)
    assert len(settle(marker, 8, within_s=10)) == 8
    process.communicate()
    assert process.returncode == 0
    assert settle(marker, 0, within_s=1) == set()


def test_whoever_is_killed_has_had_its_children_killed_first(marker: str) -> None:
    process = kept(marker, FAMILY)
    assert len(settle(marker, 8, within_s=10)) == 8
    process.kill()
    process.communicate()
    assert settle(marker, 0, within_s=1) == set()


def test_what_ends_by_itself_takes_its_family_with_it_and_is_told_of(marker: str) -> None:
    process = kept(marker, f"{FAMILY[: -len('sleep 603')]} sleep 0.5; kill -9 $$")
    with process:
        said = process.stderr.read().decode() if process.stderr else ""
    assert process.returncode == 1
    assert "ended by signal 9" in said
    assert settle(marker, 0, within_s=1) == set()


def test_each_engine_serves_on_its_own_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    started: dict[int, str | None] = {}
    monkeypatch.setattr(judge_server, "_answers", lambda url: True)
    monkeypatch.setattr(judge_server, "node_copy", lambda path: path)
    monkeypatch.setattr(judge_server, "Thread", lambda target, args, **_: SimpleNamespace(start=lambda: target(*args)))
    for rank in range(4):
        place = RankInfo("judge", rank, rank, Mesh(4), Rendezvous("127.0.0.1", 0, 4, None))
        server = JudgeServer(place, JudgeConfig(path="judge", tp=2), start_s=1.0)
        server._keep = lambda _, variables, rank=rank: started.update({rank: variables.get("CUDA_VISIBLE_DEVICES")})  # type: ignore[method-assign]
        address = server.serve(["127.0.0.1"] * 4, ["0", "1", "5", "7"], KEY)  # type: ignore[operator]
        assert address.startswith("http://127.0.0.1:") == (rank % 2 == 0)
    assert started == {0: "0,1", 2: "5,7"}
