"""A group of workers that is called like one object."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import ray
from ray import ObjectRef
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mrl.config.mesh import Mesh
from mrl.config.schema import DeadlinesConfig
from mrl.controller.call import Call
from mrl.controller.fan_out import FanOut, NodeCall
from mrl.controller.node_calls import NodeRank
from mrl.controller.processes import NodeView, RankProcess, RankProcesses, collect_handshakes
from mrl.controller.resource_pool import Device, DeviceSlots, ResourcePoolManager
from mrl.controller.traced import TracedProcesses
from mrl.controller.transport import plan_shard, unpack_result
from mrl.controller.worker import Dispatch, MethodSpec
from mrl.controller.worker_host import ProcessInfo, WorkerHost, WorkerSpec
from mrl.errors import BatchError, PlacementError, WorkerError, did_you_mean
from mrl.events import EventLog, WorkersStarted
from mrl.protocol import DataProto
from mrl.spans import SPANS

Result = TypeVar("Result")
_MANY_RANKS = 1024
_STORED_ONCE_RANKS = 16
_LARGE_BYTES = 16 * 1024


@dataclass(frozen=True)
class RunContext:
    """Objects shared by all groups of a run."""

    run_directory: Path
    events: EventLog
    deadlines: DeadlinesConfig
    resources: ResourcePoolManager
    traced: TracedProcesses = field(default_factory=TracedProcesses)
    many_ranks: int = _MANY_RANKS
    """Number of ranks from which a group is called through the agents of its nodes."""


class RayClassWithInitArgs:
    """A worker class, by name, with the arguments for each rank's worker. The class is not imported."""

    def __init__(self, worker_class: str, *args: Any, **kwargs: Any) -> None:
        self.worker_class = worker_class
        self.args = args
        self.kwargs = kwargs


class DataProtoFuture(Generic[Result]):
    """Answer of a call under way. Its deadline runs from the call, not from `get`."""

    def __init__(self, call: Call, collect: Callable[[list[Any]], Result]) -> None:
        self._call = call
        self._collect = collect
        self.span = 0
        """Number of the call's span in a trace."""

    def get(self) -> Result:
        """Wait for the answer. Raises an error if the call failed."""
        try:
            return self._collect(self._call.wait())
        finally:
            SPANS.close(self.span)


class GroupMethod:
    """One method of all workers. Call it and wait, or take its future and continue."""

    def __init__(self, group: RayWorkerGroup, spec: MethodSpec) -> None:
        self.spec = spec
        self._group = group

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.future(*args, **kwargs).get()

    def future(self, *args: Any, **kwargs: Any) -> DataProtoFuture[Any]:
        """Start the call and return at once."""
        span = SPANS.open(f"{self._group.role}.{self.spec.name}")
        future = self._group.submit(self.spec, args, kwargs)
        future.span = span
        return future


