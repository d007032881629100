"""`HybridEngine`: engines and trainer share devices; it moves memory and weights between them.

* training
* the trainer offloads gradients and optimizer; other roles on its devices offload everything
* the engines wake their weights, and the weights are transferred
* the trainer offloads its parameters, and the engines wake their cache
* generation, then the same in reverse

Engines with their own pool stay awake; receivers on their devices take the weights from the network. These engines may
generate in another thread while the trainer computes, and receive weights when it does not.
"""

from __future__ import annotations

import secrets
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from mrl.config.arithmetic import (
    cache_in_flight,
    devices_per_engine_node,
    has_own_rollout_pool,
    held_dtype,
    longest_sample_tokens,
    num_engines,
    rollout_devices,
    shard_size,
)
from mrl.config.mesh import Mesh
from mrl.config.schema import Config
from mrl.controller import DeviceSlots, RayClassWithInitArgs, RayWorkerGroup, RunContext
from mrl.errors import RolloutError
from mrl.models.families import read_spec
from mrl.models.rollout_table import EngineSizes
from mrl.rollout.capacity import MAX_SEQUENCES, engine_share
from mrl.rollout.engine import EngineSettings, Part, device_full
from mrl.rollout.fleet import FollowUps, RolloutFleet
from mrl.rollout.quantization import sent_form, shares_scales
from mrl.rollout.requests import Generated, GenerationRequest, Sampling
from mrl.rollout.schedule import REPLICA
from mrl.spans import SPANS
from mrl.weight_sync.ipc import socket_path
from mrl.weight_sync.resharder import WeightSyncSpec
from mrl.weight_sync.rollout_layout import RolloutLayout
from mrl.weight_sync.row_planner import sizes_for_fp8

SOCKETS = "handover"
RECEIVER = "receiver"
PARTS = ("parameters", "gradients", "optimizer")


