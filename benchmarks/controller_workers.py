"""A worker with phases that do nothing, to measure the cost of a call."""

from __future__ import annotations

from mrl.controller import Dispatch, Worker, register
from mrl.protocol import DataProto


class IdleWorker(Worker):
    """Answers immediately."""

    @register(Dispatch.ONE_TO_ALL)
    def nothing(self) -> None:
        """Run a phase without data."""

    @register(Dispatch.DATA_PARALLEL, reads=("responses",))
    def read(self, batch: DataProto) -> int:
        """Run a phase that reads a column and answers with a number."""
        return len(batch)


class BareWorker:
    """The same worker as a plain Ray actor."""

    def nothing(self) -> None:
        """Run a phase without data."""

    def read(self, responses: object) -> int:
        """Run a phase that takes a stored object and answers with a number."""
        return 1