class RayWorkerGroup:
    """The workers of one role, one process per rank, on the devices of the role's pool or on the given device slots.

    The registered methods of the worker class are methods of the group. Groups may share a pool: each process then
    requests a share of its device.
    """

    def __init__(
        self, role: str, worker: RayClassWithInitArgs, mesh: Mesh, context: RunContext, slots: DeviceSlots | None = None
    ) -> None:
        began = time.monotonic()
        self._slots = slots or context.resources.device_slots(role)
        if len(self._slots.devices) != mesh.world_size:
            raise PlacementError(f"{role}'s layout has {mesh.world_size} ranks, but {self._slots.description}")
        self.role = role
        self.mesh = mesh
        self._context = context
        self._shard_of_rank = [mesh.coordinates(rank).dp for rank in range(mesh.world_size)]
        self._speakers = sorted(
            filter(mesh.is_output_rank, range(mesh.world_size)), key=self._shard_of_rank.__getitem__
        )
        """Ranks that answer for shard 0, 1, ..., in this order."""
        self._processes = RankProcesses(role, mesh, context.run_directory, context.events, context.deadlines)
        self._actors = [self._make_actor(device) for device in self._slots.devices]
        nodes = [self._node(rank) for rank in range(mesh.world_size)]
        hellos = collect_handshakes(role, self._actors, nodes, context.deadlines.start_s, context.events)
        self._processes.add(
            [
                RankProcess(actor, hello.process, node)
                for actor, hello, node in zip(self._actors, hellos, nodes, strict=True)
            ]
        )
        self._methods = self._start(worker, hellos)
        self._followers = self._follow()
        self._called_directly, self._fan_out = range(mesh.world_size), self._make_fan_out(nodes)
        if self._fan_out is not None:
            # All calls of rank 0 alone are direct, so that they keep their order among its other calls.
            self._called_directly = range(1)
        context.traced.add(self._processes, list(self._followers))
        pids = [hello.process.pid for hello in hellos]
        context.events.write(WorkersStarted(role, mesh.world_size, pids, time.monotonic() - began))

    @property
    def world_size(self) -> int:
        return self.mesh.world_size

    def __getattr__(self, name: str) -> GroupMethod:
        methods: dict[str, MethodSpec] = self.__dict__.get("_methods", {})
        if name not in methods:
            role = self.__dict__.get("role", "the group")
            raise AttributeError(f'{role} has no registered method "{name}"; {did_you_mean(name, methods)}')
        method = GroupMethod(self, methods[name])
        self.__dict__[name] = method
        return method

    def submit(self, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DataProtoFuture[Any]:
        """Start a call of one method on the ranks of its dispatch.

        If the group was lost, raise the same error again.
        """
        if self._processes.lost_to is not None:
            raise self._processes.lost_to
        if self._processes.ended:
            raise WorkerError(
                f"{self.role}'s workers have ended: {self._processes.ended}", fix="create a new group", role=self.role
            )
        if self._followers and spec.dispatch is not Dispatch.RANK_ZERO:
            raise WorkerError(f"{self.role} answers no call of `{spec.name}`: ranks after 0 follow it", role=self.role)
        if spec.dispatch is Dispatch.DATA_PARALLEL:
            return self._submit_shards(spec, args, kwargs)
        if spec.stores:
            answer, stored = self._actors[0].call.options(num_returns=2).remote(spec.name, *args, **kwargs)
            return self._future(spec, {0: answer}, lambda answers: (answers[0], stored))
        if spec.dispatch is Dispatch.RANK_ZERO:
            return self._future(
                spec, {0: self._actors[0].call.remote(spec.name, *args, **kwargs)}, lambda answers: answers[0]
            )
        nodes = [] if self._fan_out is None else self._fan_out.call(spec.name, args, kwargs)
        args = tuple(map(self._stored_once, args))
        calls = {rank: self._actors[rank].call.remote(spec.name, *args, **kwargs) for rank in self._called_directly}
        return self._future(spec, calls, list, nodes)

    def _stored_once(self, argument: Any) -> Any:
        """Store a large argument of many direct calls, so that it is not serialized for each of them."""
        if len(self._called_directly) < _STORED_ONCE_RANKS or len(ray.cloudpickle.dumps(argument)) < _LARGE_BYTES:
            return argument
        return ray.put(argument)

    def shutdown(self) -> None:
        self._processes.kill_all("shut down")

    def _submit_shards(self, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DataProtoFuture[Any]:
        shards = self._shards(spec, args)
        plans = [plan_shard(shard, list(shard.columns())) for shard in shards]
        answers: dict[int, ObjectRef] = {}
        stored: dict[int, ObjectRef] = {}
        for rank in self._called_directly:
            actor, speaks = self._actors[rank], rank in self._speakers
            plan, objects = plans[self._shard_of_rank[rank]]
            message = [spec.name, speaks, list(args[1:]), kwargs, plan]
            if speaks and spec.writes:
                answers[rank], stored[rank] = actor.call_on_shard.options(num_returns=2).remote(message, *objects)
            else:
                answers[rank] = actor.call_on_shard.remote(message, *objects)
        nodes = []
        if self._fan_out is not None:
            nodes = self._fan_out.call(spec.name, args[1:], kwargs, plans, writes=bool(spec.writes))

        def collect(answers: list[Any]) -> Any:
            if not spec.writes:
                return [answers[rank] for rank in self._speakers]
            parts = zip(self._speakers, shards, strict=True)
            columns = call.stored
            return _join_shards([unpack_result(answers[rank], columns[rank], shard.row_ids) for rank, shard in parts])

        call = self._call(spec, answers, nodes)
        call.stored.update(stored)
        return DataProtoFuture(call, collect)

    def _shards(self, spec: MethodSpec, args: tuple[Any, ...]) -> list[DataProto]:
        """Return one piece of the batch per data-parallel rank: cut evenly, or as the caller has cut it."""
        batch = args[0] if args else None
        if isinstance(batch, DataProto):
            return self._read_columns(spec, batch).chunk(self.mesh.dp)
        if not isinstance(batch, list) or not all(isinstance(piece, DataProto) for piece in batch):
            raise BatchError(
                f"{spec.name} takes a DataProto as first argument, or a list with one per data-parallel rank, "
                f"not {type(batch).__name__}"
            )
        if len(batch) != self.mesh.dp:
            raise BatchError(
                f"{spec.name} got {len(batch)} shards, but {self.role} has data-parallel size {self.mesh.dp}"
            )
        return [self._read_columns(spec, piece) for piece in batch]

    def _read_columns(self, spec: MethodSpec, batch: DataProto) -> DataProto:
        present = batch.columns()
        if missing := [name for name in spec.reads if name not in present]:
            raise BatchError(
                f"{spec.name} needs the column `{missing[0]}`, which no method has written",
                fix=f"columns so far: {', '.join(present) or 'none'}",
            )
        return batch.select(*spec.reads, *(name for name in spec.optional if name in present))

    def _future(
        self,
        spec: MethodSpec,
        references: dict[int, ObjectRef],
        collect: Callable[[list[Any]], Any],
        nodes: Sequence[NodeCall] = (),
    ) -> DataProtoFuture[Any]:
        return DataProtoFuture(self._call(spec, references, nodes), collect)

    def _call(self, spec: MethodSpec, references: dict[int, ObjectRef], nodes: Sequence[NodeCall]) -> Call:
        limit_s = self._context.deadlines.call_s
        return Call(self._processes, spec.name, references, limit_s, self._followers, nodes)

    def _make_fan_out(self, nodes: list[NodeView]) -> FanOut | None:
        if self.world_size < self._context.many_ranks or self._followers:
            return None
        speakers = set(self._speakers)
        ranks = {
            rank: NodeRank(self._actors[rank], self._shard_of_rank[rank], rank in speakers)
            for rank in range(1, self.world_size)
        }
        return FanOut(self.role, ranks, nodes, self._context.deadlines.start_s)

    def _follow(self) -> dict[int, ObjectRef]:
        """Start the method of followers on all ranks except 0, if the worker has one."""
        names = [name for name, spec in self._methods.items() if spec.dispatch is Dispatch.FOLLOWERS]
        return {rank: actor.call.remote(names[0]) for rank, actor in enumerate(self._actors) if rank and names}

    def _make_actor(self, device: Device) -> Any:
        claims = {"num_cpus": self._slots.fraction}
        # A process with explicit GPUs requests none: Ray would hide the others from it.
        if device.group.bundle_specs[0].get("GPU") is not None and not self._slots.visible_gpus:
            claims["num_gpus"] = self._slots.fraction
        strategy = PlacementGroupSchedulingStrategy(device.group, placement_group_bundle_index=device.bundle)
        return ray.remote(WorkerHost).options(**claims, scheduling_strategy=strategy, max_restarts=0).remote()

    def _node(self, rank: int) -> NodeView:
        return self._context.resources.node(self._slots.devices[rank].node_id)

    def _start(self, worker: RayClassWithInitArgs, hellos: list[ProcessInfo]) -> dict[str, MethodSpec]:
        """Create all workers in parallel."""
        num_started: Counter[str] = Counter()
        address = self._node(0).network.address
        references = {}
        for rank, (actor, hello) in enumerate(zip(self._actors, hellos, strict=True)):
            local_rank = num_started[hello.node_id]
            num_started[hello.node_id] += 1
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(self.world_size),
                "LOCAL_RANK": str(local_rank),
                "MASTER_ADDR": address,
                "MASTER_PORT": str(hellos[0].port),
            } | self._node(rank).network.environment()
            if self._slots.visible_gpus:
                environment["CUDA_VISIBLE_DEVICES"] = self._slots.visible_gpus[rank]
            order = WorkerSpec(
                worker.worker_class,
                worker.args,
                worker.kwargs,
                self.role,
                rank,
                local_rank,
                self.mesh,
                self._processes.log_directory,
                address,
                hellos[0].port,
                environment,
                self._context.resources.numa_binding,
                sys.path,
            )
            references[rank] = actor.start.remote(order)
        methods: list[dict[str, MethodSpec]] = Call(
            self._processes, "start", references, self._context.deadlines.start_s
        ).wait()
        return methods[0]


def _join_shards(parts: list[DataProto]) -> DataProto:
    """Return the shards' answers as one batch. meta_info becomes a list with one entry per shard."""
    keys = list(dict.fromkeys(key for part in parts for key in part.meta_info))
    meta_info = {key: [part.meta_info.get(key) for part in parts] for key in keys}
    for part in parts:
        part.meta_info = {}
    joined = DataProto.concat(parts)
    joined.meta_info = meta_info
    return joined
