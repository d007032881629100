"""A worker with phases that do nothing: what a call itself costs is all that is left."""

from __future__ import annotations

from mrl.controller import Dispatch, Worker, register
from mrl.protocol import DataProto


class IdleWorker(Worker):
    """Answers at once."""

    @register(Dispatch.ONE_TO_ALL)
    def nothing(self) -> None:
        """A phase without data."""

    @register(Dispatch.DATA_PARALLEL, reads=("responses",))
    def read(self, batch: DataProto) -> int:
        """A phase that reads a column and answers with a number."""
        return len(batch)


class BareWorker:
    """The same, as a plain Ray actor."""

    def nothing(self) -> None:
        """A phase without data."""

    def read(self, responses: object) -> int:
        """A phase that takes a stored object and answers with a number."""
        return 1
