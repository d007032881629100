"""Workers on the engines' devices: replicas, which may die and be replaced, and receivers of weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVar

import torch

from mrl.config.schema import ParallelConfig
from mrl.controller import Dispatch, RankInfo, Rendezvous, Worker, register
from mrl.controller.transport import ColumnStore
from mrl.errors import RolloutError, WorkerSilent
from mrl.hub import node_copy
from mrl.models.families import read_spec
from mrl.rollout.engine import (
    Cache,
    EngineSettings,
    FreeMemory,
    Part,
    RolloutEngine,
    can_step,
    engine_class,
    need_version,
)
from mrl.rollout.requests import Generated, GenerationRequest, Routes, Sampling
from mrl.rollout.schedule import CallKind, Schedule, ScheduledCall, schedule_path
from mrl.rollout.stored_routes import routes_of, take_out
from mrl.spans import SPANS
from mrl.weight_sync.resharder import Resharder, ReshardReport, WeightSyncSpec
from mrl.weight_sync.row_planner import planner_of

T = TypeVar("T")
_LOOK_S = 0.002


class _Generation:
    """A span over consecutive steps of an engine."""

    def __init__(self) -> None:
        self._span = self._steps = self._samples = self._tokens = 0

    def begins(self) -> None:
        if not self._span:
            self._span = SPANS.open("generate")
            self._steps = self._samples = self._tokens = 0

    def did(self, finished: Sequence[Generated]) -> None:
        self._steps += 1
        self._samples += len(finished)
        self._tokens += sum(len(sample.token_ids) for sample in finished)

    def ends(self) -> None:
        SPANS.close(self._span, steps=self._steps, samples=self._samples, tokens=self._tokens)
        self._span = 0


class EngineThread:
    """Runs everything that an engine does in one thread, including its start."""

    def __init__(
        self, make: Callable[[], RolloutEngine], step_deadline_s: float, schedule: Schedule | None = None
    ) -> None:
        self._step_deadline_s, self._schedule = step_deadline_s, schedule or Schedule()
        self._num_steps = 0
        self._thread = ThreadPoolExecutor(1, "engine")
        self._engine = self._thread.submit(make).result()
        self._finished: SimpleQueue[list[Generated]] = SimpleQueue()
        self._stepping: Future[None] = Future()
        self._stepping.set_result(None)
        self._stepped_at = time.monotonic()
        self._generating = _Generation()

    def act(self, kind: CallKind, of: Sequence[str], action: Callable[[RolloutEngine], None]) -> None:
        """Do something that changes later results: now or, in a replay, before the same step as in the recorded run."""
        while self._schedule.next and not self._stepping.done():
            time.sleep(_LOOK_S)

        def noted(engine: RolloutEngine) -> None:
            self._schedule.note(ScheduledCall(self._num_steps, kind, tuple(of)))
            action(engine)

        self.call(noted, kind)

    def call(self, action: Callable[[RolloutEngine], T], name: str = "") -> T:
        """Call a function after the step under way. With a name, it is a span of a trace."""
        result = self._thread.submit(self._act, name, action).result()
        if self._stepping.done() and self._goes_on():
            self._raise_failure()
            self._stepped_at = time.monotonic()
            self._stepping = self._thread.submit(self._step)
        return result

    def poll(self, wait_s: float) -> list[Generated]:
        """Return the finished samples, after waiting up to `wait_s` for the first one."""
        self._raise_failure()
        samples: list[Generated] = []
        try:
            samples += self._finished.get(timeout=wait_s)
            while True:
                samples += self._finished.get_nowait()
        except Empty:
            pass
        age_s = time.monotonic() - self._stepped_at
        if not self._stepping.done() and age_s > self._step_deadline_s:
            raise WorkerSilent(f"the engine has been busy with one step for {age_s:.0f} s")
        return samples

    def abort(self) -> None:
        self.act("abort", [], lambda engine: engine.abort())
        self.poll(0)

    def _step(self) -> None:
        if not self._goes_on():  # the engine has fallen asleep, or must wait for another call
            self._generating.ends()
            return
        self._generating.begins()
        if samples := self._engine.step():
            self._finished.put(samples)
        self._generating.did(samples)
        self._num_steps += 1
        self._stepped_at = time.monotonic()
        if self._goes_on():
            self._stepping = self._thread.submit(self._step)
        else:
            self._generating.ends()

    def _act(self, name: str, action: Callable[[RolloutEngine], T]) -> T:
        with SPANS(name) if name else nullcontext():
            return action(self._engine)

    def _goes_on(self) -> bool:
        """Return whether there is a step to do. In a replay, calls scheduled before the step come first."""
        call = self._schedule.next
        return can_step(self._engine) and (call is None or self._num_steps < call.at)

    def _raise_failure(self) -> None:
        if self._stepping.done():
            self._stepping.result()


class RolloutReplica(Worker):
    """Takes requests at any time and returns samples as they finish. The engine never waits for the driver."""

    working_thread = "engine_0"

    def __init__(self, place: RankInfo, engine: str, settings: EngineSettings, step_deadline_s: float) -> None:
        super().__init__(place)
        port = place.rendezvous.port
        settings = replace(settings, model=node_copy(str(settings.model)), node=place.rank, port=port)
        if place.rank:
            if (follower := engine_class(engine).follower) is None:
                fix = "set rollout.engine=vllm, or a rollout.tp of at most one node"
                raise RolloutError(f"engines of {engine} cannot span {len(settings.nodes)} nodes", fix=fix)
            self._follower = follower(settings)
            return
        if settings.nodes:
            place.rendezvous.hand_over()
        runs = (settings.records, settings.replays)
        schedule = Schedule(*(run and schedule_path(run, settings.replica) for run in runs))
        self._thread = EngineThread(partial(engine_class(engine), settings), step_deadline_s, schedule)
        self._earlier: dict[str, Routes] = {}
        """Routes of the earlier turns of samples under way."""

    @register(Dispatch.FOLLOWERS)
    def follow(self) -> None:
        """Watch the engine's processes on this node. Raise an error when one of them ends."""
        self._follower.watch()

    @register(Dispatch.RANK_ZERO)
    def full_tensor_reason(self) -> str:
        """Return why this replica needs full Hugging Face tensors; empty if it takes fused and sharded ones."""
        return self._thread.call(lambda engine: engine.full_tensor_reason)

    @register(Dispatch.RANK_ZERO)
    def submit_and_poll(
        self, requests: Sequence[GenerationRequest], sampling: Sampling, version: int, wait_s: float
    ) -> list[Generated] | RolloutError:
        """Start these requests. Return the finished samples, after waiting up to `wait_s` for the first one.

        A violated rule is returned as an error, because a retry would violate it again. A raised error means a broken
        engine.
        """
        answer = self._submit_and_poll(requests, sampling, version, wait_s)
        return answer if isinstance(answer, RolloutError) else [replace(sample, routes=None) for sample in answer]

    @register(Dispatch.RANK_ZERO, stores=True)
    def submit_and_poll_routes(
        self, requests: Sequence[GenerationRequest], sampling: Sampling, version: int, wait_s: float
    ) -> tuple[tuple[list[Generated], list[int]] | RolloutError, ColumnStore | None]:
        """Do the same, and store the routes of the samples. Return also their numbers of tokens with routes."""
        self._earlier |= {request.key: routes_of(request.routes) for request in requests if request.routes is not None}
        answer = self._submit_and_poll(requests, sampling, version, wait_s)
        if isinstance(answer, RolloutError):
            return answer, None
        lengths = [0 if sample.routes is None else len(sample.routes) for sample in answer]
        samples, stored = take_out(answer, self._earlier)
        for sample in samples:
            self._earlier.pop(sample.key, None)
        return (samples, lengths), stored

    def _submit_and_poll(
        self, requests: Sequence[GenerationRequest], sampling: Sampling, version: int, wait_s: float
    ) -> list[Generated] | RolloutError:
        try:
            self._thread.call(lambda engine: need_version(engine, version))
            if requests:
                keys = [request.key for request in requests]
                self._thread.act("start", keys, lambda engine: engine.start(requests, sampling))
            return self._thread.poll(wait_s)
        except RolloutError as error:
            return error

    @register(Dispatch.RANK_ZERO)
    def abort(self) -> None:
        self._thread.abort()
        self._earlier.clear()

    @register(Dispatch.RANK_ZERO)
    def receive_weights(self, version: int, cache: Cache | None = None) -> str:
        """Receive one version from the trainer ranks on the same devices, which send it at the same time.

        Return the digest of its adapters, if the engine applies some.
        """
        return self._receive(version, cache)

    @register(Dispatch.RANK_ZERO)
    def receive_adapters(self, version: int, cache: Cache | None = None) -> str:
        """Do the same with the adapters of a version, which the trainer has written. Keep the frozen weights."""
        return self._receive(version, cache, adapters_only=True)

    def _receive(self, version: int, cache: Cache | None, **others: bool) -> str:
        self._thread.act("weights", [str(version)], lambda engine: engine.receive_weights(version, cache, **others))
        return self._thread.call(lambda engine: engine.adapter_digest)

    @register(Dispatch.RANK_ZERO)
    def sleep(self, keep: bool = False) -> None:
        """Free the device memory. With `keep`, samples under way continue afterwards."""
        self._thread.act("sleep", [], lambda engine: engine.sleep(keep=keep))

    @register(Dispatch.RANK_ZERO)
    def wake(self, part: Part) -> list[FreeMemory]:
        """Allocate the memory of one part again. Return the devices if one of them has too little."""
        return self._thread.call(lambda engine: engine.wake(part), f"wake {part}")


