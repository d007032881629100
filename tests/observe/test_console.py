"""Output of a run on a terminal and elsewhere."""

from __future__ import annotations

import errno
import io
import os

import pytest

from mrl.observe.console import Console, Panel, SamplePreview, sparkline


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_elsewhere_one_aligned_line_per_step() -> None:
    stream = io.StringIO()
    console = Console(100, stream)
    for step in (9, 10):
        console.phase("rollout")
        console.step(step, {"critic/score/mean": 0.25, "timing_s/step": 2.0})
    heading, *lines = stream.getvalue().splitlines()
    assert "score" in heading
    assert [line.split()[:2] for line in lines] == [["9/100", "0.250"], ["10/100", "0.250"]]
    assert len({len(line) for line in (heading, *lines)}) == 1
    assert "\x1b" not in stream.getvalue()


class Disk(io.StringIO):
    """Rejects writes while it is full."""

    is_full = False

    def write(self, text: str) -> int:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(text)


def test_lines_that_a_full_disk_does_not_take_are_counted() -> None:
    disk = Disk()
    console = Console(3, disk)
    console.print("before")
    disk.is_full = True
    console.print("meanwhile")
    console.step(1, {"critic/score/mean": 0.25})
    disk.is_full = False
    console.print("after")
    assert disk.getvalue().splitlines() == ["before", "", "(3 lines could not be printed)", "after"]


def test_a_reader_that_is_gone_ends_nothing() -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "w", closefd=False) as stream:
        console = Console(3, stream)
        console.print("a line")
        console.step(1, {"critic/score/mean": 0.25})
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, write)  # closing flushes the buffer


def test_a_terminal_has_a_panel_beneath_the_lines() -> None:
    stream = Terminal()
    console = Console(11, stream)
    metrics = {"critic/score/mean": 0.1, "timing_s/step": 6.0, "timing_s/rollout": 4.5, "timing_s/advantage": 0.01}
    console.step(1, metrics, SamplePreview("2+3=", "6\x1b[2J", 0.5))
    console.phase("update_actor")
    console.progress(1, 4)  # too soon after the last drawing
    lines = drawn(stream)
    assert lines[0].startswith("step 2/11  ██░")
    assert lines[0].endswith("left 00:01:00")
    assert lines[1:] == [
        "  update_actor  ",
        "  last step 6.00 s: rollout 4.50 s (75%)",
        "  score ▁ 0.1",
        "  2+3= -> 6·[2J  (score 0.50)",
    ]


def test_the_panel_gives_way_to_what_is_said_and_shows_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mrl.observe.console._REDRAWN_EVERY_S", 0.0)
    stream = Terminal()
    console = Console(11, stream)
    console.phase("rollout")
    console.progress(128, 512)
    assert drawn(stream)[1] == "  rollout         ██████░░░░░░░░░░░░░░░░░░ 128/512"
    console.print("a warning")
    assert stream.getvalue().endswith("\x1b[2F\x1b[Ja warning\n")
    console.print("another")
    assert stream.getvalue().endswith("a warning\nanother\n")


def drawn(stream: Terminal) -> list[str]:
    """Return the lines of the last drawn panel."""
    return stream.getvalue().rpartition("\x1b[?7l")[2].removesuffix("\x1b[?7h").splitlines()


def test_no_line_is_wider_than_the_terminal() -> None:
    panel = Panel(5, sample=SamplePreview("long " * 50, "longer " * 50, 1.0))
    assert max(len(line) for line in panel.lines(40)) == 39


def test_after_its_last_step_a_run_that_saves_is_at_no_further_one() -> None:
    panel = Panel(2, phase="save")
    panel.finish(2, {}, None)
    assert panel.lines(80)[0].startswith("step 2/2 ")


def test_quiet_prints_only_what_must_be_said() -> None:
    stream = io.StringIO()
    console = Console(3, stream, quiet=True)
    console.step(1, {})
    console.print("done")
    assert stream.getvalue() == "done\n"


def test_sparkline() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([]) == ""
