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
from mrl.rewards.sample import Sample
from tests.rewards.conftest import Bench, make_sample


class Service(BaseHTTPRequestHandler):
    """Answers as the sample asks. `first` is the answer to the first request."""

    server: HttpService

    def do_POST(self) -> None:
        sample = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((dict(self.headers), sample, time.monotonic()))
        extra = sample["extra_info"]
        action = extra["first"] if "first" in extra and len(self.server.requests) == 1 else extra["do"]
        getattr(self, action)(sample)

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
        time.sleep(0.5)
        self.good(sample)

    def drip(self, sample: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        for _ in range(800):
            try:
                self.wfile.write(b" ")
                self.wfile.flush()
            except OSError:
                return
            time.sleep(0.05)

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

    def log_message(self, format: str, *args: Any) -> None:
        """Write no log."""


class HttpService(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Service)
        self.requests: list[tuple[dict[str, str], dict[str, Any], float]] = []
        self.url = f"http://127.0.0.1:{self.server_port}/"


@pytest.fixture
def service() -> Iterator[HttpService]:
    with HttpService() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def judge(server: HttpService, **options: Any) -> dict[str, RewardFunctionConfig]:
    given = {"url": server.url, "timeout_s": 0.3, "backoff_s": 0.05, **options}
    return {"judge": RewardFunctionConfig(name="http", options=given)}


def asked(server: HttpService, sample: Sample, **options: Any) -> Any:
    return asyncio.run(http(sample, server.url, **{"timeout_s": 0.2, "backoff_s": 0.0, **options}))


def test_scores_and_parts(bench: Bench, service: HttpService) -> None:
    good, number, text = bench.manager(functions=judge(service)).score(
        [make_sample("good", 3), make_sample("number"), make_sample("text")]
    )
    assert isinstance(good, Score)
    assert isinstance(number, Score)
    assert (good.value, good.parts, number.value) == (3.0, {"judge": 3.0, "judge/length": 9.0}, 0.25)
    assert isinstance(text, Failure)
    assert text.kind == "bad_result"


@pytest.mark.parametrize(
    ("do", "last"),
    [
        ("slow", "TimeoutError: timed out"),
        ("garbage", "not JSON: b'<html>oh</html>'"),
        ("truncated", "the body ended 489 bytes too early"),
        ("hang_up", "RemoteDisconnected: Remote end closed connection without response"),
    ],
)
def test_a_request_without_an_answer_is_retried(service: HttpService, do: str, last: str) -> None:
    assert asked(service, make_sample("good", 5, first=do))["score"] == 5.0
    assert len(service.requests) == 2
    with pytest.raises(RewardError, match=f"gave no answer in 2 attempts; the last: {last}"):
        asked(service, make_sample(do), attempts=2)
    assert len(service.requests) == 4


def test_an_answer_that_is_too_long_is_not_retried(service: HttpService) -> None:
    with pytest.raises(RewardError, match="answered with more than 65536 bytes"):
        asked(service, make_sample("huge"))
    assert len(service.requests) == 1


def test_a_service_that_drips_meets_the_limit(bench: Bench, service: HttpService) -> None:
    begin = time.monotonic()
    (outcome,) = bench.manager(functions=judge(service), limit_s=0.6).score([make_sample("drip")])
    assert isinstance(outcome, Failure)
    assert outcome.kind == "timeout"
    assert time.monotonic() - begin < 20, "the answer takes 40 s"


def test_a_service_that_does_not_exist_is_named() -> None:
    with pytest.raises(RewardError, match=r"http://127.0.0.1:9/ gave no answer in 1 attempts; .* Connection refused"):
        asyncio.run(http(make_sample(), "http://127.0.0.1:9/", attempts=1))


def test_the_key_comes_from_the_environment(bench: Bench, service: HttpService) -> None:
    functions = judge(service, key_variable="JUDGE_API_KEY")
    given = bench.manager(functions=functions, environment={"JUDGE_API_KEY": "canary-5up3r"})
    (outcome,) = given.score([make_sample("good", 1)])
    assert isinstance(outcome, Score)
    assert [headers["Authorization"] for headers, _, _ in service.requests] == ["Bearer canary-5up3r"]
    (outcome,) = bench.manager(functions=functions).score([make_sample("good", 2)])
    assert isinstance(outcome, Failure)
    assert outcome.detail == ("judge: JUDGE_API_KEY is not set for reward workers\n  fix: add it to reward.environment")


def test_a_status_that_may_pass_is_retried_and_any_other_is_not(service: HttpService) -> None:
    for status in (408, 425, 429, 500, 502, 503, 504, 400, 401, 403, 404, 410, 422, 501):
        service.requests.clear()
        passes = status in (408, 425, 429, 500, 502, 503, 504)
        expected = f"gave no answer in 3 attempts; the last: status {status}" if passes else f"with status {status}"
        with pytest.raises(RewardError, match=expected):
            asked(service, make_sample("status", status=status))
        assert len(service.requests) == (3 if passes else 1)


def test_the_service_gets_the_whole_sample_as_json(service: HttpService) -> None:
    sample = make_sample("good", 7, deep=[1, {"a": None}])
    assert asked(service, sample) == {"score": 7, "length": 9}
    ((headers, body, _),) = service.requests
    assert body == dataclasses.asdict(sample)
    assert headers["Content-Type"] == headers["Accept"] == "application/json"
    assert "Authorization" not in headers


def test_each_pause_is_twice_the_one_before(service: HttpService) -> None:
    begin = time.monotonic()
    with pytest.raises(RewardError, match="gave no answer in 4 attempts"):
        asked(service, make_sample("status", status=500), attempts=4, backoff_s=0.1)
    end = time.monotonic()
    pauses = [after - before for (*_, before), (*_, after) in itertools.pairwise(service.requests)]
    assert all(0.1 * 2**k <= pause < 0.1 * 2**k + 0.08 + 0.1 * k for k, pause in enumerate(pauses)), pauses
    assert end - begin < 0.7 + 0.6, "and none after the last"
