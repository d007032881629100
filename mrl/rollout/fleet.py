"""All rollout replicas as one engine: results are complete and in order, even if replicas die."""

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
from mrl.rollout.replica_calls import WAIT_S, poll, poll_with_routes, probe_replica, timed
from mrl.rollout.requests import Generated, GenerationRequest, Sampling, wrong_answer
from mrl.rollout.schedule import FleetSchedule
from mrl.rollout.scheduler import MAX_IN_FLIGHT, Pace, RequestScheduler

FOLLOW_UP_WAIT_S = 0.02
"""The same if more requests may come meanwhile: they wait this long until the replica accepts them."""
_LOOK_S = 0.05
"""Pause between two checks whether the trainer can send, while a replica waits for weights."""

StartReplica = Callable[[int], RayWorkerGroup]
SendWeights = Callable[[Sequence[int], int], str]
"""Makes the trainer send a version to the replicas with these numbers; raises an error on failure. Returns the digest
of its adapters, which all replicas read; empty without adapters."""
NewestWeights = Callable[[], AbstractContextManager[int | None]]
"""Yields the version that the trainer can send during the block; None while it computes."""


class FollowUps(Protocol):
    """Requests that arise during generation, such as the next turns of conversations."""

    def take(self) -> Sequence[GenerationRequest]:
        """Return the requests that have arisen so far."""

    def arriving(self) -> Future[Any] | None:
        """Return a future that is done when there may be more; None if only generation can lead to more."""


@dataclass(frozen=True)
class _Poll:
    """A pending poll of a replica for finished samples, and the version of its weights at the time."""

    index: int
    replica: RayWorkerGroup
    version: int


