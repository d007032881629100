"""A run ends early for a signal or for its time limit, and for nothing else."""

from __future__ import annotations

import os
import pty
import signal
import sys
import time
from collections.abc import Iterator
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


def started() -> tuple[int, int]:
    """Fork a run that stops for SIGHUP. Return its process and its terminal, once it listens."""
    pid, terminal = pty.fork()
    if pid == 0:
        _run()
    said = b""
    while not said.endswith(b"ready\r\n"):  # the end of a line may come apart from the word
        said += os.read(terminal, 1)
    return pid, terminal


def _run() -> None:
    try:
        stopping = ShutdownSignal(None, lambda why: print(f"written: {why}", flush=True))
        with open(1, "w", closefd=False) as sys.stdout, stopping.on_signals():
            print("ready", flush=True)
            for _ in range(200):
                time.sleep(0.05)
                if stopping.reason() == "SIGHUP":
                    print("saving and stopping", flush=True)
                    os._exit(75)
    finally:
        os._exit(1)  # not back into pytest


def ended(pid: int) -> int:
    """Return the exit code of a process, which must end within ten seconds."""
    for _ in range(200):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError("the run did not end")


def test_one_sigterm_may_come_twice_and_a_second_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mrl.trainer.run._AGAIN_S", 1.0)
    pid, terminal = started()
    for _ in range(3):  # as from `timeout`, which sends it to the process and to the group
        os.kill(pid, signal.SIGTERM)
    time.sleep(1.5)
    assert os.waitpid(pid, os.WNOHANG) == (0, 0), "it still runs"
    os.kill(pid, signal.SIGTERM)
    assert ended(pid) == 128 + signal.SIGTERM
    said = b"SIGTERM again: exiting without saving"
    assert os.read(terminal, 200).splitlines() == [said, b"written: " + said]
    os.close(terminal)


def test_a_terminal_that_is_gone_fails_no_print() -> None:
    pid, terminal = started()
    os.close(terminal)  # every write to it is an error from here on
    os.kill(pid, signal.SIGHUP)
    assert ended(pid) == 75
