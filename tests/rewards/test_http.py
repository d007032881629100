"""The remote reward with a real server that behaves in every way."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from mrl.config.reward import RewardFunctionConfig
from mrl.errors import RewardError
from mrl.rewards.functions.services import http
from mrl.rewards.outcome import Failure, Score
from tests.rewards.conftest import Bench, make_sample


class Service(BaseHTTPRequestHandler):
    """Answers as the sample asks. `first` is the answer to the first attempt of a row."""

    def do_POST(self) -> None:
        sample = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.whole.append((dict(self.headers), sample, time.monotonic()))  # type: ignore[attr-defined]
        seen: list[tuple[int, str | None]] = self.server.seen  # type: ignore[attr-defined]
        is_first = sample["row_id"] not in {row for row, _ in seen}
        seen.append((sample["row_id"], self.headers["Authorization"]))
        extra = sample["extra_info"]
        getattr(self, extra["first"] if is_first and "first" in extra else extra["do"])(sample)

    def answer(self, body: bytes, status: int = 200, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)

    def good(self, sample: dict[str, Any]) -> None:
        self.answer(json.dumps({"score": sample["row_id"], "length": len(sample["response"])}).encode())

    def number(self, sample: dict[str, Any]) -> None:
        self.answer(b"0.25")

    def slow(self, sample: dict[str, Any]) -> None:
        time.sleep(2)
        self.good(sample)

    def drip(self, sample: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        for _ in range(100):
            try:
                self.wfile.write(b" ")
                self.wfile.flush()
            except OSError:
                return
            time.sleep(0.05)

    def error(self, sample: dict[str, Any]) -> None:
        self.answer(b"oh", 500)

    def busy(self, sample: dict[str, Any]) -> None:
        self.answer(b"later", 429)

    def refuse(self, sample: dict[str, Any]) -> None:
        self.answer(b"who?", 401)

    def status(self, sample: dict[str, Any]) -> None:
        self.answer(b"so", sample["extra_info"]["status"])

    def garbage(self, sample: dict[str, Any]) -> None:
        self.answer(b"<html>oh</html>")

    def truncated(self, sample: dict[str, Any]) -> None:
        self.answer(b'{"score": 1', length=500)

    def hang_up(self, sample: dict[str, Any]) -> None:
        self.connection.close()

    def huge(self, sample: dict[str, Any]) -> None:
        self.answer(b"[" + b"1," * 100_000 + b"1]")

    def text(self, sample: dict[str, Any]) -> None:
        self.answer(b'"good"')

    def not_a_number(self, sample: dict[str, Any]) -> None:
        self.answer(b"NaN")

    def log_message(self, format: str, *args: Any) -> None:
        """Write no log."""


@pytest.fixture
def service() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    server.daemon_threads = True
    server.seen = []  # type: ignore[attr-defined]
    server.whole = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def judge(server: ThreadingHTTPServer, **options: Any) -> dict[str, RewardFunctionConfig]:
    given = {"url": f"http://127.0.0.1:{server.server_port}/", "timeout_s": 0.3, "backoff_s": 0.05, **options}
    return {"judge": RewardFunctionConfig(name="http", options=given)}


def test_scores_and_parts(bench: Bench, service: ThreadingHTTPServer) -> None:
    manager = bench.manager(functions=judge(service))
    good, number = manager.score([make_sample("good", 3), make_sample("number")])
    assert isinstance(good, Score)
    assert isinstance(number, Score)
    assert (good.value, good.parts, number.value) == (3.0, {"judge": 3.0, "judge/length": 9.0}, 0.25)


@pytest.mark.parametrize("first", ["slow", "error", "busy", "garbage", "truncated", "hang_up"])
def test_what_may_pass_is_tried_again(bench: Bench, service: ThreadingHTTPServer, first: str) -> None:
    (outcome,) = bench.manager(functions=judge(service), limit_s=3).score([make_sample("good", 5, first=first)])
    assert isinstance(outcome, Score)
    assert outcome.value == 5.0
    assert len(service.seen) == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("do", "attempts", "message"),
    [
        ("slow", 2, "gave no answer in 2 attempts; the last: TimeoutError: timed out"),
        ("error", 2, "gave no answer in 2 attempts; the last: status 500"),
        ("busy", 2, "gave no answer in 2 attempts; the last: status 429"),
        ("garbage", 2, "gave no answer in 2 attempts; the last: not JSON: b'<html>oh</html>'"),
        ("truncated", 2, "gave no answer in 2 attempts; the last: the body ended 489 bytes too early"),
        (
            "hang_up",
            2,
            "gave no answer in 2 attempts; the last: RemoteDisconnected: Remote end closed connection without response",
        ),
        ("refuse", 1, "answered with status 401 Unauthorized"),
        ("huge", 1, "answered with more than 65536 bytes"),
    ],
)
def test_no_score_is_a_failure(
    bench: Bench, service: ThreadingHTTPServer, do: str, attempts: int, message: str
) -> None:
    functions = judge(service, attempts=2)
    (outcome,) = bench.manager(functions=functions, limit_s=3).score([make_sample(do)])
    assert isinstance(outcome, Failure)
    assert (outcome.kind, outcome.detail) == ("raised", f"judge: http://127.0.0.1:{service.server_port}/ {message}")
    assert len(service.seen) == attempts  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("do", "message"),
    [
        ("text", "judge: the result is of type str of length 4, not a number"),
        ("not_a_number", "judge: the result is nan, not a finite number"),
    ],
)
def test_what_the_service_says_is_checked(bench: Bench, service: ThreadingHTTPServer, do: str, message: str) -> None:
    (outcome,) = bench.manager(functions=judge(service)).score([make_sample(do)])
    assert isinstance(outcome, Failure)
    assert (outcome.kind, outcome.detail) == ("bad_result", message)


def test_a_service_that_drips_meets_the_limit(bench: Bench, service: ThreadingHTTPServer) -> None:
    begin = time.monotonic()
    (outcome,) = bench.manager(functions=judge(service), limit_s=0.6).score([make_sample("drip")])
    assert isinstance(outcome, Failure)
    assert (outcome.kind, outcome.detail) == ("timeout", "no answer within 0.6 s")
    assert time.monotonic() - begin < 1.6


def test_nobody_there(bench: Bench, service: ThreadingHTTPServer) -> None:
    functions = {"judge": RewardFunctionConfig(name="http", options={"url": "http://127.0.0.1:9/", "attempts": 1})}
    (outcome,) = bench.manager(functions=functions).score([make_sample()])
    assert isinstance(outcome, Failure)
    assert outcome.detail == (
        "judge: http://127.0.0.1:9/ gave no answer in 1 attempts; the last: "
        "URLError: <urlopen error [Errno 111] Connection refused>"
    )


def test_the_key_comes_from_the_environment(bench: Bench, service: ThreadingHTTPServer) -> None:
    functions = judge(service, key_variable="JUDGE_API_KEY")
    given = bench.manager(functions=functions, environment={"JUDGE_API_KEY": "canary-5up3r"})
    (outcome,) = given.score([make_sample("good", 1)])
    assert isinstance(outcome, Score)
    assert service.seen == [(1, "Bearer canary-5up3r")]  # type: ignore[attr-defined]
    (outcome,) = bench.manager(functions=functions).score([make_sample("good", 2)])
    assert isinstance(outcome, Failure)
    assert outcome.detail == ("judge: JUDGE_API_KEY is not set for reward workers\n  fix: add it to reward.environment")


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
def test_a_status_that_may_pass_is_waited_out(service: ThreadingHTTPServer, status: int) -> None:
    with pytest.raises(RewardError, match=f"gave no answer in 3 attempts; the last: status {status}"):
        asyncio.run(http(make_sample("status", status=status), address(service), backoff_s=0.0))
    assert len(service.seen) == 3  # type: ignore[attr-defined]


@pytest.mark.parametrize("status", [400, 403, 404, 410, 422, 501])
def test_a_status_that_will_not_pass_is_an_error_at_once(service: ThreadingHTTPServer, status: int) -> None:
    with pytest.raises(RewardError, match=f"answered with status {status}"):
        asyncio.run(http(make_sample("status", status=status), address(service), backoff_s=0.0))
    assert len(service.seen) == 1  # type: ignore[attr-defined]


def test_the_service_gets_the_whole_sample_as_json(service: ThreadingHTTPServer) -> None:
    sample = make_sample("good", 7, deep=[1, {"a": None}])
    assert asyncio.run(http(sample, address(service))) == {"score": 7, "length": 9}
    ((headers, body, _),) = service.whole  # type: ignore[attr-defined]
    assert body == dataclasses.asdict(sample)
    assert headers["Content-Type"] == headers["Accept"] == "application/json"
    assert "Authorization" not in headers


def test_each_pause_is_twice_the_one_before(service: ThreadingHTTPServer) -> None:
    begin = time.monotonic()
    with pytest.raises(RewardError, match="gave no answer in 4 attempts"):
        asyncio.run(http(make_sample("error"), address(service), attempts=4, backoff_s=0.1))
    end = time.monotonic()
    times = [at for _, _, at in service.whole]  # type: ignore[attr-defined]
    pauses = [after - before for before, after in itertools.pairwise(times)]
    assert all(0.1 * 2**k <= pause < 0.1 * 2**k + 0.08 + 0.1 * k for k, pause in enumerate(pauses)), pauses
    assert end - begin < 0.7 + 0.6, "and none after the last"


def address(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_port}/"
