"""A run ends early for a signal or for its time limit, and for nothing else."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from mrl.trainer.run import ShutdownSignal


class Watch:
    """A clock that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("mrl.trainer.run.time", SimpleNamespace(monotonic=lambda: self.now))


@pytest.fixture(autouse=True)
def _without_nohup() -> Iterator[None]:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_each_signal_is_a_reason_by_its_name(number: signal.Signals) -> None:
    stopping, before = ShutdownSignal(None), signal.getsignal(number)
    with stopping.on_signals():
        assert stopping.reason() == ""
        os.kill(os.getpid(), number)
        assert stopping.reason() == number.name
        assert stopping.reason() == number.name, "it stays one"
    assert signal.getsignal(number) is before


def test_handlers_come_back_after_an_error() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    with pytest.raises(KeyError), ShutdownSignal(None).on_signals():
        raise KeyError
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before


def test_other_signals_are_left_alone() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGUSR2)}
    with ShutdownSignal(None).on_signals():
        assert {number: signal.getsignal(number) for number in before} == before


def test_time_is_up_once_the_limit_is_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    stopping, endless = ShutdownSignal(90.0), ShutdownSignal(None)
    for now, reason in ((1000.0, ""), (1090.0, ""), (1090.5, "training.time_limit_s=90 is reached")):
        watch.now = now
        assert stopping.reason() == reason
    assert endless.reason() == ""


def test_a_signal_is_the_reason_even_where_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    stopping = ShutdownSignal(90.0)
    with stopping.on_signals():
        os.kill(os.getpid(), signal.SIGUSR1)
        watch.now = 5000.0
        assert stopping.reason() == "SIGUSR1"


def test_nohup_stays_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ShutdownSignal(None).on_signals():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import time
from mrl.trainer.run import ShutdownSignal
stopping = ShutdownSignal(None, lambda why: print("written:", why, flush=True))
with stopping.on_signals():
    print("ready", flush=True)
    for _ in range(200):
        time.sleep(0.05)
        if stopping.reason() == "SIGHUP":
            print("saving and stopping", flush=True)
            raise SystemExit(75)
"""


def started(output: int) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=output, stdout=output, stderr=output, env=environment
    )


def wait_until_ready(terminal: int) -> None:
    """Read the whole line "ready": its end may come apart from the word."""
    said = b""
    while not said.endswith(b"ready\r\n"):
        said += os.read(terminal, 1)


def test_one_sigterm_may_come_twice_and_a_second_ends_at_once() -> None:
    terminal, theirs = pty.openpty()
    with started(theirs) as run:
        wait_until_ready(terminal)
        for _ in range(3):  # as from `timeout`, which sends it to the process and to the group
            run.terminate()
        time.sleep(2.5)
        assert run.poll() is None
        run.terminate()
        assert run.wait(8) == 128 + signal.SIGTERM
    said = b"SIGTERM again: exiting without saving"
    assert os.read(terminal, 200).splitlines() == [said, b"written: " + said]


def test_a_terminal_that_is_gone_fails_no_print() -> None:
    terminal, theirs = pty.openpty()
    with started(theirs) as run:
        wait_until_ready(terminal)
        os.close(theirs)
        os.close(terminal)  # every write to it is an error from here on
        run.send_signal(signal.SIGHUP)
        assert run.wait(10) == 75
