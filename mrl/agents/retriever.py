"""A retriever with Search-R1's protocol: BM25 over a file of passages, and an HTTP server for any search function."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from mrl import files
from mrl.errors import AgentError, DataError

Passage = dict[str, Any]
Found = list[tuple[int, float]]
"""Positions of passages with their scores, best first."""
Find = Callable[[Sequence[str], int], list[Found]]
"""Returns at most so many passages for each query."""
_WORD = re.compile(r"\w+")
_K1, _B = 0.9, 0.4  # the values of Anserini, used by Search-R1's BM25
_MAX_LINE_BYTES = 16 << 20
"""Longest line of a passage."""
_MAX_BODY_BYTES, _MAX_TOPK = 16 << 20, 1000
_MAX_QUERIES, _MAX_QUERY_CHARACTERS, _MAX_PASSAGES = 4096, 100_000, 32_768
"""Limits of one request. Search-R1's trainer searches for all 2,560 conversations of a batch at once."""


class Bm25:
    """BM25 as computed by Lucene. The weight of each word in each passage is computed once, when the index is built."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._terms: dict[str, int] = {}
        terms, passages, counts, lengths = array("i"), array("i"), array("i"), array("i")
        for number, text in enumerate(texts):
            words = Counter(_WORD.findall(text.lower()))
            terms.extend(self._terms.setdefault(word, len(self._terms)) for word in words)
            passages.extend([number] * len(words))
            counts.extend(words.values())
            lengths.append(words.total())
        term, count, length = np.array(terms), np.array(counts, np.float32), np.array(lengths, np.float32)
        order = np.argsort(term, kind="stable")
        self._passages = np.array(passages)[order]
        num_with = np.bincount(term, minlength=len(self._terms))
        self._ends = np.concatenate([[0], np.cumsum(num_with)])
        rarity = np.log1p((len(texts) - num_with + 0.5) / (num_with + 0.5)).astype(np.float32)
        norm = _K1 * (1 - _B + _B * length / max(length.mean(), 1))
        self._weights = (rarity[term] * count / (count + norm[np.array(passages)]))[order]
        self._num = len(texts)

    def find(self, queries: Sequence[str], topk: int) -> list[Found]:
        return [self._find(query, topk) for query in queries]

    def _find(self, query: str, topk: int) -> Found:
        scores = np.zeros(self._num, np.float32)
        words = Counter(match[0] for match in _WORD.finditer(query.lower()))
        for word, times in words.items():
            if (term := self._terms.get(word)) is not None:
                at = slice(self._ends[term], self._ends[term + 1])
                scores[self._passages[at]] += times * self._weights[at]
        least = np.partition(scores, -topk)[-topk] if topk < self._num else 0
        among = np.flatnonzero((scores >= least) & (scores > 0))
        best = among[np.lexsort((among, -scores[among]))][:topk]
        return [(int(place), float(scores[place])) for place in best]


def read_corpus(path: Path) -> list[Passage]:
    """Return the passages of a jsonl file, each an object whose `contents` is text."""
    corpus = list(_passages(path))
    if not corpus:
        raise DataError("the file has no passages", where=str(path))
    return corpus


def _passages(path: Path) -> Iterator[Passage]:
    number, fix = 0, '{"id": "0", "contents": "\\"Title\\"\\nText"}'
    try:
        with os.fdopen(files.open_regular(path), "rb") as lines:
            while line := lines.readline(_MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > _MAX_LINE_BYTES:
                    what = f"this line has more than {_MAX_LINE_BYTES} bytes"
                    raise DataError(what, where=f"{path}:{number}", fix="write one passage per line")
                passage = json.loads(line.decode())
                if not isinstance(passage, dict) or not isinstance(passage.get("contents"), str):
                    shown = line.decode().strip()
                    raise DataError(f"{shown[:80]!r} is not a passage", where=f"{path}:{number}", fix=fix)
                yield passage
    except OSError as error:
        fix = "write the passages to a regular file" if error.errno == errno.EINVAL else ""
        raise DataError(f"cannot be read: {error.strerror}", where=str(path), fix=fix) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"not a jsonl file in UTF-8: {error}", where=f"{path}:{number}", fix=fix) from error


class _Refused(Exception):
    def __init__(self, status: int, what: str) -> None:
        super().__init__(what)
        self.status = status


class Retriever(ThreadingHTTPServer):
    """Answers `POST /retrieve`. `serve_forever` runs until shutdown."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, corpus: Sequence[Passage], find: Find, topk: int) -> None:
        if not 0 < topk <= _MAX_TOPK:
            raise AgentError(f"topk is {topk}", where="retriever", fix=f"a number from 1 to {_MAX_TOPK}")
        self._corpus, self._find, self._topk = corpus, find, topk
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            what = f"{host}:{port}: {getattr(error, 'strerror', None) or error}"
            raise AgentError(what, fix="choose another --host or --port") from error

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnected before the answer."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}/retrieve"

    def answer(self, asked: Any) -> dict[str, Any]:
        if not isinstance(asked, dict):
            raise _Refused(422, 'the body is not a JSON object: {"queries": ["..."], "topk": 3, "return_scores": true}')
        queries = asked["queries"] if "queries" in asked else asked.get("query")
        queries = [queries] if isinstance(queries, str) else queries
        if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
            raise _Refused(422, f'"queries" is {json.dumps(queries)[:80]}, but must be a list of texts')
        topk = asked.get("topk") or self._topk
        if isinstance(topk, bool) or not isinstance(topk, int) or not 0 < topk <= _MAX_TOPK:
            raise _Refused(422, f'"topk" is {json.dumps(topk)[:80]}, but must be a number from 1 to {_MAX_TOPK}')
        self._check_amount(queries, topk)
        with_scores = asked.get("return_scores", False)
        if not isinstance(with_scores, bool):
            raise _Refused(422, f'"return_scores" is {json.dumps(with_scores)[:80]}, but must be true or false')
        results = self._find(queries, topk) if queries else []
        pairs = [[(self._corpus[place], score) for place, score in passages] for passages in results]
        items = [
            [{"document": passage, "score": score} if with_scores else passage for passage, score in passages]
            for passages in pairs
        ]
        return {"result": items}

    @staticmethod
    def _check_amount(queries: Sequence[str], topk: int) -> None:
        """Reject requests that would take minutes and gigabytes, and block all other clients."""
        if len(queries) > _MAX_QUERIES:
            raise _Refused(413, f"{len(queries)} queries; at most {_MAX_QUERIES} in a request")
        if len(queries) * topk > _MAX_PASSAGES:
            what = f"{len(queries)} queries with topk {topk} are {len(queries) * topk} passages"
            raise _Refused(413, f"{what}; at most {_MAX_PASSAGES} in a request")
        longest = max(map(len, queries), default=0)
        if longest > _MAX_QUERY_CHARACTERS:
            raise _Refused(413, f"a query has {longest} characters; at most {_MAX_QUERY_CHARACTERS}")


class _Handler(BaseHTTPRequestHandler):
    server: Retriever
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are two separate writes
    timeout = 60

    def do_POST(self) -> None:
        try:
            status, answer = 200, self.server.answer(self._asked())
        except _Refused as error:
            status, answer = error.status, {"detail": str(error)}
            self.close_connection = True  # the rest of the body would be read as the next request
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Write no log: thousands of lines would slow the server down."""

    def _asked(self) -> Any:
        if self.path.partition("?")[0].rstrip("/") != "/retrieve":
            raise _Refused(404, f"{self.path[:80]} does not exist; POST to /retrieve")
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > _MAX_BODY_BYTES:
            raise _Refused(413, f"the body has {length or 'an unknown number of'} bytes; at most {_MAX_BODY_BYTES}")
        try:
            return json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError) as error:
            raise _Refused(400, f"the body is not JSON: {error}") from error
