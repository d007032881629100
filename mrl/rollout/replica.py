"""One rollout replica as a worker: an engine in a process of its own, which may die and be replaced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from mrl.controller import Dispatch, RankInfo, Worker, register
from mrl.errors import RolloutError
from mrl.hub import node_copy
from mrl.rollout.engine import Cache, EngineSettings, FreeMemory, Part, engine_class, need_version
from mrl.rollout.engine_thread import EngineThread
from mrl.rollout.requests import Generated, GenerationRequest, Sampling
from mrl.rollout.schedule import RecordedSchedule, Schedule, schedule_path


class RolloutReplica(Worker):
    """Takes requests at any time and returns samples as they are finished; the engine never waits for the driver."""

    def __init__(self, place: RankInfo, engine: str, settings: EngineSettings, step_deadline_s: float) -> None:
        super().__init__(place)
        settings = replace(settings, model=node_copy(str(settings.model)))
        self._thread = EngineThread(partial(engine_class(engine), settings), step_deadline_s, _schedule(settings))

    @register(Dispatch.RANK_ZERO)
    def full_tensor_reason(self) -> str:
        """Why this replica takes whole Hugging Face tensors; empty where it takes fused and sharded ones."""
        return self._thread.call(lambda engine: engine.full_tensor_reason)

    @register(Dispatch.RANK_ZERO)
    def submit_and_poll(
        self, requests: Sequence[GenerationRequest], sampling: Sampling, version: int, wait_s: float
    ) -> list[Generated] | RolloutError:
        """Start these requests; return what has been finished, after waiting this long for something.

        A rule that was broken is returned, for it would be broken again; what is raised is a broken engine.
        """
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
        """Forget every request."""
        self._thread.abort()

    @register(Dispatch.RANK_ZERO)
    def receive_weights(self, version: int, cache: Cache | None = None) -> None:
        """Take in one version, which the trainer ranks of the same devices hand over meanwhile."""
        self._thread.act("weights", [str(version)], lambda engine: engine.receive_weights(version, cache))

    @register(Dispatch.RANK_ZERO)
    def sleep(self, keep: bool = False) -> None:
        """Give the device's memory back; with `keep`, what is under way goes on after that."""
        self._thread.act("sleep", [], lambda engine: engine.sleep(keep=keep))

    @register(Dispatch.RANK_ZERO)
    def wake(self, part: Part) -> list[FreeMemory]:
        """Take one part of the memory again; the devices, where one of them has not got it."""
        return self._thread.call(lambda engine: engine.wake(part))


def _schedule(settings: EngineSettings) -> Schedule:
    if settings.replays:
        return RecordedSchedule(schedule_path(settings.replays, settings.replica))
    return Schedule(schedule_path(settings.records, settings.replica) if settings.records else None)
