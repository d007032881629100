"""All rollout replicas as one: what is asked of it comes back complete and in order, whoever dies meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol

from mrl.controller import RayWorkerGroup
from mrl.errors import MrlError, RolloutError, WorkerError, WorkerRaised
from mrl.events import EventLog, ReplicaLost, ReplicaServes
from mrl.rollout.engine import EngineSettings, FreeMemory, Part, check_request
from mrl.rollout.pace import Pace
from mrl.rollout.requests import Generated, GenerationRequest, Sampling, wrong_answer
from mrl.rollout.scheduler import MAX_IN_FLIGHT, RequestScheduler

WAIT_S = 0.5
"""How long a replica waits for something to be finished before it answers that nothing was."""
FOLLOW_UP_WAIT_S = 0.02
"""The same where more may be asked for meanwhile: a request waits as long until its replica listens again."""

StartReplica = Callable[[int], RayWorkerGroup]
SendWeights = Callable[[Sequence[int], int], None]
"""Has the trainer hand a version to the replicas of these numbers; raises where it could not."""


class FollowUps(Protocol):
    """Requests that arise while others are generated, as the next turns of conversations do."""

    def take(self) -> Sequence[GenerationRequest]:
        """Return those that there are by now."""

    def arriving(self) -> Future[Any] | None:
        """Return what is done when there may be more; None where more can only follow what is generated now."""


class RolloutFleet:
    """Replicas by number, started at once; whatever is asked of them first waits for them.

    A replica serves only while it holds the weights that are asked for.
    """

    def __init__(
        self,
        num_replicas: int,
        start: StartReplica,
        send_weights: SendWeights,
        limits: EngineSettings,
        events: EventLog,
    ) -> None:
        self._start, self._send_weights, self._limits, self._events = start, send_weights, limits, events
        self._threads = ThreadPoolExecutor(num_replicas, "replica")
        self._replicas: dict[int, RayWorkerGroup] = {}
        self._versions: dict[int, int | None] = dict.fromkeys(range(num_replicas))
        self._starting: dict[int, Future[RayWorkerGroup]] = {}
        self.unprobed: set[int] = set()
        """Those that have not been asked since they started."""
        self._pace = Pace(events)
        self._served: set[int] = set()
        """Those that have finished a sample since they started: what breaks them is not what they are."""
        self._start_missing()

    @cached_property
    def full_tensor_reason(self) -> str:
        """Why whole Hugging Face tensors must be sent instead of fused and sharded ones; empty where they need not."""
        self._wait_until_started()
        return str(self._replicas[0].full_tensor_reason())

    def update(self, version: int) -> None:
        """Bring every replica to this version. One that dies meanwhile is replaced by the next `stream`."""
        self._wait_until_started()
        self._sync_weights(list(self._replicas), version)

    def stream(
        self,
        requests: Sequence[GenerationRequest],
        sampling: Sampling,
        version: int,
        follow_ups: FollowUps | None = None,
    ) -> Iterator[Generated]:
        """The samples as they are finished; whoever stops asking for more makes the replicas forget the rest."""
        _check_requests(requests, self._limits)
        self._wait_until_started()
        if stale := [index for index in self._replicas if self._versions[index] != version]:
            self._sync_weights(stale, version)
        work = RequestScheduler(requests, len(self._versions), 1 if sampling.alone else MAX_IN_FLIGHT)
        asked: dict[Future[Any], int] = {}
        wait_s = FOLLOW_UP_WAIT_S if follow_ups else WAIT_S
        try:
            while True:
                if follow_ups:
                    _check_requests(more := follow_ups.take(), self._limits)
                    work.add(more)
                arriving = follow_ups.arriving() if follow_ups else None
                if not work.num_left and not arriving:
                    return
                self._start_missing()
                self._ask(work, asked, sampling, version, wait_s)
                awaited = [*asked, *self._starting.values(), *([arriving] if arriving else [])]
                done, _ = wait(awaited, return_when=FIRST_COMPLETED)
                for future in done & asked.keys():
                    yield from self._collect(future, asked.pop(future), work, version)
                if joined := self._join():
                    self._sync_weights(joined, version)
        finally:
            wait(asked)
            self._pace.rollout_ends()
            self._call([index for index in self._replicas if work.num_in_flight(index)], "abort")

    def probe(
        self, request: GenerationRequest, sampling: Sampling, version: int, *, everyone: bool
    ) -> dict[int, Generated]:
        """The same request, answered by every replica that serves, or by those alone that are new; by replica.

        One that dies meanwhile, or whose answer cannot be right, has no answer.
        """
        asked = {
            index: self._threads.submit(_probe_replica, replica, request, sampling, version)
            for index, replica in self._replicas.items()
            if self._versions[index] == version and (everyone or index in self.unprobed)
        }
        answers = {}
        for index, future in asked.items():
            try:
                answer = future.result()
            except WorkerError as error:
                self._drop_replica(index, _headline(error), num_unfinished=1)
                continue
            if wrong := wrong_answer([answer], {request.key: request}, version, self._limits.vocab):
                self._drop_replica(index, f"its answer cannot be right: {wrong}", num_unfinished=1)
            else:
                answers[index] = answer
        self.unprobed -= answers.keys()
        return answers

    def sleep(self) -> None:
        """Have every replica give its memory back."""
        self._wait_until_started()
        self._call(list(self._replicas), "sleep")
        self._versions = dict.fromkeys(self._versions)

    def wake(self, part: Part) -> dict[int, list[FreeMemory]]:
        """Have every replica take one part of its memory again; by replica its devices, where one has not got it."""
        return self._call(list(self._replicas), "wake", part)

    def close(self) -> None:
        """End every replica."""
        wait(self._starting.values())
        started = [future.result() for future in self._starting.values() if future.exception() is None]
        for replica in (*self._replicas.values(), *started):
            replica.shutdown()
        self._threads.shutdown()

    def _ask(
        self,
        work: RequestScheduler,
        asked: dict[Future[Any], int],
        sampling: Sampling,
        version: int,
        wait_s: float,
    ) -> None:
        """Give every replica that serves, and has answered what it was asked, its share."""
        serving = [index for index in self._replicas if self._versions[index] == version]
        for index in set(serving) - set(asked.values()):
            requests = work.assign(index, len(serving))
            if work.num_in_flight(index):
                submit = self._replicas[index].submit_and_poll
                asked[self._threads.submit(_timed, submit, requests, sampling, version, wait_s)] = index

    def _collect(self, future: Future[Any], index: int, work: RequestScheduler, version: int) -> Sequence[Generated]:
        try:
            answered: tuple[list[Generated] | RolloutError, float] = future.result()
        except WorkerError as error:
            has_served = index in self._served
            self._drop_replica(index, _headline(error), work.num_in_flight(index))
            work.requeue(index, error.what, has_served=has_served)
            return ()
        answer, seconds = answered
        if isinstance(answer, RolloutError):
            raise answer
        if wrong := wrong_answer(answer, work.in_flight(index), version, self._limits.vocab):
            self._drop_replica(index, f"its answer cannot be right: {wrong}", work.num_in_flight(index))
            work.reject(index, wrong)
            return ()
        work.finish(index, answer)
        self._pace.note(index, sum(len(sample.token_ids) for sample in answer), seconds)
        if answer:
            self._served.add(index)
        return [replace(sample, replica=index) for sample in answer]

    def _sync_weights(self, indices: Sequence[int], version: int) -> None:
        """Have these replicas receive while the trainer sends; those that die are let go, and the rest tries again."""
        self._versions |= dict.fromkeys(indices)
        calls = {index: self._replicas[index].receive_weights.future(version) for index in indices}
        failures: list[MrlError] = []
        try:
            self._send_weights(indices, version)
        except (WorkerError, RolloutError) as error:
            failures.append(error)
        raised = []
        for index, call in calls.items():
            try:
                call.get()
                self._versions[index] = version
                self._events.write(ReplicaServes(index, version))
            except WorkerRaised as error:  # it lives; perhaps the trainer left it because of another
                failures.append(error)
                raised.append(index)
            except WorkerError as error:
                self._drop_replica(index, _headline(error))
        if failures and all(index in self._replicas for index in indices):
            raise failures[0]
        if raised:
            self._sync_weights(raised, version)

    def _call(self, indices: Sequence[int], method: str, *args: Any) -> dict[int, Any]:
        """Call these replicas at once; let those go that fail."""
        calls = {index: getattr(self._replicas[index], method).future(*args) for index in indices}
        answers = {}
        for index, call in calls.items():
            try:
                answers[index] = call.get()
            except WorkerError as error:
                self._drop_replica(index, _headline(error))
        return answers

    def _drop_replica(self, index: int, reason: str, num_unfinished: int = 0) -> None:
        self._events.write(ReplicaLost(index, reason, num_unfinished))
        self._served.discard(index)
        self._versions[index] = None
        self._replicas.pop(index).shutdown()

    def _start_missing(self) -> None:
        for index in self._versions.keys() - self._replicas.keys() - self._starting.keys():
            self._starting[index] = self._threads.submit(self._start, index)
            self.unprobed.add(index)

    def _join(self) -> list[int]:
        """Take in the replicas that have started since."""
        joined = [index for index, future in self._starting.items() if future.done()]
        for index in joined:
            self._replicas[index] = self._starting.pop(index).result()
        return joined

    def _wait_until_started(self) -> None:
        """Wait for the replicas that are starting."""
        wait(self._starting.values())
        self._join()


def _check_requests(requests: Sequence[GenerationRequest], limits: EngineSettings) -> None:
    for request in requests:
        check_request(request, limits)
    if len({request.key for request in requests}) != len(requests):
        raise RolloutError("two requests have the same key")


def _timed(call: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    begin = time.monotonic()
    return call(*args), time.monotonic() - begin


def _probe_replica(replica: RayWorkerGroup, request: GenerationRequest, sampling: Sampling, version: int) -> Generated:
    """What one replica answers to one request."""
    answer: list[Generated] | RolloutError = replica.submit_and_poll([request], sampling, version, WAIT_S)
    while not answer:
        answer = replica.submit_and_poll([], sampling, version, WAIT_S)
    if isinstance(answer, RolloutError):
        raise answer
    return answer[0]


def _headline(error: WorkerError) -> str:
    return error.what.partition("\n")[0]
