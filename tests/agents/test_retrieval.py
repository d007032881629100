"""Searches over real connections: the retriever's protocol, its client's retries, and Search-R1 on top."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from mrl.agents.environment import Done, Observation, ToolCall, Turn
from mrl.agents.formats import INVALID_ACTION, answer_of, load_format
from mrl.agents.retriever import Bm25, Retriever, read_corpus
from mrl.agents.search import SearchClient, SearchR1, search
from mrl.errors import AgentError, DataError

TEXTS = ['"Ada"\nShe wrote notes.', '"Rome"\nA city in Italy, Italy.', '"Notes"\nPapers, of Rome.', '"Pisa"\nA city.']
CORPUS = [{"id": str(number), "contents": text} for number, text in enumerate(TEXTS)]


def serve(server: ThreadingHTTPServer) -> Iterator[Any]:
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def retriever() -> Iterator[Retriever]:
    yield from serve(Retriever("127.0.0.1", 0, CORPUS, Bm25(TEXTS).find, 3))


class Moody(BaseHTTPRequestHandler):
    """Answers by `script`, one entry per request, and then correctly with the query as the passage."""

    script: list[Any]
    asked: list[dict[str, Any]]

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(asked)
        answer: Any = {"result": [[{"document": {"contents": f"t\n{query}"}}] for query in asked["queries"]]}
        mood = self.script.pop(0) if self.script else answer
        if isinstance(mood, float):
            time.sleep(mood)
            mood = answer
        status, body = (mood, b"") if isinstance(mood, int) else (200, json.dumps(mood).encode())
        self.send_response(status)
        if status == 302:
            self.send_header("Location", f"http://{self.headers['Host']}/elsewhere")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture
def moody() -> Iterator[Any]:
    handler = type("Handler", (Moody,), {"script": [], "asked": []})
    yield from serve(ThreadingHTTPServer(("127.0.0.1", 0), handler))


def client_of(server: ThreadingHTTPServer, **options: Any) -> SearchClient:
    options = {"topk": 3, "timeout_s": 5.0, "attempts": 3, "backoff_s": 0.01} | options
    return SearchClient(f"http://127.0.0.1:{server.server_address[1]}/retrieve", **options)


def post(url: str, body: Any) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data), timeout=5) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_passages_are_ranked_as_bm25_says() -> None:
    index = Bm25(TEXTS)
    (passages,) = index.find(["city of Italy"], 9)
    assert [place for place, _ in passages] == [1, 2, 3]
    # log(1 + 2.5 / 2.5) for "city" of two in four; 3 words of 4.25 on average
    assert passages[2][1] == pytest.approx(0.6931 / (1 + 0.9 * (0.6 + 0.4 * 3 / 4.25)), rel=1e-3)
    assert index.find(["city"], 1) == [[(3, pytest.approx(passages[2][1]))]]
    assert index.find(["nothing there", ""], 3) == [[], []]


def test_equal_passages_come_in_the_order_of_the_corpus() -> None:
    index = Bm25(["a b"] * 50)
    assert [[place for place, _ in ranked] for ranked in index.find(["a"], 7)] == [[*range(7)]]


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({"queries": ["Ada", "Pisa Rome"], "topk": 1}, [[0], [3]]),
        ({"queries": ["rome"], "topk": None, "return_scores": False}, [[2, 1]]),
        ({"query": "rome", "topk": 1}, [[2]]),
        ({"query": ["rome", "zzz"]}, [[2, 1], []]),
    ],
)
def test_the_protocol(retriever: Retriever, asked: dict[str, Any], found: list[list[int]]) -> None:
    assert post(retriever.url, asked) == (200, {"result": [[CORPUS[place] for place in each] for each in found]})
    _, answer = post(retriever.url, asked | {"return_scores": True})
    assert [[item["document"] for item in each] for each in answer["result"]] == [[CORPUS[n] for n in f] for f in found]
    assert all(item["score"] > 0 for each in answer["result"] for item in each)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"querys": ["a"]}, 422, '"queries" is null, but must be a list of texts'),
        ({"queries": ["a"], "topk": "3"}, 422, '"topk" is "3", but must be a number from 1 to 1000'),
        ({"queries": ["a"], "return_scores": 1}, 422, '"return_scores" is 1, but must be true or false'),
        (["a"], 422, "the body is not a JSON object"),
        (b"{", 400, "the body is not JSON"),
    ],
)
def test_a_wrong_request_is_told_which_field_is_wrong(
    retriever: Retriever, body: Any, status: int, message: str
) -> None:
    answered, answer = post(retriever.url, body)
    assert answered == status
    assert message in answer["detail"]
    assert post(retriever.url.replace("retrieve", "search"), {})[0] == 404


def test_a_port_that_is_taken_is_named(retriever: Retriever) -> None:
    port = retriever.server_address[1]
    with pytest.raises(AgentError, match=f"127.0.0.1:{port}: Address already in use"):
        Retriever("127.0.0.1", port, CORPUS, Bm25(TEXTS).find, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"contents": "a"}\n{"text": "a"}\n', ':2: \'{"text": "a"}\' is not a passage'),
        ("a\n", "not a jsonl file in UTF-8"),
    ],
)
def test_a_corpus_that_is_none_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "corpus.jsonl").write_text(text)
    with pytest.raises(DataError) as caught:
        read_corpus(tmp_path / "corpus.jsonl")
    assert message in str(caught.value)
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(DataError, match="the file has no passages"):
        read_corpus(tmp_path / "empty.jsonl")
    with pytest.raises(DataError, match="No such file"):
        read_corpus(tmp_path / "none.jsonl")


def test_a_corpus_that_never_ends_or_is_nested_without_end_is_named(tmp_path: Path) -> None:
    """Each is reported at once: reading a FIFO would block, and a device has no end."""
    os.mkfifo(tmp_path / "fifo")
    nested, one_line = tmp_path / "nested.jsonl", tmp_path / "line.jsonl"
    nested.write_text('{"contents": "a"}\n' + '{"contents": ' + "[" * 100_000 + "\n")
    with one_line.open("wb") as file:
        file.truncate(20 << 20)
    for path, message in (
        (tmp_path / "fifo", "is a FIFO, not a file\n  fix: write the passages to a regular file"),
        (Path("/dev/zero"), "is a device, not a file"),
        (nested, "nested.jsonl:2: not a jsonl file in UTF-8: maximum recursion depth exceeded"),
        (one_line, "line.jsonl:1: this line has more than 16777216 bytes"),
    ):
        with pytest.raises(DataError) as caught:
            read_corpus(path)
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"queries": ["rome"] * 100_000, "topk": 1000}, "100000 queries; at most 4096 in a request"),
        (
            {"queries": ["rome"] * 2000, "topk": 1000},
            "2000 queries with topk 1000 are 2000000 passages; at most 32768 in a request",
        ),
        ({"query": "rome " * 3_000_000}, "a query has 15000000 characters; at most 100000"),
    ],
    ids=["many", "many passages", "long"],
)
def test_a_request_that_would_take_minutes_is_refused_with_its_numbers(
    retriever: Retriever, asked: dict[str, Any], message: str
) -> None:
    began = time.monotonic()
    assert post(retriever.url, asked) == (413, {"detail": message})
    assert time.monotonic() - began < 5


def test_the_body_of_a_refused_request_is_not_read_as_the_next_request(retriever: Retriever) -> None:
    body = b"POST /retrieve HTTP/1.1\r\nContent-Length: 17\r\n\r\n" + b'{"queries": ["a"]}'
    head = f"POST /elsewhere HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(retriever.server_address[:2], timeout=10) as connection:
        connection.sendall(head + body)
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 404")
    assert answer.count(b"HTTP/1.1") == 1


def test_as_much_as_search_r1_asks_for_at_once_is_answered(retriever: Retriever) -> None:
    status, answer = post(retriever.url, {"queries": ["rome " * 20_000] * 10 + ["Ada"] * 2550, "topk": 3})
    assert (status, len(answer["result"])) == (200, 2560)
    assert [place["id"] for place in answer["result"][0]] == [CORPUS[2]["id"], CORPUS[1]["id"]], "sorted by occurrences"


def test_who_waits_together_is_asked_for_together(moody: Any) -> None:
    client = client_of(moody)

    async def many() -> list[list[str]]:
        return await asyncio.gather(*[client.search(f"q{number}") for number in range(600)])

    assert asyncio.run(many()) == [[f"t\nq{number}"] for number in range(600)]
    asked = moody.RequestHandlerClass.asked
    assert sorted(len(one["queries"]) for one in asked) == [88, 256, 256]
    assert asked[0] == {"queries": asked[0]["queries"], "topk": 3, "return_scores": True}


def test_a_slow_service_meets_few_connections_and_larger_requests(moody: Any) -> None:
    moody.RequestHandlerClass.script += [0.3] * 4
    client = client_of(moody)

    async def one(number: int) -> None:
        await asyncio.sleep(0.008 * number)
        assert await client.search(str(number)) == [f"t\n{number}"]

    async def many() -> None:
        await asyncio.gather(*map(one, range(30)))

    asyncio.run(many())
    assert len(moody.RequestHandlerClass.asked) <= 8  # four slow requests, and the requests that waited for them


def test_what_may_pass_is_tried_again(moody: Any) -> None:
    moody.RequestHandlerClass.script += [429, 503]
    assert asyncio.run(client_of(moody).search("a")) == ["t\na"]
    assert len(moody.RequestHandlerClass.asked) == 3


@pytest.mark.parametrize(
    ("mood", "message"),
    [
        (422, "answered with status 422"),
        (302, "answered with status 302 Found; redirects are not followed"),
        ([], 'answered without a list in "result": []'),
        ({"result": []}, 'answered 1 queries with 0 lists in "result"'),
        ({"result": [[{"document": {"contents": 1}}]]}, "returned a passage without text in document.contents"),
        ({"result": [{"document": {"contents": "a"}}]}, "returned a passage without text in document.contents"),
    ],
)
def test_an_answer_of_the_wrong_shape_is_a_failure_that_says_so(moody: Any, mood: Any, message: str) -> None:
    moody.RequestHandlerClass.script += [mood]
    with pytest.raises(AgentError) as caught:
        asyncio.run(client_of(moody).search("a"))
    assert message in str(caught.value)
    assert str(caught.value).startswith("search: http://127.0.0.1:")
    assert len(moody.RequestHandlerClass.asked) == 1


def test_requests_that_fail_leave_their_connections_to_others(moody: Any) -> None:
    moody.RequestHandlerClass.script += [422] * 4

    async def many() -> list[str]:
        client = client_of(moody)
        for number in range(4):
            with pytest.raises(AgentError, match="status 422"):
                await client.search(str(number))
        return await asyncio.wait_for(client.search("a"), 10)

    assert asyncio.run(many()) == ["t\na"]


def test_a_service_that_is_down_or_silent_is_a_failure(moody: Any) -> None:
    moody.RequestHandlerClass.script += [0.5] * 2
    with pytest.raises(AgentError, match="gave no answer in 2 attempts; the last: TimeoutError"):
        asyncio.run(client_of(moody, timeout_s=0.05, attempts=2).search("a"))
    nobody = SearchClient("http://127.0.0.1:9/retrieve", 3, 1.0, 2, 0.01)
    with pytest.raises(AgentError, match="gave no answer in 2 attempts; the last: URLError"):
        asyncio.run(nobody.search("a"))
    with pytest.raises(AgentError, match="is not an address"):
        SearchClient("localhost:8000", 3, 1.0, 2, 0.01)


def test_no_proxy_is_asked(moody: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert asyncio.run(client_of(moody).search("a")) == ["t\na"]


def test_the_tool_answers_with_documents(retriever: Retriever) -> None:
    assert asyncio.run(search("Ada", url=retriever.url)) == 'Doc 1(Title: "Ada") She wrote notes.'
    assert asyncio.run(search("zzz", url=retriever.url)) == "nothing is found"


def turn(text: str, left_turns: int = 2) -> Turn:
    calls = load_format("search_r1").parse(text)
    return Turn(number=0, text=text, calls=calls, ended="stop", left_turns=left_turns, left_tokens=99)


def step(world: SearchR1, turn_: Turn) -> Observation | Done:
    return asyncio.run(world.step(turn_))  # type: ignore[arg-type]


def test_search_r1_reads_as_its_authors_have_it_byte_for_byte(retriever: Retriever) -> None:
    world, form = SearchR1(retriever.url, topk=2), load_format("search_r1")

    def reads(text: str) -> str:
        model_turn = turn(text)
        answered = step(world, model_turn)
        assert isinstance(answered, Observation)
        messages = answer_of(form, model_turn.calls, answered)  # type: ignore[arg-type]
        assert isinstance(messages, str)
        return messages

    assert reads("<think>a</think> <search> rome\n</search>") == (
        '\n\n<information>Doc 1(Title: "Notes") Papers, of Rome.\nDoc 2(Title: "Rome") A city in Italy, Italy.'
        "</information>\n\n"
    )
    assert reads("I do not know.") == f"\n{INVALID_ACTION}\n"
    assert reads("<search>zzz</search>") == "\n\n<information></information>\n\n"
    assert step(world, turn("<answer>Ada</answer>")) == Done(parts={"searches": 2, "invalid_turns": 1})


def test_nothing_is_searched_in_the_last_turn(moody: Any) -> None:
    world = SearchR1(f"http://127.0.0.1:{moody.server_address[1]}/", topk=2)
    answered = step(world, turn("<search>a</search>", left_turns=0))
    assert isinstance(answered, Observation)
    assert (moody.RequestHandlerClass.asked, answered.parts["searches"]) == ([], 0)


def test_another_format_is_refused(retriever: Retriever) -> None:
    call = ToolCall(name="search", arguments={"q": "a"})
    turn_ = Turn(number=0, text="", calls=[call], ended="stop", left_turns=1, left_tokens=1)
    with pytest.raises(AgentError, match="not an action of Search-R1"):
        step(SearchR1(retriever.url), turn_)
