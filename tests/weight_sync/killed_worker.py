"""Program of each rank while one of the rollout workers is killed in the middle of an update."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.reshard_ranks import LIMIT_S, ReshardCase, StandIn, holding, mesh_of, rollout_of
from mrl.dtypes import dtype_name
from mrl.models.families import read_spec
from mrl.weight_sync.exchange import WorldTransport
from mrl.weight_sync.ipc import IpcReceiver
from mrl.weight_sync.planner import ReshardPlanner
from mrl.weight_sync.resharder import Resharder, ReshardReport, WeightSyncSpec


def die(path: Path) -> None:
    """Receive as a worker that is killed while it reads its first bucket."""
    for _ in IpcReceiver(path, LIMIT_S).buckets():
        os.kill(os.getpid(), signal.SIGKILL)


def send_while_one_dies(case: ReshardCase) -> tuple[list[ReshardReport], list[str]]:
    """Send a version that worker 1 does not survive, and again to its successor alone. Return both reports."""
    rank, spec = dist.get_rank(), read_spec(case.model)
    mesh = mesh_of(case.parallel, dist.get_world_size())
    rollout = rollout_of(case, mesh)
    sockets = tuple(Path(case.sockets, f"{worker}.sock") for worker in range(len(rollout.hosts)))
    with holding(case, mesh) as held:
        planner = ReshardPlanner(spec, case.parallel, mesh, rollout)
        told = WeightSyncSpec(
            rollout, sockets, dtype_name(case.dtype), dtype_name(case.train_dtype), case.bucket_bytes, LIMIT_S
        )
        resharder = Resharder(planner, WorldTransport(torch.device("cpu")), held, told)
        if rank != 1:
            stand_in = StandIn(sockets[rank], 1, "")
            reports = [resharder.send(7)]
        else:
            with subprocess.Popen([sys.executable, "-m", __name__, str(sockets[1])]) as doomed:
                reports = [resharder.send(7)]
            assert doomed.returncode == -signal.SIGKILL, "the worker must have been killed"
            stand_in = StandIn(sockets[1], 1, "")
        dist.barrier()
        reports.append(resharder.send(7, workers={1}))
        stand_in.join(LIMIT_S)
        return reports, sorted(stand_in.held)


if __name__ == "__main__":
    die(Path(sys.argv[1]))
