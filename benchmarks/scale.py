"""CPU seconds, bytes and counts that grow with the ranks of a run, at 64 to 16,384, apart from calls of the driver.

    python benchmarks/scale.py [--json FILE]

Measured rows call the real function with an input of that size: process groups of one rank in a fake world, a store
with that many connections, metadata of a checkpoint from the table of Llama-3.1-405B. Computed rows multiply counts of
the code. Rows that end with "before" are those of earlier states.
"""

from __future__ import annotations

import gc
import json
import random
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Benchmark, parser
from mrl.config.mesh import Mesh
from mrl.config.resolved.load import load_config
from mrl.config.schema import ParallelConfig
from mrl.controller import Rendezvous
from mrl.controller.network import listen
from mrl.controller.nodes import link_distances
from mrl.data.packing import PackingRules, RowCost, plan_step
from mrl.engine import checkpoint
from mrl.engine.checkpoint_files import FORMAT, _wrong, file_name, flat_shard_regions
from mrl.engine.parallel import model_parallel
from mrl.events import EventLog, NetworkChosen, WorkersStarted
from mrl.launch.node import poll_interval
from mrl.models.layout import RankPlace
from mrl.models.regions import num_elements, whole
from mrl.models.table import hf_tensors, shards_of
from mrl.plan.known_models import model_spec
from mrl.plan.memory import plan_memory
from mrl.plan.plan_input import make_plan_input
from mrl.plan.timing import assumed_lengths, plan_time
from mrl.trainer.role_client import RoleClient
from mrl.weight_sync.resharder import ReshardReport
from mrl.workers.messages import UpdateReport

RANKS = (64, 1024, 4096, 16384)
PER_NODE = 8
ROWS_PER_DEVICE = 8
LAYOUT = ParallelConfig(tp=8, pp=8, first_stage_layers=14)
MIXTURE = ParallelConfig(tp=8, pp=16, ep=8)
MIXTURE_FILES, MIXTURE_TB = 163, 0.69
"""DeepSeek-V3's files."""
POLLS_PER_S = 1 / 0.2
"""Number of files that a waiting node opened per second before the change, regardless of the number of nodes."""
PRESET = Path(__file__).resolve().parent.parent / "configs" / "grpo-llama3.1-70b-8n8g.yaml"


@dataclass(frozen=True)
class Quantity:
    """One row of the table."""

    name: str
    of: Callable[[int], float | str]
    cost: str
    computed: bool = False


def seconds(action: Callable[[], object]) -> float:
    """Return the CPU seconds of an action in this process, which other work on the machine hardly changes."""
    gc.collect()
    began = time.process_time()
    action()
    return time.process_time() - began


def groups_s(num: int) -> float:
    """Return the seconds in which a rank creates all of Megatron's groups."""
    layout = ParallelConfig(tp=8, pp=4, ep=8) if num < 128 else MIXTURE
    torch.distributed.init_process_group("fake", rank=num - 1, world_size=num, store=FakeStore())
    try:
        began = time.process_time()
        with model_parallel(layout, seed=1):
            return time.process_time() - began
    finally:
        torch.distributed.destroy_process_group()


@cache
def store_s(num: int) -> float | str:
    """Return the seconds in which so many ranks connect to the store of rank 0, write a key and read another one."""
    if num > 1024:  # a process may not open so many files
        return f"{float(store_s(1024)) * num / 1024:.3g} (from 1,024)"
    listener = listen("127.0.0.1")
    address, port = listener.getsockname()
    stores = [Rendezvous(address, port, num, listener).store(60)]

    def join(rank: int) -> None:
        store = Rendezvous(address, port, num, None).store(60)
        store.set(f"{rank}", "here")
        store.get("0")
        stores.append(store)

    with ThreadPoolExecutor(64) as threads:  # a connection waits some 80 ms for its peer
        return seconds(lambda: list(threads.map(join, range(num))))


