"""Ctrl-C ends a command within seconds, even if the command resists, and reports what is saved."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mrl.cli.supervise import EXIT_INTERRUPTED, what_is_kept

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # also in the background of a script
from mrl.cli.supervise import on_interrupt
try:
    forced = lambda: print("forced", flush=True)
    with on_interrupt(lambda: "interrupted"), on_interrupt(lambda: "step 7 is kept", forced):
        print("ready", flush=True)
        time.sleep(60)
except KeyboardInterrupt:
    print("unwinds", flush=True)
    time.sleep({"at once": 0, "soon": 0.7, "stubborn": 60}[sys.argv[1]])
    sys.exit(130)
"""


@pytest.mark.parametrize(
    ("unwinds", "again_s", "least_s", "most_s"),
    [
        pytest.param("at once", None, 0.0, 1.5, id="unwound"),
        pytest.param("stubborn", None, 2.5, 4.5, id="stuck", marks=pytest.mark.slow),
        pytest.param("stubborn", 0.8, 0.7, 2.4, id="twice"),
    ],
)
def test_an_interrupted_command_ends_soon(unwinds: str, again_s: float | None, least_s: float, most_s: float) -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, unwinds], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    assert run.stdout.readline() == "ready\n"
    began = time.monotonic()
    run.send_signal(signal.SIGINT)
    run.send_signal(signal.SIGINT)  # a second one, because terminal and parent each send one
    if again_s is not None:
        time.sleep(again_s)
        run.send_signal(signal.SIGINT)
    assert run.communicate() == ("unwinds\n" + ("" if unwinds == "at once" else "forced\n"), "\nstep 7 is kept\n")
    assert run.returncode == EXIT_INTERRUPTED
    assert least_s <= time.monotonic() - began < most_s


def test_a_second_ctrl_c_right_behind_the_first_changes_nothing_of_how_it_ends() -> None:
    """The command has left the blocks that handle signals and is about to exit."""
    run = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "soon"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    assert run.stdout.readline() == "ready\n"
    run.send_signal(signal.SIGINT)
    assert run.stdout.readline() == "unwinds\n"
    run.send_signal(signal.SIGINT)
    assert run.communicate()[1] == "\nstep 7 is kept\n"
    assert run.returncode == EXIT_INTERRUPTED


LEAVING = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from mrl.cli import main
class Late:
    def __del__(self, write=os.write, sleep=time.sleep):
        write(1, b"leaves\\n")
        sleep(0.7)
sys.late = Late()  # ends when the interpreter has restored the signal handlers
main._run = lambda words: (print("ready", flush=True), time.sleep(60))
sys.exit(main.main(["train"]))
"""


def test_a_ctrl_c_while_the_interpreter_ends_changes_nothing_of_how_it_ends() -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", LEAVING], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    assert run.stdout.readline() == "ready\n"
    run.send_signal(signal.SIGINT)
    assert run.stdout.readline() == "leaves\n"
    run.send_signal(signal.SIGINT)
    assert run.communicate()[1] == "\ninterrupted\n"
    assert run.returncode == EXIT_INTERRUPTED


def test_what_is_ignored_stays_ignored() -> None:
    """A background process of a script ignores SIGINT."""
    program = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    program += "from mrl.cli.supervise import on_interrupt\nwith on_interrupt(str):\n"
    program += "    print(signal.getsignal(signal.SIGINT) == signal.SIG_IGN)"
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout == "True\n"


def test_what_is_kept_is_the_newest_checkpoint(tmp_path: Path) -> None:
    assert what_is_kept(tmp_path) == f"{tmp_path} has no checkpoint: the same command starts again"
    for step in (2, 10):
        (tmp_path / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    expected = "the newest checkpoint is from step 10: the same command continues from step 11"
    assert what_is_kept(tmp_path) == expected
