"""A worker with phases that do nothing, to measure the cost of a call, and a process that stands for many ranks."""

from __future__ import annotations

from mrl.config.mesh import Mesh
from mrl.controller import Dispatch, RankInfo, Rendezvous, Worker, register
from mrl.controller.worker import registered_methods
from mrl.controller.worker_host import WorkerHost
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

    @register(Dispatch.DATA_PARALLEL, reads=("responses",), writes=("log_probs",))
    def write(self, batch: DataProto) -> DataProto:
        """Run a phase that writes a column, which stays where it was made."""
        return DataProto.from_dict({"log_probs": batch["responses"]}, row_ids=batch.row_ids)


class BareWorker:
    """The same worker as a plain Ray actor."""

    def nothing(self) -> None:
        """Run a phase without data."""

    def read(self, responses: object) -> int:
        """Run a phase that takes a stored object and answers with a number."""
        return 1


class StandIn(WorkerHost):
    """A process that stands for many ranks: it answers each of their calls."""

    def become(self, world_size: int) -> None:
        """Create one worker for all ranks."""
        self._methods = registered_methods(IdleWorker)
        rendezvous = Rendezvous("", 0, world_size, None)
        self._worker = IdleWorker(RankInfo("stand-in", 0, 0, Mesh(world_size), rendezvous))
