"""A run ends early for a signal or for its time limit, and for nothing else."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace

import pytest

from mrl.trainer.shutdown import ShutdownSignal


class Watch:
    """A clock that stands still until it is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("mrl.trainer.shutdown.time", SimpleNamespace(monotonic=lambda: self.now))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_either_signal_is_a_reason_by_its_name(number: signal.Signals) -> None:
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
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGUSR2, signal.SIGHUP)}
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
