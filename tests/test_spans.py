"""Spans of one process: what its file has, also when it dies, when its disk is full, and between two traces."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from mrl import files
from mrl.errors import MrlError
from mrl.spans import SpanRecorder, read_spans


def test_spans_have_their_times_facts_and_threads(tmp_path: Path) -> None:
    recorder = SpanRecorder()
    recorder.begin(tmp_path / "spans")
    with recorder("outer", rows=3) as facts:
        with recorder("inner"):
            pass
        facts["bytes"] = 7
    recorder.add("worker 1", "sample", 5, 9)
    recorder.add("worker 2")
    assert recorder.end() > 0
    spans = read_spans(tmp_path / "spans")
    outer, inner = spans[""]
    assert (outer.name, outer.facts, outer.thread) == ("outer", {"rows": 3, "bytes": 7}, "MainThread")
    assert outer.begin <= inner.begin <= (inner.end or 0) <= (outer.end or 0)
    assert [(span.begin, span.end) for span in spans["worker 1"]] == [(5, 9)]
    assert spans["worker 2"] == [], "a worker without samples is known"


def test_nothing_is_written_while_no_trace_is_recorded(tmp_path: Path) -> None:
    recorder = SpanRecorder()
    with recorder("before"):
        recorder.begin(tmp_path / "first")
        late = recorder.open("open over the end")
    recorder.end()
    recorder.begin(tmp_path / "second")
    recorder.close(late)
    recorder.close(0)
    recorder.end()
    with recorder("after"):
        recorder.add("worker 1", "sample", 5, 9)
    assert [(span.name, span.end) for span in read_spans(tmp_path / "first")[""]] == [("open over the end", None)]
    assert read_spans(tmp_path / "second") == {"": []}


def test_a_file_cut_off_by_death_is_read_up_to_there(tmp_path: Path) -> None:
    recorder, path = SpanRecorder(), tmp_path / "spans"
    recorder.begin(path)
    recorder.open("dies in it")
    recorder.end()
    path.write_bytes(path.read_bytes() + b'{"end": 1, "ti')
    assert [(span.name, span.end) for span in read_spans(path)[""]] == [("dies in it", None)]
    path.write_text("{}\n")
    with pytest.raises(MrlError, match="spans:1: not a span of this version"):
        read_spans(path)


def test_a_full_disk_ends_the_trace_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    recorder = SpanRecorder()
    recorder.begin(tmp_path / "spans")
    monkeypatch.setattr(files, "append", full)
    with recorder("lost"):
        assert not recorder.is_on
    recorder.end()
    assert "No space left" in recorder.lost