class RolloutFleet:
    """Replicas by number, started in parallel; the first call waits for them.

    A replica serves only with weights from the trainer: the requested version or, if it started later and the trainer
    has continued, the newest version that it could get. Each sample records its version.
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
        """Start the replicas. Without `newest`, the trainer can send the requested version at any time."""
        self._start, self._send_weights, self._limits, self._events = start, send_weights, limits, events
        self._version = 0
        self._newest = newest or (lambda: nullcontext(self._version))
        self._schedule = FleetSchedule(limits.replays, num_replicas)
        self._work = RequestScheduler((), num_replicas)
        self._asked: dict[Future[Any], _Poll] = {}
        """Pending polls. A replica gets no other call before its poll is answered."""
        self.is_closing = False
        """Set this to end the `stream` of another thread with an error."""
        self.generating_s = 0.0
        """Seconds in which at least one replica had samples under way."""
        self._threads = ThreadPoolExecutor(num_replicas, "replica")
        self._replicas: dict[int, RayWorkerGroup] = {}
        self.versions: dict[int, int | None] = dict.fromkeys(range(num_replicas))
        """Version of the weights that each replica serves with; None if it does not serve."""
        self._have_frozen: set[int] = set()
        """Replicas that hold the weights to which they apply adapters, and need only these."""
        self._unseen_versions: defaultdict[int, set[int]] = defaultdict(set)
        """Versions of the weights that may have drawn a replica's finished, uncollected samples."""
        self._starting: dict[int, Future[RayWorkerGroup]] = {}
        self.unprobed: set[int] = set()
        """Replicas that have not been probed since their start."""
        self._pace = Pace(events)
        self._served: set[int] = set()
        """Replicas that have finished a sample since their start. If one fails, the prompt may be the cause."""
        self._start_missing()

    @cached_property
    def full_tensor_reason(self) -> str:
        """Why full Hugging Face tensors must be sent instead of fused and sharded ones; empty if that is not needed."""
        self._join(waits=True)
        return str(self._replicas[0].full_tensor_reason())

    def update(self, version: int, cache: Cache | None = None) -> None:
        """Bring all replicas to this version; with `cache`, also those with samples under way.

        A replica that dies meanwhile is replaced by the next `stream`.
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
        """Yield the samples as they finish. If the caller stops iterating, the replicas drop the rest.

        With `cache`, samples under way continue with newer weights whenever the trainer can send some.
        """
        _check_requests(requests, self._limits)
        self._join(waits=True)
        self._version = version
        if stale := [index for index in self._replicas if self.versions[index] != version]:
            self._sync_weights(stale, version)
        in_flight = 1 if sampling.alone else max(MAX_IN_FLIGHT, self._limits.vllm.get("max_num_seqs") or 0)
        work = RequestScheduler(requests, len(self.versions), in_flight)
        self._work = work
        polls = self._asked = {}
        wait_s = FOLLOW_UP_WAIT_S if follow_ups else WAIT_S
        try:
            while True:
                if self.is_closing:
                    raise RolloutError("the run ended while samples were generated")
                if follow_ups:
                    _check_requests(more := follow_ups.take(), self._limits)
                    work.add(more)
                arriving = follow_ups.arriving() if follow_ups else None
                if not work.num_left and not arriving:
                    return
                self._start_missing()
                self._join()
                yield from self._take_weights(polls, cache)
                self._ask(polls, sampling, wait_s)
                awaited = [*polls, *self._starting.values(), *([arriving] if arriving else [])]
                is_short, began = cache is not None or None in self.versions.values(), time.monotonic()
                done, _ = wait(awaited, _LOOK_S if is_short else WAIT_S, FIRST_COMPLETED)
                self.generating_s += time.monotonic() - began if polls else 0.0
                for future in done & polls.keys():
                    yield from self._collect(future, polls.pop(future))
        finally:
            wait(polls)
            self._pace.rollout_ends()
            self._schedule.advance(busy := [index for index in self._replicas if work.in_flight(index)])
            self._call(busy, "abort")
            self._work = RequestScheduler((), len(self.versions))

    def probe(
        self, request: GenerationRequest, sampling: Sampling, version: int, *, everyone: bool
    ) -> dict[int, Generated]:
        """Send one request to all serving replicas, or only to new ones. Return the answers by replica.

        A replica that dies meanwhile, or whose answer is impossible, has no answer.
        """
        futures = {
            index: self._threads.submit(probe_replica, replica, request, sampling, version)
            for index, replica in self._replicas.items()
            if self.versions[index] == version and (everyone or index in self.unprobed)
        }
        self._schedule.advance(futures)
        answers = {}
        for index, future in futures.items():
            try:
                answer = future.result()
            except WorkerError as error:
                self._drop_replica(index, error.what, num_asked=1)
                continue
            if problem := wrong_answer([answer], {request.key: request}, {version}, self._limits.vocab):
                self._drop_replica(index, f"its answer is impossible: {problem}", num_asked=1)
            else:
                answers[index] = answer
        self.unprobed -= answers.keys()
        return answers

    def sleep(self, *, keep: bool = False) -> None:
        """Make all replicas free their memory. With `keep`, samples under way continue afterwards."""
        self._join(waits=True)
        wait(self._asked)
        self._schedule.advance(self._replicas)
        self._call(list(self._replicas), "sleep", *([True] if keep else []))
        self.versions = dict.fromkeys(self.versions)
        self._have_frozen.clear()

    def wake(self, part: Part) -> dict[int, list[FreeMemory]]:
        """Make all replicas allocate one part of their memory.

        Return the devices of replicas without enough memory.
        """
        return self._call(list(self._replicas), "wake", part)

    def close(self) -> None:
        wait(self._starting.values())
        started = [future.result() for future in self._starting.values() if future.exception() is None]
        for replica in (*self._replicas.values(), *started):
            replica.shutdown()
        self._threads.shutdown()

    def _ask(self, polls: dict[Future[Any], _Poll], sampling: Sampling, wait_s: float) -> None:
        """Give its share to each serving replica that has answered its last poll."""
        work = self._work
        serving = {index: version for index in self._replicas if (version := self.versions[index]) is not None}
        busy = {poll.index for poll in polls.values() if self._replicas.get(poll.index) is poll.replica}
        for index in serving.keys() - busy:
            if (call := self._schedule.next(index)) is None:
                requests = work.assign(index, len(serving))
            elif requests := work.take(index, call.of if call.kind == "start" else ()):
                self._schedule.advance([index])
            if work.in_flight(index):
                replica = self._replicas[index]
                version = serving[index]
                ask = poll_with_routes if self._limits.returns_routes else poll
                submitted = self._threads.submit(timed, ask, replica, requests, sampling, version, wait_s)
                polls[submitted] = _Poll(index, replica, version)

    def _collect(self, future: Future[Any], poll: _Poll) -> Sequence[Generated]:
        work, index, replica = self._work, poll.index, poll.replica
        try:
            answered: tuple[list[Generated] | RolloutError, float] = future.result()
        except WorkerError as error:
            if self._replicas.get(index) is replica:
                self._drop_replica(index, error.what)
            return ()
        if self._replicas.get(index) is not replica:  # it was dropped meanwhile, and others have its requests
            return ()
        answer, seconds = answered
        if isinstance(answer, RolloutError):
            raise answer
        unseen = self._unseen_versions[index]
        if problem := wrong_answer(answer, work.in_flight(index), unseen, self._limits.vocab):
            self._drop_replica(index, f"its answer is impossible: {problem}", wrong=problem)
            return ()
        self._unseen_versions[index] = {version for version in unseen if version >= poll.version}
        work.finish(index, answer)
        self._pace.note(index, sum(len(sample.token_ids) for sample in answer), seconds)
        if answer:
            self._served.add(index)
        return [replace(sample, replica=index) for sample in answer]

    def _take_weights(self, polls: dict[Future[Any], _Poll], cache: Cache | None) -> list[Generated]:
        """Bring replicas without weights, or with `cache` all replicas, to the newest version, if the trainer can send
        it.

        Return the samples that these replicas had finished.
        """
        with self._newest() as version:
            if version is None:
                return []
            versions = {index: self.versions[index] for index in self._replicas}
            stale = [
                index
                for index, version_held in versions.items()
                if version_held is None or (cache is not None and version_held != version)
            ]
            if not stale or not self._schedule.are_next(version, stale):
                return []
            stale_polls = [future for future, poll in polls.items() if poll.index in stale]
            samples = [sample for future in stale_polls for sample in self._collect(future, polls.pop(future))]
            if cache is not None:
                self._work.forgive()
                self._pace.rollout_ends()
            self._sync_weights([index for index in stale if index in self._replicas], version, cache)
        return samples

    def _sync_weights(self, indices: Sequence[int], version: int, cache: Cache | None = None) -> None:
        """Send the weights to these replicas. Replicas that die are dropped, and the rest is tried again."""
        self.versions |= dict.fromkeys(indices)
        arguments = (version,) if cache is None else (version, cache)
        self._schedule.advance(indices)
        last = [index for index in indices if index in self._have_frozen]  # after the adapters have been written
        whole, digest = [index for index in indices if index not in last], ""
        calls = {index: self._replicas[index].receive_weights.future(*arguments) for index in whole}
        failures: list[MrlError] = []
        raised = []
        try:
            digest = self._send_weights(whole, version)
            calls |= {index: self._replicas[index].receive_adapters.future(*arguments) for index in last}
        except (WorkerError, RolloutError) as error:
            failures.append(error)
            raised += last
        for index, call in calls.items():
            try:
                loaded = call.get()
                _check_adapters(index, loaded, digest)
                if self._limits.adapter_rank:
                    self._have_frozen.add(index)
                self.versions[index] = version
                self._unseen_versions[index].add(version)
                self._events.write(ReplicaServes(index, version))
            except WorkerRaised as error:  # it is alive; another replica may have broken the transfer
                failures.append(error)
                raised.append(index)
                self._have_frozen.discard(index)
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

    def _drop_replica(self, index: int, message: str, *, num_asked: int = 0, wrong: str = "") -> None:
        """Remove a replica that died or gave an impossible answer. Others get its requests."""
        num_unfinished, has_served = len(self._work.in_flight(index)), index in self._served
        self._events.write(ReplicaLost(index, message.partition("\n")[0], num_unfinished + num_asked))
        self._served.discard(index)
        self._have_frozen.discard(index)
        self._unseen_versions.pop(index, None)
        self.versions[index] = None
        self._replicas.pop(index).shutdown()
        if wrong:
            self._work.reject(index, wrong)
        elif num_unfinished:
            self._work.requeue(index, message, has_served=has_served)

    def _start_missing(self) -> None:
        for index in self.versions.keys() - self._replicas.keys() - self._starting.keys():
            self._starting[index] = self._threads.submit(self._start, index)
            self.unprobed.add(index)

    def _join(self, *, waits: bool = False) -> None:
        """Add the replicas that have started since the last call; with `waits`, wait for all of them."""
        if waits:
            wait(self._starting.values())
        for index in [index for index, future in self._starting.items() if future.done()]:
            self._replicas[index] = self._starting.pop(index).result()


def _check_adapters(index: int, loaded: str, written: str) -> None:
    if written and loaded != written:
        raise RolloutError(
            f"replica {index} has loaded adapters with digest {loaded[:16]}, but the trainer wrote {written[:16]}",
            fix="put run.dir on a file system that shows all nodes the same files",
        )


def _check_requests(requests: Sequence[GenerationRequest], limits: EngineSettings) -> None:
    for request in requests:
        check_request(request, limits)
    if len({request.key for request in requests}) != len(requests):
        raise RolloutError("two requests have the same key")
