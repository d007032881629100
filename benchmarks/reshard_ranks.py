"""Each rank of `reshard.py`: send a model's weights to a worker without an engine, and check every bit.

The worker listens like vLLM's workers, keeps what it receives, and answers with the digests of what it keeps. Faults
are seeded between the sent weights and the worker's weights.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]

from benchmarks.reshard_gather import GatherEverything
from mrl.config.mesh import Mesh
from mrl.config.schema import ParallelConfig
from mrl.dtypes import dtype_name, torch_dtype
from mrl.errors import RolloutError
from mrl.models.families import read_spec
from mrl.models.fp8_scales import FP8, SCALE
from mrl.models.hf_reader import HfReader, load_shard
from mrl.models.layout import RankPlace
from mrl.models.regions import slices
from mrl.models.rollout_table import EngineSizes, Fused, rollout_tensors
from mrl.models.table import float32_tensors, hf_tensors, shards_of
from mrl.weight_sync.digest import Digests
from mrl.weight_sync.exchange import JoinedTransport, P2PTransport, WorldTransport
from mrl.weight_sync.ipc import IpcReceiver
from mrl.weight_sync.planner import ReshardPlanner
from mrl.weight_sync.resharder import Resharder, ReshardReport, WeightSyncSpec
from mrl.weight_sync.rollout_layout import RolloutLayout

LIMIT_S = 60.0


@dataclass(frozen=True)
class ReshardCase:
    """One model in one training layout, and its engines."""

    model: str
    parallel: ParallelConfig
    sizes: EngineSizes
    bucket_bytes: int
    sockets: str
    dtype: torch.dtype = torch.float32
    train_dtype: torch.dtype = torch.float32
    ranks_per_node: int = 4
    megatron: bool = False
    """Whether the weights are in a real Megatron model; otherwise in tensors of the same names and shapes."""
    fault: str = ""
    repeats: int = 1
    gather: bool = False
    """Whether to time the `gather` method as well."""
    num_receivers: int = 0
    """Number of last ranks without weights, which have the workers, as in a separate pool."""


@dataclass(frozen=True)
class RankOutcome:
    """Results of one rank."""

    report: ReshardReport | None
    wrong: list[str]
    """Tensors of the worker that differ in any bit from the model's file."""
    error: str
    seconds: list[float]
    gather_seconds: dict[bool, list[float]]
    """Seconds by whether the result was verified, like mrl's."""
    gather_bytes: int


def measure(cases: list[ReshardCase]) -> list[RankOutcome]:
    """Measure every case on this rank."""
    sys.setswitchinterval(2e-4)  # a real worker does not share its trainer's interpreter
    return [measure_one(case) for case in cases]


def measure_one(case: ReshardCase) -> RankOutcome:
    """Measure one case on this rank."""
    spec = read_spec(case.model)
    mesh = mesh_of(case.parallel, dist.get_world_size() - case.num_receivers)
    rollout = rollout_of(case, mesh)
    sockets = tuple(Path(case.sockets, f"{worker}.sock") for worker in range(len(rollout.hosts)))
    route = WeightSyncSpec(
        rollout, sockets, dtype_name(case.dtype), dtype_name(case.train_dtype), case.bucket_bytes, LIMIT_S
    )
    with holding(case, mesh) as held:
        planner = ReshardPlanner(spec, case.parallel, mesh, rollout)
        resharder = Resharder(planner, transport_of(case), held, route, column_groups(mesh))
        return carry_out(case, resharder, held)


def carry_out(case: ReshardCase, resharder: Resharder, held: dict[tuple[int, str], Tensor]) -> RankOutcome:
    """Send several versions, alternating between both methods. The first version is not timed."""
    worker, num_versions = resharder.plan.worker, case.repeats + 1
    stand_in, gather_all, report, error = None, None, None, ""
    if worker is not None:
        path = Path(case.sockets, f"{worker}.sock")
        stand_in = StandIn(path, num_versions, case.fault if worker == 0 else "")
        if case.gather:
            gather_all = GatherEverything(
                resharder.planner, path.with_suffix(".all"), 2 * num_versions, case.bucket_bytes
            )
    seconds: list[float] = []
    gather_seconds: dict[bool, list[float]] = {True: [], False: []}
    for version in range(1, num_versions + 1):
        for tensor in held.values():
            tensor.mul_(-2)  # as different as possible, and easy to predict
        with together(seconds):
            try:
                report = resharder.send(version)
            except RolloutError as raised:
                error = str(raised)
        if gather_all is not None:
            for proven, timed in gather_seconds.items():
                with together(timed):
                    gather_all.run(held, proven)
    wrong: list[str] = []
    if stand_in is not None and worker is not None:
        expected = fused_of(case, worker, (-2.0) ** num_versions)
        wrong = differing(stand_in.finished(), expected)
        wrong += differing(gather_all.finished(), expected) if gather_all is not None else []
    num_bytes = gather_all.bytes_received if gather_all is not None else 0
    gathered = {proven: timed[1:] for proven, timed in gather_seconds.items()}
    return RankOutcome(report, wrong, error, seconds[1:], gathered, num_bytes)