class HybridEngine:
    """Training and generation take turns. After each update the new weights are sent to the engines under a new
    version.

    Engines start in parallel with the trainer's groups, but on GPUs after them: an engine measures the free memory of
    its device, where no other process may start at the same time.
    """

    _actor: RayWorkerGroup
    _guests: list[RayWorkerGroup]
    _scoring: list[RayWorkerGroup]

    def __init__(
        self,
        config: Config,
        groups: Mapping[str, Future[RayWorkerGroup]],
        context: RunContext,
        *,
        reads_text: bool = False,
        loads_files: bool = False,
    ) -> None:
        """Start the engines, with the tokenizer if requests may end at texts.

        With `loads_files` they serve the weights in the model's files: there is no training and no transfer.
        """
        self._config, self._context, self._groups = config, context, groups
        self._reads_text, self._loads_files = reads_text or bool(config.rollout.stop), loads_files
        self._receivers: RayWorkerGroup | None = None
        if has_own_rollout_pool(config):
            receiver = RayClassWithInitArgs(
                "mrl.rollout.replica:WeightReceiver"
            )  # one on each device of the engines' pool
            mesh, slots = Mesh(rollout_devices(config)), context.resources.device_slots("rollout")
            self._receivers = RayWorkerGroup(RECEIVER, receiver, mesh, context, slots)
        self._take_turns = config.sync.offload and self._receivers is None
        self._sockets = context.run_directory / SOCKETS
        shutil.rmtree(self._sockets, ignore_errors=True)  # left by a crashed run
        self._sockets.mkdir(mode=0o700)
        self._gpus: list[str] = []
        if config.cluster.device == "gpu":
            wait(groups.values())
            self._gpus = (self._receivers or groups["actor"].result()).visible_gpus()
        self.version = 1
        """Version of the actor's weights; each step that changes them adds one."""
        self._held = 0
        """Version of the weights that the engines have; 0 while they sleep."""
        self._is_generating = self._parameters_are_away = False
        self._metrics: dict[str, float] = {}
        self.unaligned: frozenset[str] = frozenset()
        """Modules of engines in FP8 that get the engines' dtype: their slices are not made of whole blocks."""
        self._cache = cache_in_flight(config)
        self.actor_lock = threading.Lock()
        """Held by the trainer while it uses the actor and another thread generates."""
        starting = self._start_replica, self._send_weights, self._settings(0), context.events, self._newest_weights
        self.fleet = RolloutFleet(num_engines(config), *starting)
        if self._take_turns:
            self.fleet.sleep()

    def connect(self) -> None:
        """Send the trainer's ranks, whose models are loaded now, the devices of all engines."""
        config, per_engine = self._config, self._config.rollout.num_devices
        groups, pools = {role: group.result() for role, group in self._groups.items()}, config.placement.roles
        self._actor = groups["actor"]
        guests = {role: group for role, group in groups.items() if role != "actor" and pools[role] == pools["actor"]}
        self._guests = [*guests.values()]
        self._scoring = [group for role, group in guests.items() if role in config.scoring_models()]
        num_workers = num_engines(config) * per_engine
        nodes = [node for node, _ in self._actor.where()]
        first = len(nodes) if self._receivers else 0
        nodes += [node for node, _ in self._receivers.where()] if self._receivers else []
        hosts = tuple(range(first, first + num_workers))
        numbers = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
        # Engines that cannot be written directly take full tensors on each of their ranks.
        whole = bool(self.fleet.full_tensor_reason)
        spec, shards = read_spec(config.model.path), shard_size(config, "actor")
        sizes = EngineSizes.of(config.rollout, spec, whole=whole)
        if (form := sent_form(config.rollout, spec)) and not whole and not _adapter_rank(config):
            sizes = sizes_for_fp8(spec, config.actor.parallel, shards, sizes, form)
        self.unaligned = sizes.unaligned
        in_step = shares_scales(config.rollout) and sizes.fp8 is None
        route = WeightSyncSpec(
            layout=RolloutLayout(sizes, hosts, tuple(numbers[node] for node in nodes), in_step=in_step),
            sockets=tuple(
                socket_path(self._sockets, REPLICA.format(worker // per_engine), worker % per_engine)
                for worker in range(num_workers)
            ),
            dtype=self._settings(0).dtype,
            trained_dtype=held_dtype(config.actor),
            shard_size=shards,
            bucket_bytes=config.sync.bucket_bytes,
            timeout_s=self._context.deadlines.call_s,
            rendezvous=self._receivers.rendezvous() if self._receivers else None,
            adapters=self._sockets if _adapter_rank(config) else None,
        )
        if self._receivers is None:
            self._actor.prepare_sending(route)
            return
        preparing = self._receivers.prepare_receiving.future(config.model.path, config.actor.parallel, first, route)
        self._actor.prepare_sending(route)
        preparing.get()

    def weights_changed(self) -> None:
        self.version += 1

    def metrics(self) -> dict[str, float]:
        """Return the size and duration of the last transfer."""
        return dict(self._metrics)

    @contextmanager
    def rollout_mode(self) -> Iterator[None]:
        """Wake the engines and give them the actor's weights, for the length of the block."""
        if self._is_generating:
            raise RolloutError("rollout_mode was entered twice: the engines are generating already")
        self._is_generating = True
        if self._take_turns:
            self._actor.offload("gradients", "optimizer")
            for group in self._guests:
                group.offload(*PARTS)
        self._wake_up()
        yield
        # A failure in the block ends the run with all its processes, so there is no return to training.
        if self._take_turns:
            if self._held:
                self.fleet.sleep(keep=self._cache is not None)
            self._held = 0
            for group in (self._actor, *self._guests):
                group.onload(*PARTS)
            self._parameters_are_away = False
        self._is_generating = False

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        sampling: Sampling,
        follow_ups: FollowUps | None = None,
        *,
        in_flight: bool = False,
    ) -> Iterator[Generated]:
        """Yield samples from the engines' weights as they finish, including those of `follow_ups`, which arrive
        meanwhile.

        With `in_flight`, samples continue with newer weights when these arrive.
        """
        if not self._is_generating and (self._take_turns or not self._held):
            raise RolloutError("the trainer has the devices: call generate within rollout_mode")
        if self._is_generating:
            self._wake_up()
        return self.fleet.stream(requests, sampling, self._held, follow_ups, self._cache if in_flight else None)

    def has_newest(self) -> bool:
        """Return whether the serving engines have the actor's weights, which arrive in flight."""
        if {version for version in self.fleet.versions.values() if version is not None} == {self.version}:
            self._held = self.version
        return self._held == self.version

    def probe(self, request: GenerationRequest, sampling: Sampling, *, everyone: bool) -> dict[int, Generated]:
        """Send one request to all engines, or only to engines that have not been probed since their start."""
        if everyone or self.fleet.unprobed:
            self._wake_up()
        return self.fleet.probe(request, sampling, self.version, everyone=everyone)

    def pause(self) -> None:
        """Give the engines' devices to reward models during a rollout. The next request wakes the engines again."""
        if self._take_turns and self._scoring and self._held:
            self.fleet.sleep()
            self._held = 0
            for group in self._scoring:
                group.onload(*PARTS)

    def close(self) -> None:
        """End the engines and remove their sockets."""
        self.fleet.close()
        if self._receivers is not None:
            self._receivers.shutdown()
        shutil.rmtree(self._sockets, ignore_errors=True)

    def _wake_up(self) -> None:
        """Wake the engines with the actor's weights; with shared devices, free these first."""
        if self._held == self.version:
            return
        if self._take_turns:
            for group in self._scoring:
                group.offload(*PARTS)
            self._wake("weights")
        self.fleet.update(self.version, self._cache)
        self._held = self.version
        if self._take_turns:
            self._actor.offload("parameters")
            self._parameters_are_away = True
            self._wake("kv_cache")

    def _wake(self, part: Part) -> None:
        """Wake this part of all engines.

        If a GPU has too little memory, raise an error with the users of its memory.
        """
        rollout = self._config.rollout
        for replica, rooms in self.fleet.wake(part).items():
            for device, room in enumerate(rooms, replica * rollout.num_devices):
                if room.lacking_bytes > 0:
                    memory_by_role = {
                        group.role: group.device_memory()[device] for group in (self._actor, *self._guests)
                    }
                    gpu = f"device {self._gpus[device]} of {self._actor.where()[device][0]}"
                    raise device_full(part, gpu, room, memory_by_role, rollout.vllm)

    def _start_replica(self, index: int) -> RayWorkerGroup:
        """Start a group with one process on each node of an engine: the engine, and followers on further nodes."""
        resources, per_engine = self._context.resources, self._config.rollout.num_devices
        slots = resources.device_slots("rollout" if self._receivers else "actor")
        step = devices_per_engine_node(self._config)
        firsts = range(index * per_engine, (index + 1) * per_engine, step)
        gpus = [",".join(self._gpus[first : first + step]) for first in firsts] if self._gpus else []
        devices = [slots.devices[first] for first in firsts]
        slot = DeviceSlots(devices, slots.fraction, slots.description, gpus)
        settings, limit_s = self._settings(index), self._context.deadlines.call_s
        if len(devices) > 1:
            addresses = [resources.node(device.node_id).network.address for device in devices]
            settings = replace(settings, nodes=tuple(addresses), secret=secrets.token_hex(32))
        worker = RayClassWithInitArgs(
            "mrl.rollout.replica:RolloutReplica", self._config.rollout.engine, settings, limit_s
        )
        deadlines, num_parameters = self._context.deadlines, read_spec(self._config.model.path).num_parameters
        # Starting takes longer for larger models: memory for weights, compilation, graph capture.
        start_s = deadlines.engine_start_s or deadlines.start_s + num_parameters / 5e8
        context = replace(self._context, deadlines=replace(deadlines, start_s=start_s))
        with SPANS(f"start {settings.replica}"):
            return RayWorkerGroup(settings.replica, worker, Mesh(len(devices), tp=len(devices)), context, slot)

    def _settings(self, index: int) -> EngineSettings:
        rollout, path, replay = self._config.rollout, self._config.model.path, self._config.asynchrony.replay
        return EngineSettings(
            model=Path(path),
            dtype=rollout.vllm.get("dtype", self._config.actor.dtype),
            device="cuda" if self._config.cluster.device == "gpu" else "cpu",
            max_tokens=longest_sample_tokens(rollout),
            vocab=read_spec(path).vocab,
            sockets=self._sockets,
            replica=REPLICA.format(index),
            tp=rollout.tp,
            pp=rollout.pp,
            dp=rollout.dp,
            share=MAX_SEQUENCES if self._loads_files else engine_share(self._config),
            loads_files=self._loads_files,
            reads_text=self._reads_text,
            takes_weights_in_flight=self._cache is not None,
            returns_routes=self._config.algorithm.router_replay == "R3" and not self._loads_files,
            adapter_rank=0 if self._loads_files else _adapter_rank(self._config),
            records=self._context.run_directory if self._cache and not replay else None,
            replays=Path(replay) if replay else None,
            vllm={name: value for name, value in rollout.vllm.items() if name != "dtype"},
            sglang=rollout.sglang,
        )

    @contextmanager
    def _newest_weights(self) -> Iterator[int | None]:
        """Yield the version that the actor can send during the block; None while the trainer uses the actor."""
        is_free = self.actor_lock.acquire(blocking=False)
        try:
            yield self.version if is_free else None
        finally:
            if is_free:
                self.actor_lock.release()

    def _send_weights(self, replicas: Sequence[int], version: int) -> str:
        """Send weights to these replicas from the trainer's side, after writing the adapters for all of them.

        Return the digest of the adapters. If a replica starts late, the parameters are loaded and offloaded again.
        """
        if self._loads_files:
            return ""
        began, per_engine = time.perf_counter(), self._config.rollout.num_devices
        if self._parameters_are_away:
            self._actor.onload("parameters")
        workers = [replica * per_engine + number for replica in replicas for number in range(per_engine)]
        pending = self._receivers.send_weights.future(version, workers) if self._receivers else None
        reports = self._actor.send_weights(version, workers) + (pending.get() if pending else [])
        if self._parameters_are_away:
            self._actor.offload("parameters")
        if failures := [report.failure for report in reports if report.failure]:
            raise RolloutError(f"weights {version} did not arrive: {failures[0]}")
        self._metrics = {
            "sync/seconds": time.perf_counter() - began,
            "sync/bytes_between_ranks": sum(report.bytes_received for report in reports),
            "sync/least_bytes": sum(report.least_bytes for report in reports),
        }
        if moved := sum(report.moved for report in reports):
            self._metrics["sync/lost_update"] = sum(report.lost for report in reports) / moved
        if written := max(report.adapter_bytes for report in reports):
            self._metrics["sync/adapter_bytes"] = written
        return str(max(report.adapters for report in reports))


def _adapter_rank(config: Config) -> int:
    """Return the rank of the adapters that engines apply; 0 if they get plain weights."""
    return config.actor.lora.engine_rank if config.actor.lora else 0
