"""The judge with a real server: verdicts, failures of every kind, and secrets."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from mrl.config.reward import RewardFunctionConfig
from mrl.errors import RewardError
from mrl.rewards.functions import services
from mrl.rewards.functions.services import judge
from mrl.rewards.manager import RewardManager
from mrl.rewards.outcome import Failure, Score
from mrl.rewards.sample import Sample
from tests.rewards.conftest import Bench, make_sample

TEMPLATE = "Q: {prompt}\nA: {response}\nR: {ground_truth}\nEnd with Score: N, N from 0 to 10."
KEY = "canary-5up3r"


class Judge(BaseHTTPRequestHandler):
    """Answers with the text after `say ` in the question, or does the action after `do `."""

    server: JudgeServer

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = asked["messages"][0]["content"]
        self.server.asked.append((self.path, dict(self.headers), asked))
        if question.startswith("do "):
            getattr(self, question.split()[1])()
        else:
            self.say(question.removeprefix("say "))

    def do_GET(self) -> None:
        """Handle the request that follows a redirect."""
        self.server.asked.append((self.path, dict(self.headers), {}))
        self.say("Score: 10")

    def say(self, text: Any, **more: Any) -> None:
        usage = {"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14}
        self.send(200, {"choices": [{"message": {"role": "assistant", "content": text}}], "usage": usage} | more)

    def send(self, status: int, body: Any, **headers: str) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def away(self) -> None:
        self.send(302, {}, Location=self.server.elsewhere)

    def echo(self) -> None:
        self.say(f"you sent {self.headers['Authorization']}")

    def refuse(self) -> None:
        self.send_response(401, f"not {self.headers['Authorization']}")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def nothing(self) -> None:
        self.send(200, {"error": "no"})

    def silent(self) -> None:
        self.say(None)

    def free(self) -> None:
        self.say("Score: 5", usage=None)

    def slow(self) -> None:
        time.sleep(0.5)
        self.say("Score: 5")

    def learns(self) -> None:
        self.say("no idea" if len(self.server.asked) == 2 else "Score: 5")

    def log_message(self, format: str, *args: Any) -> None:
        """Write no log."""


class JudgeServer(ThreadingHTTPServer):
    daemon_threads = True
    elsewhere = ""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Judge)
        self.asked: list[tuple[str, dict[str, str], dict[str, Any]]] = []


@contextlib.contextmanager
def serving() -> Iterator[JudgeServer]:
    with JudgeServer() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with serving() as server:
        yield server


def service(server: Any, **settings: Any) -> dict[str, Any]:
    url = f"http://127.0.0.1:{server.server_port}/v1"
    return {"url": url, "model": "m", "timeout_s": 0.5, "backoff_s": 0.01} | settings


def judges(bench: Bench, server: Any, settings: dict[str, Any] | None = None, **of_manager: Any) -> RewardManager:
    options = {"service": service(server, **(settings or {})), "template": "{response}"}
    return bench.manager(functions={"judge": RewardFunctionConfig(name="judge", options=options)}, **of_manager)


def saying(response: str, row_id: int = 0) -> Sample:
    return dataclasses.replace(make_sample(row_id=row_id), response=response)


def judged(server: Any, response: str, **verdict: Any) -> dict[str, float]:
    return asyncio.run(judge(saying(response), service(server), "{response}", verdict))


def test_the_judge_is_asked_as_the_template_says(server: Any, tmp_path: Path) -> None:
    file = tmp_path / "judge.txt"
    file.write_text(TEMPLATE)
    sample = dataclasses.replace(saying("4 {ground_truth} Score: 7"), ground_truth=["4", "four"])
    for template in (TEMPLATE, str(file)):
        given = service(server, temperature=0.5, max_tokens=9, model=template[:3])
        scored = asyncio.run(judge(sample, given, template))
        assert scored == {"score": 0.7, "asked": 1.0, "prompt_tokens": 11.0, "completion_tokens": 3.0}
        path, headers, asked = server.asked[-1]
        assert (path, "Authorization" in headers) == ("/v1/chat/completions", False)
        assert asked == {
            "model": template[:3],
            "messages": [
                {
                    "role": "user",
                    "content": 'Q: How many?\nA: 4 {ground_truth} Score: 7\nR: ["4", "four"]\n'
                    "End with Score: N, N from 0 to 10.",
                }
            ],
            "max_tokens": 9,
            "temperature": 0.5,
        }
    file.write_text("Is it good?")
    services._template.cache_clear()
    with pytest.raises(RewardError, match=r"judge\.txt: the template has no \{response\}"):
        asyncio.run(judge(sample, service(server), str(file)))
    with pytest.raises(RewardError, match="is not a readable file"):
        asyncio.run(judge(sample, service(server), str(tmp_path / "absent.txt")))


@pytest.mark.parametrize(
    ("answer", "verdict", "expected"),
    [
        ("Score: 7", {}, 0.7),
        ("<think>maybe Score: 2</think> so **Score: 9.5**", {}, 0.95),
        ("score = -1", {"lowest": -1, "highest": 1}, 0.0),
        ("[[B]] no, [[A]]", {"pattern": r"\[\[([AB])\]\]", "values": {"a": 1, "b": -1}}, 1.0),
        ("Verdict: NO", {"pattern": r"Verdict: (\w+)", "values": {"yes": 1.0, "no": 0.0}}, 0.0),
    ],
)
def test_verdicts(server: Any, answer: str, verdict: dict[str, Any], expected: float) -> None:
    assert judged(server, f"say {answer}", **verdict)["score"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("answer", "verdict", "message"),
    [
        ("say good", {}, "the judge's answer has no verdict; it ends with 'good'"),
        ("say Score: 11", {}, "the verdict 11 is not between 0 and 10"),
        ("say Score: x", {"pattern": r"Score: (\w)"}, "the verdict 'x' is not a number"),
        ("say Score: nan", {"pattern": r"Score: (\w+)"}, "the verdict nan is not between 0 and 10"),
        ("say [[C]]", {"pattern": r"\[\[(\w)\]\]", "values": {"A": 1}}, "the verdict 'C' is not one of A"),
        ("do nothing", {}, "the judge's answer is not a chat completion: KeyError('choices')"),
        ("do silent", {}, "the judge wrote no text: its message contains None"),
    ],
)
def test_what_is_no_verdict_is_a_failure(server: Any, answer: str, verdict: dict[str, Any], message: str) -> None:
    with pytest.raises(RewardError) as caught:
        judged(server, answer, **verdict)
    assert str(caught.value) == message


def test_a_question_is_asked_once_unless_there_was_no_verdict(server: Any) -> None:
    services._ask.cache_clear()
    first, again = judged(server, "say Score: 7"), judged(server, "say Score: 7")
    assert first == {"score": 0.7, "asked": 1.0, "prompt_tokens": 11.0, "completion_tokens": 3.0}
    assert again == {"score": 0.7, "asked": 0.0, "prompt_tokens": 0.0, "completion_tokens": 0.0}
    assert len(server.asked) == 1
    with pytest.raises(RewardError):
        judged(server, "do learns")
    assert judged(server, "do learns")["score"] == 0.5
    assert judged(server, "do free") == {"score": 0.5, "asked": 1.0}, "a server that counts nothing"


def test_one_worker_asks_as_many_at_once_as_it_may(bench: Bench, server: Any) -> None:
    manager = judges(bench, server, {"timeout_s": 10}, num_workers=1, concurrency=12, limit_s=20)
    manager.score([saying("say Score: 5")])
    begin = time.monotonic()
    outcomes = manager.score([saying(f"do slow {row}", row) for row in range(24)])
    assert time.monotonic() - begin < 6, "one after another takes 12 s"
    assert [outcome.value for outcome in outcomes if isinstance(outcome, Score)] == [0.5] * 24
    asked = [outcome.parts["judge/asked"] for outcome in outcomes if isinstance(outcome, Score)]
    assert asked == [1.0] * 24


def test_the_key_goes_to_the_judge_alone(bench: Bench, server: Any) -> None:
    settings = {"key_variable": "JUDGE_KEY", "attempts": 1}
    with serving() as elsewhere:
        server.elsewhere = f"http://127.0.0.1:{elsewhere.server_port}/v1/chat/completions"
        manager = judges(bench, server, settings, environment={"JUDGE_KEY": KEY}, limit_s=5)
        outcomes = manager.score([saying(text) for text in ("say Score: 1", "do away", "do refuse", "do echo")])
    assert {headers["Authorization"] for _, headers, _ in server.asked} == {f"Bearer {KEY}"}
    assert elsewhere.asked == []
    good, *failures = outcomes
    assert isinstance(good, Score)
    details = [failure.detail for failure in failures if isinstance(failure, Failure)]
    assert [KEY in detail for detail in details] == [False] * 3, details
    assert "answered with status 302 Found; redirects are not followed" in details[0]
    assert KEY not in bench.events_path.read_text()