def events_s(num: int) -> float:
    """Return the seconds for the events of a start: one for each node, and one with the processes of a role."""
    address, chosen = "10.0.0.1", {"NCCL_SOCKET_IFNAME": "=ib0"}
    with tempfile.TemporaryDirectory() as directory:
        log = EventLog(Path(directory, "events.jsonl"))

        def write() -> None:
            for node in range(num // PER_NODE):
                log.write(NetworkChosen(f"node{node}", address, "ib0", chosen, {}))
            log.write(WorkersStarted("actor", num, list(range(num)), 1.0))

        found = seconds(write)
        log.close()
    return found


class Client(RoleClient):
    """A client whose workers have answered."""

    def __init__(self, reports: list[UpdateReport]) -> None:
        self._call = lambda *_: reports  # type: ignore[method-assign]


def metrics_s(num: int) -> float:
    """Return the seconds to add up the metrics of one update, 60 from each data-parallel rank."""
    names = [f"metric/{number}" for number in range(60)]
    reports = [UpdateReport(dict.fromkeys(names, 1.0), 1.0, 1e-6, True) for _ in range(num // 8)]
    client = Client(reports)
    return seconds(lambda: client._update("update_actor", [], []))


def packing_s(num: int) -> float:
    """Return the seconds to distribute the rows of a step over the data-parallel ranks."""
    lengths = np.random.default_rng(num).integers(512, 8192, size=num * ROWS_PER_DEVICE)
    rules = PackingRules(RowCost(1.0, 1e-6), pack_multiple=8)
    return seconds(lambda: plan_step(lengths, max(num // 128, 1), 16384, rules))


def report_mb(num: int) -> float:
    """Return the answers of one weight update to the driver. Digests are compared on the ranks and are not in them."""
    report = ReshardReport(100, 1, 10**10, 10**10, 10**10, 100, 200, 10**8, 3.5, "")
    return len(json.dumps(asdict(report))) * num / 1e6


@cache
def manifest(num: int) -> tuple[float, float, float]:
    """Return the seconds to make a manifest and to check it, and its MB."""
    spec, mesh = model_spec("meta-llama/Llama-3.1-405B-Instruct"), Mesh(num, tp=LAYOUT.tp, pp=LAYOUT.pp)
    reports = []
    for rank in range(num):
        at, boxes, end = mesh.coordinates(rank), [], 0
        shards = table(at.tp, at.pp)
        share = -(-sum(num_elements(whole(shard.shape)) for shard in shards) // mesh.dp)
        for shard in shards:
            start, end = end, end + num_elements(whole(shard.shape))
            first, last = max(start, share * at.dp), min(end, share * (at.dp + 1))
            if first < last and (shard.split or at.tp == 0):  # each rank writes its range of the flat buffer
                flat = torch.empty(last - first, device="meta")
                boxes += [(name, box) for name, box, _ in flat_shard_regions(shard, first - start, {"param": flat})]
        reports.append(checkpoint._Written(file_name(rank), 1, "0" * 64, boxes))
    facts = {"format": FORMAT, "layout": {}, "extra": {}, "num_steps": 1, "num_skipped": [0, 0]}
    facts["tensors"] = {name: {"shape": shape} for name, shape in hf_tensors(spec, "lm").items()}
    made: list[Any] = []
    make_s = seconds(lambda: made.append(json.dumps(checkpoint._manifest(facts, reports))))
    check_s = seconds(lambda: made.append(next(_wrong(json.loads(made[0])), "")))
    assert made[1] == "", made[1]
    return make_s, check_s, len(made[0]) / 1e6


@cache
def table(tp: int, pp: int) -> list[Any]:
    return shards_of(model_spec("meta-llama/Llama-3.1-405B-Instruct"), LAYOUT, RankPlace(tp=tp, pp=pp), "lm")


def plan_s(num: int) -> float:
    """Return the seconds of `mrl plan` after its imports."""
    changes = [f"cluster.nodes={num // PER_NODE}", f"placement.pools.all={num}", f"batch.prompts_per_step={num}"]
    resolved = load_config(str(PRESET), [*changes, f"batch.samples_per_update={num * ROWS_PER_DEVICE}"])

    def plan() -> None:
        subject = make_plan_input(resolved, None)
        plan_memory(subject)
        plan_time(subject, assumed_lengths(resolved.config))

    return seconds(plan)


def copies(num: int) -> float:
    """Return the copies of a mixture's weights in the trainer."""
    return max(num // (MIXTURE.tp * MIXTURE.pp), 1)


def links(num: int) -> int:
    return num // PER_NODE * len(link_distances(num // PER_NODE))


def opens_per_s(num: int) -> float:
    return num // PER_NODE / poll_interval(num // PER_NODE)


def host_list_kb(num: int) -> float:
    """Return the longest list of arguments of a job: the host names, for the process that waits for them."""
    return sum(len(f"gpu-node-{node:05d}") + 1 for node in range(num // PER_NODE)) / 1e3


QUANTITIES = (
    Quantity("process groups of a rank, s", groups_s, "at start; 18 groups, NCCL connects each at its first use"),
    Quantity("store: all ranks join, s", store_s, "at start, for each group of workers; one open file on rank 0 each"),
    Quantity(
        "placement groups of a pool", lambda num: num // PER_NODE, "at start, in Ray; one for each node", computed=True
    ),
    Quantity("events of a start, s", events_s, "at start, in the driver"),
    Quantity("links tested, before", lambda num: (num // 8) * (num // 8 - 1), "all pairs of nodes", computed=True),
    Quantity("links tested", links, "at start and in `mrl check`; at most 11 of a node", computed=True),
    Quantity(
        "model files opened", lambda num: num * MIXTURE_FILES, "at start, by each rank, to check them", computed=True
    ),
    Quantity("TB of weights read, before", lambda n: copies(n) * MIXTURE_TB, "by every copy", computed=True),
    Quantity("TB of weights read", lambda n: MIXTURE_TB, "at start; other copies get them by NCCL", computed=True),
    Quantity("file opens per s, before", lambda n: n / 8 * POLLS_PER_S, "all nodes of a Slurm job wait", computed=True),
    Quantity("file opens per s", opens_per_s, "during the whole job, on the shared file system", computed=True),
    Quantity("host list of a Slurm job, kB", host_list_kb, "once; Linux allows 2,000 kB", computed=True),
    Quantity("log files of a role", lambda num: 3 * num, "each rank opens its own, in one directory", computed=True),
    Quantity("rows over ranks, s", packing_s, "of the driver, for each forward pass and update; 8 rows a device"),
    Quantity("metrics of an update, s", metrics_s, "of the driver, for each update"),
    Quantity("answers of a weight update, MB", report_mb, "to the driver, each step; digests stay on the ranks"),
    Quantity("manifest of a role, s", lambda num: manifest(num)[0], "at each save, on rank 0; training goes on"),
    Quantity("manifest checked, s", lambda num: manifest(num)[1], "at a resume, on rank 0"),
    Quantity("manifest of a role, MB", lambda num: manifest(num)[2], "at a resume, read by each rank"),
    Quantity("hashes of a rank's files", lambda num: 1, "each rank hashes the file that it writes", computed=True),
    Quantity("mrl plan, s", plan_s, "on the login node"),
)


def main() -> int:
    """Print the table."""
    arguments = parser("Table of what grows with the ranks of a run.", repeats=1).parse_args()
    random.seed(1)
    torch.set_num_threads(1)
    socket.setdefaulttimeout(60)
    bench = Benchmark("scale")
    groups_s(64)  # imports Megatron
    for quantity in QUANTITIES:
        found = {f"{num:,}": quantity.of(num) for num in RANKS}
        bench.row(
            quantity=quantity.name, **found, by="computed" if quantity.computed else "measured", cost=quantity.cost
        )
        print(bench.rows[-1], flush=True)
    bench.goal("links that a node of 2,048 tests", links(16384) / 2048, at_most=11)
    bench.goal("file opens per second of 2,048 nodes", opens_per_s(16384), at_most=250)
    return bench.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())
