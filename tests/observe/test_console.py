"""What a run prints, on a terminal and elsewhere."""

from __future__ import annotations

import io

from mrl.observe.console import Console, sparkline


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


def test_a_terminal_shows_the_phase_and_what_is_left() -> None:
    stream = Terminal()
    console = Console(11, stream)
    console.step(1, {"critic/score/mean": 0.1, "timing_s/step": 6.0})
    console.phase("update_actor")
    assert "step 2/11  update_actor" in stream.getvalue()
    assert stream.getvalue().endswith("left 00:01:00")


def test_quiet_prints_only_what_must_be_said() -> None:
    stream = io.StringIO()
    console = Console(3, stream, quiet=True)
    console.step(1, {})
    console.say("done")
    assert stream.getvalue() == "done\n"


def test_sparkline() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([]) == ""
