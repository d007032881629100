"""`mrl retriever` starts, prints its address, answers, and ends by Ctrl-C. Mistakes are messages."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from functools import partial
from pathlib import Path

import pytest

from mrl.cli.main import main


def test_it_says_where_it_is_and_answers_until_it_is_interrupted(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "0", "contents": "Ada\\nShe wrote."}\n{"id": "1", "contents": "Rome\\nA city."}\n')
    command = [sys.executable, "-m", "mrl.cli.main", "retriever", str(corpus), "--port", "0", "--topk", "1"]
    hears = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # also if the tests run in the background
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=hears
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith(f"2 passages of {corpus} at http://127.0.0.1:")
            asked = urllib.request.Request(line.split()[-1], json.dumps({"query": "a city"}).encode())
            with urllib.request.urlopen(asked, timeout=10) as answer:
                assert json.load(answer) == {"result": [[{"id": "1", "contents": "Rome\nA city."}]]}
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 130
            assert process.stderr is not None
            assert process.stderr.read().strip() == "interrupted"
        finally:
            process.kill()


def test_a_corpus_that_is_not_there_is_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["retriever", str(tmp_path / "none.jsonl")]) == 2
    assert capsys.readouterr().err == f"{tmp_path}/none.jsonl: cannot be read: No such file or directory\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--port", "70000"], "127.0.0.1:70000: "),
        (["--host", "256.0.0.1"], "256.0.0.1:8000: "),
        (["--topk", "0"], "retriever: topk is 0\n  fix: a number from 1 to 1000"),
    ],
)
def test_a_place_or_number_that_is_none_is_a_message(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"contents": "a"}\n')
    assert main(["retriever", str(tmp_path / "corpus.jsonl"), *words]) == 1
    assert capsys.readouterr().err.startswith(message)


def test_an_encoder_that_is_none_is_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"contents": "a"}\n')
    assert main(["retriever", str(tmp_path / "corpus.jsonl"), "--encoder", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_a_device_without_an_encoder_is_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"contents": "a"}\n')
    assert main(["retriever", str(tmp_path / "corpus.jsonl"), "--device", "cuda"]) == 1
    assert capsys.readouterr().err == (
        'retriever: --device is "cuda", but without --encoder passages are found by BM25, on the CPU\n'
        "  fix: set --encoder, or leave --device out\n"
    )