class WeightReceiver(Worker):
    """A rank without weights that forwards received weights to the engine's worker on its device."""

    def __init__(self, place: RankInfo) -> None:
        super().__init__(place)
        self._resharder: Resharder

    @register(Dispatch.RANK_ZERO)
    def rendezvous(self) -> Rendezvous:
        """Return the address of the first receiver's socket, where the trainer's ranks and the receivers meet."""
        return replace(self.place.rendezvous, listener=None)

    @register(Dispatch.ONE_TO_ALL)
    def prepare_receiving(self, model: str, parallel: ParallelConfig, num_trainers: int, route: WeightSyncSpec) -> None:
        """Plan the transfers to this rank. All trainer ranks prepare to send at the same time."""
        on_gpu = torch.cuda.is_available()
        device = torch.device("cuda", self.place.local_rank % torch.cuda.device_count()) if on_gpu else "cpu"
        # The first receiver serves the store, from a socket that only it has.
        route = replace(route, rendezvous=self.place.rendezvous)
        transport = route.transport(num_trainers + self.rank, torch.device(device))
        spec = read_spec(node_copy(model))
        planner = planner_of(spec, parallel, num_trainers, route)
        self._resharder = Resharder(planner, transport, {}, route)

    @register(Dispatch.ONE_TO_ALL)
    def send_weights(self, version: int, workers: list[int]) -> ReshardReport:
        """Take part in bringing these workers to a version."""
        return self._resharder.send(version, workers)
