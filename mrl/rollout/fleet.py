"""All rollout replicas as one: what is asked of it comes back complete and in order, whoever dies meanwhile."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

from mrl.controller import RayWorkerGroup
from mrl.errors import MrlError, RolloutError, WorkerError, WorkerRaised
from mrl.events import EventLog, ReplicaLost, ReplicaServes
from mrl.rollout.engine import Cache, EngineSettings, FreeMemory, Part, check_request
from mrl.rollout.requests import Generated, GenerationRequest, Sampling, wrong_answer
from mrl.rollout.schedule import FleetSchedule
from mrl.rollout.scheduler import MAX_IN_FLIGHT, Pace, RequestScheduler

WAIT_S = 0.5
"""How long a replica waits for something to be finished before it answers that nothing was."""
FOLLOW_UP_WAIT_S = 0.02
"""The same where more may be asked for meanwhile: a request waits as long until its replica listens again."""
_LOOK_S = 0.05
"""Between two looks whether the trainer can send, where a replica waits for weights."""

StartReplica = Callable[[int], RayWorkerGroup]
SendWeights = Callable[[Sequence[int], int], None]
"""Has the trainer hand a version to the replicas of these numbers; raises where it could not."""
NewestWeights = Callable[[], AbstractContextManager[int | None]]
"""Which version the trainer can send for the length of the block; None while it computes."""


class FollowUps(Protocol):
    """Requests that arise while others are generated, as the next turns of conversations do."""

    def take(self) -> Sequence[GenerationRequest]:
        """Return those that there are by now."""

    def arriving(self) -> Future[Any] | None:
        """Return what is done when there may be more; None where more can only follow what is generated now."""


@dataclass(frozen=True)
class _Poll:
    """A replica that is asked what it has finished, and the version of its weights then."""

    index: int
    replica: RayWorkerGroup
    version: int


class RolloutFleet:
    """Replicas by number, started at once; whatever is asked of them first waits for them.

    A replica serves only while it holds weights of the trainer: those that are asked for, or, where it has started
    since and the trainer has gone on, the newest that it could be sent. Each sample says what drew it.
    """

    def __init__(
        self,
        num_replicas: int,
        start: StartReplica,
        send_weights: SendWeights,
        limits: EngineSettings,
        events: EventLog,
        newest: NewestWeights | None = None,
    ) -> None:
        """Start them. Without `newest` the trainer can send what is asked for at any time."""
        self._start, self._send_weights, self._limits, self._events = start, send_weights, limits, events
        self._version = 0
        self._newest = newest or (lambda: nullcontext(self._version))
        self._schedule = FleetSchedule(limits.replays, num_replicas)
        self._work = RequestScheduler((), num_replicas)
        self._asked: dict[Future[Any], _Poll] = {}
        """What replicas are asked at the moment: before that is answered nothing else is asked of them."""
        self.is_closing = False
        """Set to have the `stream` of another thread end, by an error."""
        self.generating_s = 0.0
        """Seconds in which some replica had samples under way."""
        self._threads = ThreadPoolExecutor(num_replicas, "replica")
        self._replicas: dict[int, RayWorkerGroup] = {}
        self.versions: dict[int, int | None] = dict.fromkeys(range(num_replicas))
        """Of the weights that each replica serves with; None where it does not."""
        self._unseen_versions: defaultdict[int, set[int]] = defaultdict(set)
        """Of the weights that may have drawn what a replica has finished and nobody has asked for yet."""
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
        self._join(waits=True)
        return str(self._replicas[0].full_tensor_reason())

    def update(self, version: int, cache: Cache | None = None) -> None:
        """Bring every replica to this version, with `cache` those too that have samples under way.

        One that dies meanwhile is replaced by the next `stream`.
        """
        self._join(waits=True)
        wait(self._asked)
        self._sync_weights(list(self._replicas), version, cache)

    def stream(
        self,
        requests: Sequence[GenerationRequest],
        sampling: Sampling,
        version: int,
        follow_ups: FollowUps | None = None,
        cache: Cache | None = None,
    ) -> Iterator[Generated]:
        """The samples as they are finished; whoever stops asking for more makes the replicas forget the rest.

        With `cache` the samples under way go on with newer weights whenever the trainer can send such.
        """
        _check_requests(requests, self._limits)
        self._join(waits=True)
        self._version = version
        if stale := [index for index in self._replicas if self.versions[index] != version]:
            self._sync_weights(stale, version)
        in_flight = 1 if sampling.alone else max(MAX_IN_FLIGHT, self._limits.vllm.get("max_num_seqs") or 0)
        work = RequestScheduler(requests, len(self.versions), in_flight)
        self._work = work
        asked = self._asked = {}
        wait_s = FOLLOW_UP_WAIT_S if follow_ups else WAIT_S
        try:
            while True:
                if self.is_closing:
                    raise RolloutError("the run ends while samples are generated")
                if follow_ups:
                    _check_requests(more := follow_ups.take(), self._limits)
                    work.add(more)
                arriving = follow_ups.arriving() if follow_ups else None
                if not work.num_left and not arriving:
                    return
                self._start_missing()
                self._join()
                yield from self._take_weights(asked, cache)
                self._ask(asked, sampling, wait_s)
                awaited = [*asked, *self._starting.values(), *([arriving] if arriving else [])]
                is_waiting, began = cache is not None or None in self.versions.values(), time.monotonic()
                done, _ = wait(awaited, _LOOK_S if is_waiting else WAIT_S, FIRST_COMPLETED)
                self.generating_s += time.monotonic() - began if asked else 0.0
                for future in done & asked.keys():
                    yield from self._collect(future, asked.pop(future))
        finally:
            wait(asked)
            self._pace.rollout_ends()
            self._schedule.advance(busy := [index for index in self._replicas if work.in_flight(index)])
            self._call(busy, "abort")
            self._work = RequestScheduler((), len(self.versions))

    def probe(
        self, request: GenerationRequest, sampling: Sampling, version: int, *, everyone: bool
    ) -> dict[int, Generated]:
        """The same request, answered by every replica that serves, or by those alone that are new; by replica.

        One that dies meanwhile, or whose answer cannot be right, has no answer.
        """
        asked = {
            index: self._threads.submit(_probe_replica, replica, request, sampling, version)
            for index, replica in self._replicas.items()
            if self.versions[index] == version and (everyone or index in self.unprobed)
        }
        self._schedule.advance(asked)
        answers = {}
        for index, future in asked.items():
            try:
                answer = future.result()
            except WorkerError as error:
                self._drop_replica(index, error.what, num_asked=1)
                continue
            if wrong := wrong_answer([answer], {request.key: request}, {version}, self._limits.vocab):
                self._drop_replica(index, f"its answer cannot be right: {wrong}", num_asked=1)
            else:
                answers[index] = answer
        self.unprobed -= answers.keys()
        return answers

    def sleep(self, *, keep: bool = False) -> None:
        """Have every replica give its memory back; with `keep`, what is under way goes on after that."""
        self._join(waits=True)
        wait(self._asked)
        self._schedule.advance(self._replicas)
        self._call(list(self._replicas), "sleep", *([True] if keep else []))
        self.versions = dict.fromkeys(self.versions)

    def wake(self, part: Part) -> dict[int, list[FreeMemory]]:
        """Have every replica take one part of its memory again; by replica its devices, where one has not got it."""
        return self._call(list(self._replicas), "wake", part)

    def close(self) -> None:
        wait(self._starting.values())
        started = [future.result() for future in self._starting.values() if future.exception() is None]
        for replica in (*self._replicas.values(), *started):
            replica.shutdown()
        self._threads.shutdown()

    def _ask(self, asked: dict[Future[Any], _Poll], sampling: Sampling, wait_s: float) -> None:
        """Give every replica that serves, and has answered what it was asked, its share."""
        work = self._work
        serving = {index: version for index in self._replicas if (version := self.versions[index]) is not None}
        busy = {poll.index for poll in asked.values() if self._replicas.get(poll.index) is poll.replica}
        for index in serving.keys() - busy:
            if (call := self._schedule.next(index)) is None:
                requests = work.assign(index, len(serving))
            elif requests := work.take(index, call.of if call.kind == "start" else ()):
                self._schedule.advance([index])
            if work.in_flight(index):
                replica = self._replicas[index]
                version = serving[index]
                submitted = self._threads.submit(_timed, replica.submit_and_poll, requests, sampling, version, wait_s)
                asked[submitted] = _Poll(index, replica, version)

    def _collect(self, future: Future[Any], poll: _Poll) -> Sequence[Generated]:
        work, index, replica = self._work, poll.index, poll.replica
        try:
            answered: tuple[list[Generated] | RolloutError, float] = future.result()
        except WorkerError as error:
            if self._replicas.get(index) is replica:
                self._drop_replica(index, error.what)
            return ()
        if self._replicas.get(index) is not replica:  # it was let go meanwhile, and others have its requests
            return ()
        answer, seconds = answered
        if isinstance(answer, RolloutError):
            raise answer
        unseen = self._unseen_versions[index]
        if wrong := wrong_answer(answer, work.in_flight(index), unseen, self._limits.vocab):
            self._drop_replica(index, f"its answer cannot be right: {wrong}", wrong=wrong)
            return ()
        self._unseen_versions[index] = {each for each in unseen if each >= poll.version}
        work.finish(index, answer)
        self._pace.note(index, sum(len(sample.token_ids) for sample in answer), seconds)
        if answer:
            self._served.add(index)
        return [replace(sample, replica=index) for sample in answer]

    def _take_weights(self, asked: dict[Future[Any], _Poll], cache: Cache | None) -> list[Generated]:
        """Bring replicas that hold none to the newest weights, and with `cache` all, if the trainer can send now.

        Return what those had finished that were asked before.
        """
        with self._newest() as version:
            if version is None:
                return []
            held = {index: self.versions[index] for index in self._replicas}
            stale = [index for index, has in held.items() if has is None or (cache is not None and has != version)]
            if not stale or not self._schedule.are_next(version, stale):
                return []
            of_stale = [future for future, poll in asked.items() if poll.index in stale]
            samples = [sample for future in of_stale for sample in self._collect(future, asked.pop(future))]
            if cache is not None:
                self._work.forgive()
                self._pace.rollout_ends()
            self._sync_weights([index for index in stale if index in self._replicas], version, cache)
        return samples

    def _sync_weights(self, indices: Sequence[int], version: int, cache: Cache | None = None) -> None:
        """Have these replicas receive while the trainer sends; those that die are let go, and the rest tries again."""
        self.versions |= dict.fromkeys(indices)
        told = (version,) if cache is None else (version, cache)
        self._schedule.advance(indices)
        calls = {index: self._replicas[index].receive_weights.future(*told) for index in indices}
        failures: list[MrlError] = []
        try:
            self._send_weights(indices, version)
        except (WorkerError, RolloutError) as error:
            failures.append(error)
        raised = []
        for index, call in calls.items():
            try:
                call.get()
                self.versions[index] = version
                self._unseen_versions[index].add(version)
                self._events.write(ReplicaServes(index, version))
            except WorkerRaised as error:  # it lives; perhaps the trainer left it because of another
                failures.append(error)
                raised.append(index)
            except WorkerError as error:
                self._drop_replica(index, error.what)
        if failures and all(index in self._replicas for index in indices):
            raise failures[0]
        if raised:
            self._sync_weights(raised, version, cache)

    def _call(self, indices: Sequence[int], method: str, *args: Any) -> dict[int, Any]:
        calls = {index: getattr(self._replicas[index], method).future(*args) for index in indices}
        answers = {}
        for index, call in calls.items():
            try:
                answers[index] = call.get()
            except WorkerError as error:
                self._drop_replica(index, error.what)
        return answers

    def _drop_replica(self, index: int, said: str, *, num_asked: int = 0, wrong: str = "") -> None:
        """Let go of one that has died, or whose answer is wrong; others do what it had in hand."""
        num_unfinished, has_served = len(self._work.in_flight(index)), index in self._served
        self._events.write(ReplicaLost(index, said.partition("\n")[0], num_unfinished + num_asked))
        self._served.discard(index)
        self._unseen_versions.pop(index, None)
        self.versions[index] = None
        self._replicas.pop(index).shutdown()
        if wrong:
            self._work.reject(index, wrong)
        elif num_unfinished:
            self._work.requeue(index, said, has_served=has_served)

    def _start_missing(self) -> None:
        for index in self.versions.keys() - self._replicas.keys() - self._starting.keys():
            self._starting[index] = self._threads.submit(self._start, index)
            self.unprobed.add(index)

    def _join(self, *, waits: bool = False) -> None:
        """Take in the replicas that have started since, or all of them."""
        if waits:
            wait(self._starting.values())
        for index in [index for index, future in self._starting.items() if future.done()]:
            self._replicas[index] = self._starting.pop(index).result()


def _check_requests(requests: Sequence[GenerationRequest], limits: EngineSettings) -> None:
    for request in requests:
        check_request(request, limits)
    if len({request.key for request in requests}) != len(requests):
        raise RolloutError("two requests have the same key")


def _timed(call: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    begin = time.monotonic()
    return call(*args), time.monotonic() - begin


def _probe_replica(replica: RayWorkerGroup, request: GenerationRequest, sampling: Sampling, version: int) -> Generated:
    answer: list[Generated] | RolloutError = replica.submit_and_poll([request], sampling, version, WAIT_S)
    while not answer:
        answer = replica.submit_and_poll([], sampling, version, WAIT_S)
    if isinstance(answer, RolloutError):
        raise answer
    return answer[0]
