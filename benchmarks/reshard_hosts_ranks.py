"""Each rank of `reshard_hosts.py`: it runs on a host, and takes part in each method on command.

A command on standard input is a method, "next" for other weights, or "wrong" for the names of tensors with wrong
content. The answer is a line of JSON: for a method, the time of the slowest rank, and the bytes that the kernel has
counted on this host's link meanwhile, in and out.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.reshard_broadcast import GatherAndBroadcast
from benchmarks.reshard_ranks import ReshardCase, StandIn, differing, fused_of, holding, mesh_of, rollout_of, together
from mrl.config.mesh import Mesh
from mrl.config.schema import ParallelConfig
from mrl.controller import Rendezvous
from mrl.dtypes import dtype_name
from mrl.models.families import read_spec
from mrl.models.rollout_table import EngineSizes
from mrl.weight_sync.exchange import Held
from mrl.weight_sync.planner import ReshardPlanner
from mrl.weight_sync.resharder import Resharder, WeightSyncSpec

DTYPE = torch.bfloat16
RANKS_PER_HOST, NUM_RECEIVERS = 2, 2
LIMIT_S = 300.0
BUCKET_BYTES = 16 << 20
WAYS = ("ours", "gather", "gather_once")
INTERFACE = "eth0"


@dataclass(frozen=True)
class HostsLayout:
    """Trainer ranks, two per host, and two ranks of engines on another host."""

    parallel: ParallelConfig
    engine_tp: int

    @property
    def num_trainers(self) -> int:
        return self.parallel.tp * self.parallel.pp

    @property
    def num_ranks(self) -> int:
        return self.num_trainers + NUM_RECEIVERS


LAYOUTS = {
    "tp2 -> tp2": HostsLayout(ParallelConfig(tp=2), 2),
    "tp2 -> 2 of tp1": HostsLayout(ParallelConfig(tp=2), 1),
    "pp2 -> tp2": HostsLayout(ParallelConfig(pp=2), 2),
    "tp4 over two hosts -> tp2": HostsLayout(ParallelConfig(tp=4), 2),
}


@dataclass(frozen=True)
class RankPlace:
    """Facts that a rank gets at its start."""

    layout: str
    rank: int
    model: str
    directory: str
    addresses: Sequence[str]
    """Addresses of the hosts."""
    port: int
    num_versions: int

    def case(self) -> ReshardCase:
        """Return the case as for ranks of one machine."""
        layout = LAYOUTS[self.layout]
        return ReshardCase(
            model=self.model,
            parallel=layout.parallel,
            sizes=EngineSizes(layout.engine_tp),
            bucket_bytes=BUCKET_BYTES,
            sockets=self.directory,
            dtype=DTYPE,
            train_dtype=DTYPE,
            ranks_per_node=RANKS_PER_HOST,
            num_receivers=NUM_RECEIVERS,
        )

    def route(self) -> WeightSyncSpec:
        """Return the route like the trainer's: the first receiver listens, and all ranks meet there."""
        case, layout = self.case(), LAYOUTS[self.layout]
        rollout = rollout_of(case, mesh_of(case.parallel, layout.num_trainers))
        sockets = tuple(Path(self.directory, f"{worker}.sock") for worker in range(NUM_RECEIVERS))
        address, port = self.addresses[rollout.nodes[layout.num_trainers]], self.port + 1
        listener = socket.create_server((address, port)) if self.rank == layout.num_trainers else None
        return WeightSyncSpec(
            rollout,
            sockets,
            dtype_name(DTYPE),
            dtype_name(DTYPE),
            case.bucket_bytes,
            LIMIT_S,
            LIMIT_S,
            Rendezvous(address, port, layout.num_ranks, listener),
        )


class RankPart:
    """One rank in both methods, with its workers if it is a receiver."""

    def __init__(self, place: RankPlace, held: Held, mesh: Mesh) -> None:
        case, route = place.case(), place.route()
        self._case, self._held, self._version = case, held, 0
        worker = route.layout.hosts.index(place.rank) if place.rank in route.layout.hosts else None
        path = Path(place.directory, "none") if worker is None else route.sockets[worker]
        self._stand_in = None if worker is None else StandIn(path, place.num_versions, "", LIMIT_S)
        self._worker = worker or 0
        planner = ReshardPlanner(read_spec(case.model), case.parallel, mesh, route.layout)
        self._resharder = Resharder(planner, route.transport(place.rank, torch.device("cpu")), held, route)
        rounds = 2 * place.num_versions
        self._broadcast = GatherAndBroadcast(planner, path.with_suffix(".all"), rounds, BUCKET_BYTES, DTYPE)

    def answer(self, word: str) -> Any:
        """Execute a command and return the answer."""
        if word == "next":
            self._version += 1
            for tensor in self._held.values():
                tensor.neg_()  # as different as possible, and easy to predict
            return self._version
        if word == "wrong":
            return self._wrong()
        seconds: list[float] = []
        before = counted_bytes()
        with together(seconds):
            if word == "ours":
                self._resharder.send(self._version)
            else:
                self._broadcast.run(self._held, once_per_host=word == "gather_once")
        return seconds[0], [after - was for was, after in zip(before, counted_bytes(), strict=True)]

    def _wrong(self) -> list[str]:
        if self._stand_in is None:
            return []
        expected = fused_of(self._case, self._worker, (-1.0) ** self._version)
        both = self._stand_in.finished(), self._broadcast.finished()
        return [name for arrived in both for name in differing(arrived, expected)]


def counted_bytes() -> list[int]:
    """Return the kernel's counts of bytes on this host's link: in and out."""
    (line,) = (line for line in Path("/proc/net/dev").read_text().splitlines() if INTERFACE in line)
    columns = line.split()
    return [int(columns[1]), int(columns[9])]


def main() -> None:
    """Join the world, and answer commands."""
    place = RankPlace(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    sys.setswitchinterval(2e-4)  # a real worker would not wait for its trainer's interpreter
    meeting = f"tcp://{place.addresses[0]}:{place.port}"
    limit = timedelta(seconds=LIMIT_S)
    layout, case = LAYOUTS[place.layout], place.case()
    dist.init_process_group("gloo", init_method=meeting, rank=place.rank, world_size=layout.num_ranks, timeout=limit)
    mesh = mesh_of(case.parallel, layout.num_trainers)
    with holding(case, mesh) as held:
        part = RankPart(place, held, mesh)
        for line in sys.stdin:
            print(json.dumps(part.answer(line.strip())), flush=True)


if __name__ == "__main__":
    main()
