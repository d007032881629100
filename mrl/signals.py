"""Signals that a process listens to for a while."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType


@contextmanager
def listening(numbers: Sequence[signal.Signals], hear: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Hear these signals within the block, but for those that the process was told to ignore, as by `nohup`."""
    listened = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, hear) for number in listened}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
