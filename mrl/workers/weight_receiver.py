"""`WeightReceiver`: stands on a device of engines that have a pool of their own, and takes the trainer's weights in."""

from __future__ import annotations

from dataclasses import replace

import torch

from mrl.config.arithmetic import make_mesh
from mrl.config.schema import ParallelConfig
from mrl.controller import Dispatch, RankInfo, Rendezvous, Worker, register
from mrl.hub import node_copy
from mrl.models.families import read_spec
from mrl.weight_sync.planner import ReshardPlanner
from mrl.weight_sync.resharder import Resharder, ReshardReport, WeightSyncSpec


class WeightReceiver(Worker):
    """A rank that holds no weights: what it receives, it hands to the engine's worker on its device."""

    def __init__(self, place: RankInfo) -> None:
        super().__init__(place)
        self._resharder: Resharder

    @register(Dispatch.RANK_ZERO)
    def rendezvous(self) -> Rendezvous:
        """Address of the first receiver's socket, where the trainer's ranks and the receivers meet."""
        return replace(self.place.rendezvous, listener=None)

    @register(Dispatch.ONE_TO_ALL)
    def prepare_receiving(self, model: str, parallel: ParallelConfig, num_trainers: int, route: WeightSyncSpec) -> None:
        """Plan what comes in; all trainer ranks prepare their sending meanwhile."""
        on_gpu = torch.cuda.is_available()
        device = torch.device("cuda", self.place.local_rank % torch.cuda.device_count()) if on_gpu else "cpu"
        # The first receiver serves the store, from the socket that only it has.
        route = replace(route, rendezvous=self.place.rendezvous)
        transport = route.transport(num_trainers + self.rank, torch.device(device))
        spec = read_spec(node_copy(model))
        planner = ReshardPlanner(spec, parallel, make_mesh(parallel, num_trainers), route.layout)
        self._resharder = Resharder(planner, transport, {}, route)

    @register(Dispatch.ONE_TO_ALL)
    def send_weights(self, version: int, workers: list[int]) -> ReshardReport:
        """Take this rank's part in bringing these workers to a version."""
        return self._resharder.send(version, workers)