@contextmanager
def together(seconds: list[float]) -> Iterator[None]:
    """Run the block on all ranks at the same time, and append the time of the slowest rank."""
    dist.barrier()
    began = time.perf_counter()
    yield
    dist.barrier()
    seconds.append(time.perf_counter() - began)


def column_groups(mesh: Mesh) -> list[dist.ProcessGroup]:
    """Return this rank's groups of tp and of etp, which split the columns of some weights."""
    found = {}
    for kind, size in (("tp", mesh.tp), ("etp", mesh.etp)):
        for first in range(0, mesh.world_size, size):
            ranks = [*range(first, first + size)]
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                found[kind] = group
    return [*found.values()]


def mesh_of(parallel: ParallelConfig, num_ranks: int) -> Mesh:
    """Return the mesh of the ranks."""
    return Mesh(num_ranks, parallel.tp, parallel.cp, parallel.pp, parallel.ep, parallel.etp)


def rollout_of(case: ReshardCase, mesh: Mesh) -> RolloutLayout:
    """Return a layout with as many engines as fit, one worker per rank."""
    num_hosts, num_ranks = case.num_receivers or mesh.world_size, mesh.world_size + case.num_receivers
    first = mesh.world_size if case.num_receivers else 0
    hosts = tuple(range(first, first + num_hosts // case.sizes.num_workers * case.sizes.num_workers))
    return RolloutLayout(case.sizes, hosts, tuple(rank // case.ranks_per_node for rank in range(num_ranks)))


def transport_of(case: ReshardCase) -> P2PTransport:
    """Return the transport of the trainer's world, or of the world with the receivers."""
    device, rank, size = torch.device("cpu"), dist.get_rank(), dist.get_world_size()
    if not case.num_receivers:
        return WorldTransport(device)
    meeting = Path(case.sockets, f"meeting-{case.model.replace('/', '-')}-{case.parallel.tp}-{case.parallel.pp}")
    return JoinedTransport(FileStore(str(meeting), size), rank, size, device, LIMIT_S)


@contextmanager
def holding(case: ReshardCase, mesh: Mesh) -> Iterator[dict[tuple[int, str], Tensor]]:
    """Yield this rank's parameters, filled from the model's file."""
    reader, spec = HfReader(case.model), read_spec(case.model)
    if dist.get_rank() >= mesh.world_size:
        yield {}
        return
    if not case.megatron:
        at = mesh.coordinates(dist.get_rank())
        shards = shards_of(spec, case.parallel, RankPlace(at.tp, at.pp, at.ep, at.etp), "lm")
        yield {(shard.chunk, shard.name): load_shard(reader, shard, case.train_dtype) for shard in shards}
        return
    from mrl.engine import weights
    from mrl.engine.model import ModelRequest, build_chunks, transformer_config
    from mrl.engine.parallel import model_parallel

    with model_parallel(case.parallel, seed=0) as groups:
        request = ModelRequest(spec, "lm", dtype_name(case.train_dtype), {})
        chunks = build_chunks(request, transformer_config(request, groups), groups)
        weights.load(chunks, reader, spec, "lm", groups)
        pairs = weights.held_tensors(chunks, spec, "lm", groups)
        yield {(shard.chunk, shard.name): tensor.detach() for shard, tensor in pairs}


def fused_of(case: ReshardCase, worker: int, factor: float) -> dict[str, Tensor]:
    """Return the worker's expected tensors, computed from the model's file alone and multiplied by a factor."""
    reader, spec = HfReader(case.model), read_spec(case.model)

    def fused(made: Fused) -> Tensor:
        tensor = torch.full(made.shape, torch.nan, dtype=torch.float32)
        matrix = tensor.view(-1, made.shape[-1]) if tensor.ndim > 1 else tensor
        for box in made.padding:
            matrix[slices(box)] = 0
        for piece in made.pieces:
            held_as = torch.float32 if piece.hf in float32_tensors(spec) else case.train_dtype
            matrix[slices(piece.target)] = reader.read(piece.hf, piece.source).to(held_as) * factor
        return tensor.to(torch_dtype(made.dtype) if made.dtype else case.dtype)

    def quantized(made: Fused) -> tuple[Tensor, Tensor]:
        """Return a matrix in FP8 and its scales, computed piece by piece from whole rows of the file."""
        shapes = hf_tensors(spec, "lm")
        values, scales = torch.empty(made.place), torch.empty(made.place)
        for piece in made.pieces:
            columns = (0, shapes[piece.hf][1])
            whole_RC = reader.read(piece.hf, (piece.source[0], columns)).to(case.train_dtype) * factor
            whole_RC = whole_RC.to(case.dtype)
            if case.sizes.fp8 == "channel":
                scale_RC = (whole_RC.abs().amax(1, keepdim=True).float() / 448).expand(whole_RC.shape)
                scaled_RC = (whole_RC.float() / scale_RC).clamp(-448, 448)
            else:
                by_block = whole_RC.float().view(len(whole_RC) // 128, 128, -1, 128)
                scale = by_block.abs().amax((1, 3), keepdim=True).clamp(1e-4) / 448
                scale_RC = scale.expand(by_block.shape).reshape(whole_RC.shape)
                scaled_RC = whole_RC.float() * (1.0 / scale_RC)
            mine = slice(*piece.source[1])
            values[slices(piece.target)], scales[slices(piece.target)] = scaled_RC[:, mine], scale_RC[:, mine]
        step = (1, made.shape[-1]) if case.sizes.fp8 == "channel" else (128, 128)
        shape = (*made.shape[:-2], made.shape[-2] // step[0], made.shape[-1] // step[1])
        return values.to(torch.float8_e4m3fn).view(made.shape), scales[:: step[0], :: step[1]].reshape(shape)

    expected = {}
    for made in rollout_tensors(spec, case.sizes, worker):
        if made.dtype == FP8:
            expected[made.name], expected[made.name + SCALE] = quantized(made)
        elif made.name not in expected:
            expected[made.name] = fused(made)
    return expected


class StandIn(threading.Thread):
    """A rollout worker without an engine, in a separate thread. Faults begin with the second version."""

    def __init__(self, path: Path, num_versions: int, fault: str, limit_s: float = LIMIT_S) -> None:
        super().__init__(daemon=True)
        self.held: dict[str, Tensor] = {}
        self._receiver = IpcReceiver(path, limit_s)
        self._num_versions, self._fault = num_versions, fault
        self.start()

    def finished(self) -> dict[str, Tensor]:
        """Return what the worker holds at the end."""
        self.join(LIMIT_S)
        return self.held

    def run(self) -> None:
        """Receive every version, right or wrong."""
        for version in range(self._num_versions):
            fault = FAULTS[self._fault] if self._fault and version else None
            arrived: dict[str, Tensor] = {}
            for number, bucket in enumerate(self._receiver.buckets()):
                if fault is not skip_a_bucket or number != 1:
                    arrived |= {name: self._taken(name, tensor) for name, tensor in bucket.tensors.items()}
            if fault:
                fault(arrived, self.held)
            self.held = arrived
            digests = Digests()
            for name, tensor in arrived.items():
                digests.add(name, tensor)
            self._receiver.reply(digests.read())
        self._receiver.close()

    def _taken(self, name: str, tensor: Tensor) -> Tensor:
        """Return the worker's copy of a tensor: in place from the second version on, like vLLM, except with faults."""
        return tensor.clone() if self._fault or name not in self.held else self.held[name].copy_(tensor)


Fault = Callable[[dict[str, Tensor], dict[str, Tensor]], None]


def flip_an_element(held: dict[str, Tensor], before: dict[str, Tensor]) -> None:
    """Flip the lowest bit of one element of a middle layer."""
    words = held["model.layers.2.self_attn.o_proj.weight"].view(torch.int32)
    words[3, 5] ^= 1


def skip_a_bucket(held: dict[str, Tensor], before: dict[str, Tensor]) -> None:
    """Skip a bucket after reading it; the fault is seeded in `StandIn.run`."""


def swap_q_and_k(held: dict[str, Tensor], before: dict[str, Tensor]) -> None:
    """Swap the first rows of queries and keys."""
    qkv = held["model.layers.1.self_attn.qkv_proj.weight"]
    rows = qkv.shape[0] // 4
    qkv[:rows], qkv[2 * rows : 3 * rows] = qkv[2 * rows : 3 * rows].clone(), qkv[:rows].clone()


def keep_an_expert(held: dict[str, Tensor], before: dict[str, Tensor]) -> None:
    """Keep one expert of one layer from the previous version."""
    (name,) = (name for name in held if name.startswith("model.layers.3.") and name.endswith("w13_weight"))
    held[name][1] = before[name][1]


FAULTS: dict[str, Fault] = {
    "one element flipped": flip_an_element,
    "one bucket skipped": skip_a_bucket,
    "q and k swapped": swap_q_and_k,
    "one expert stale": keep_an_expert,
}


def differing(held: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Return the tensors that differ in any bit, or that are unexpected or missing."""

    def same(name: str) -> bool:
        both = name in held and name in expected
        if not both or held[name].dtype != expected[name].dtype:
            return False
        is_fp8 = held[name].dtype == torch.float8_e4m3fn
        return torch.equal(*(each[name].view(torch.uint8) if is_fp8 else each[name] for each in (held, expected)))

    return [name for name in expected | held if not same(name)]
