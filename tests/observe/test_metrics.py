"""`metrics.jsonl`."""

from __future__ import annotations

import math
import posix
from pathlib import Path

import pytest

from mrl.errors import MrlError
from mrl.observe.metrics import MetricsFile, read_metrics


def test_lines_come_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 1)
    file.write(1, {"a": 1.5})
    file.write(2, {"a": math.nan, "b": math.inf})
    assert read_metrics(path) == [{"step": 1, "a": 1.5}, {"step": 2, "a": None, "b": None}]
    assert path.stat().st_mode & 0o077 == 0


def test_a_resumed_run_writes_its_steps_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 1)
    for step in (1, 2, 3):
        file.write(step, {"a": step})
    MetricsFile(path, 2).write(2, {"a": 20})
    assert [(line["step"], line["a"]) for line in read_metrics(path)] == [(1, 1), (2, 20)]


def test_a_line_cut_short_by_a_crash_is_left_out_and_a_bad_one_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "a"')
    assert read_metrics(path) == [{"step": 1}]
    path.write_text('{"step": 1}\nnonsense\n')
    with pytest.raises(MrlError, match=r"metrics\.jsonl:2: this is not a line of metrics"):
        read_metrics(path)


@pytest.mark.parametrize(
    "line", [b"7", b'"text"', b"[]", b"{}", b'{"step": "1"}', b'{"step": 1, "x": "high"}', b"\xff", b"[" * 100_000, b""]
)
def test_a_line_of_anything_else_is_named(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "x": null}\n' + line + b'\n{"step": 2}\n')
    with pytest.raises(MrlError, match=r"metrics\.jsonl:2: this is not a line of metrics"):
        read_metrics(path)


def test_figures_that_cannot_be_written_come_with_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, 1)
    assert metrics.write(1, {"score": 0.5}) == ""
    whole = path.read_bytes()
    monkeypatch.setattr("os.write", lambda descriptor, data: posix.write(descriptor, data[: len(data) // 2]))
    assert "No space left on device" in metrics.write(2, {"score": 0.25})
    assert path.read_bytes() == whole, "no part of a line stays"
    monkeypatch.undo()
    assert metrics.write(3, {"score": 1.0}) == ""
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3]
    path.unlink()
    path.mkdir()
    assert "Is a directory" in metrics.write(4, {"score": 1.0})
