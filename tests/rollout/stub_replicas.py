"""Replicas without processes, under a real fleet.

They have weight versions, fail as configured, and record all calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from mrl.errors import RolloutError
from mrl.events import Event, EventLog, read_events
from mrl.rollout.engine import EngineSettings
from mrl.rollout.fleet import NewestWeights, RolloutFleet
from mrl.rollout.requests import Generated, GenerationRequest

LIMITS = EngineSettings(Path("model"), "float32", "cpu", 40, 100, Path("sockets"), "rollout-0")


def generate(fleet: RolloutFleet, *asked: Any, **named: Any) -> list[Generated]:
    """Return all samples of `stream`, in the order of the requests."""
    samples = {sample.key: sample for sample in fleet.stream(*asked, **named)}
    return [samples[each.key] for each in asked[0]]


def request(key: str, max_tokens: int = 10, prompt: str = "") -> GenerationRequest:
    return GenerationRequest(key, prompt or key, np.ones(3, np.int32), 0, max_tokens)


def sample(key: str, version: int = 1) -> Generated:
    return Generated(key, np.ones(1, np.int32), np.zeros(1, np.float32), "stop", version)


@dataclass
class World:
    """A fleet of stubs. Tests can run code once before a replica's method, or replace its answer."""

    directory: Path
    num_replicas: int = 2
    asked: list[tuple[int, str, tuple[Any, ...]]] = field(default_factory=list)
    sent: list[tuple[tuple[int, ...], int]] = field(default_factory=list)
    before: dict[tuple[int, str], list[Callable[[], None]]] = field(default_factory=dict)
    may_start: dict[int, threading.Event] = field(default_factory=dict)
    num_started: list[int] = field(default_factory=list)
    send_error: Exception | None = None
    newest: NewestWeights | None = None
    """Weights that the trainer can send now, if they change while samples are generated."""
    replays: Path | None = None
    adapter_rank: int = 0
    written: str = ""
    """Digest of the adapters that the trainer has written."""
    read: str = ""
    """Digest of the adapters that the replicas have read."""
    spoil: Callable[[int, list[Generated]], list[Generated]] = lambda _, made: made
    """Makes of what a replica would answer what it answers."""

    def __post_init__(self) -> None:
        self.log = EventLog(self.directory / "events.jsonl")
        self.lock = threading.Lock()
        limits = replace(LIMITS, replays=self.replays, adapter_rank=self.adapter_rank)
        self.fleet = RolloutFleet(self.num_replicas, self.start, self.send, limits, self.log, self.newest)

    def start(self, index: int) -> Any:
        gate = self.may_start.get(index)
        assert gate is None or gate.wait(20), "the test never let this replica start"
        self.num_started.append(index)
        return Replica(self, index)

    def send(self, replicas: Sequence[int], version: int) -> str:
        self.sent.append((tuple(replicas), version))
        error, self.send_error = self.send_error, None
        if error is not None:
            raise error
        return self.written

    def fail_once(self, index: int, method: str, error: Exception) -> None:
        """Make the next such call raise."""

        def fail() -> None:
            raise error

        self.before.setdefault((index, method), []).append(fail)

    def calls(self, method: str) -> list[tuple[int, tuple[Any, ...]]]:
        """Return the replicas that got this call, and its arguments."""
        with self.lock:
            return [(index, args) for index, name, args in self.asked if name == method]

    def events(self, kind: type[Event]) -> list[Any]:
        return [found.event for found in read_events(self.log.path) if isinstance(found.event, kind)]


class Replica:
    """Replaces a group with one replica."""

    def __init__(self, world: World, index: int) -> None:
        self.world, self.index = world, index
        self.held: int | None = None
        self.waiting: list[GenerationRequest] = []

    def shutdown(self) -> None:
        self.world.asked.append((self.index, "shutdown", ()))

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            return self.answer(name, args)

        def future(*args: Any) -> Any:
            return SimpleNamespace(get=lambda: call(*args))

        call.future = future  # type: ignore[attr-defined]
        return call

    def answer(self, name: str, args: tuple[Any, ...]) -> Any:
        with self.world.lock:
            self.world.asked.append((self.index, name, args))
            actions = self.world.before.get((self.index, name), [])
            action = actions.pop(0) if actions else None
        if action is not None:
            action()
        return self.do(name, args)

    def do(self, name: str, args: tuple[Any, ...]) -> Any:
        if name in ("receive_weights", "receive_adapters"):
            self.held = args[0]
            return self.world.read
        if name == "sleep":
            self.held = None
        if name == "abort":
            self.waiting.clear()
        if name == "full_tensor_reason":
            return "because of the test"
        return self.give(*args) if name == "submit_and_poll" else None

    def give(self, requests: Sequence[GenerationRequest], _: Any, version: int, __: float) -> Any:
        """Return the last waiting sample. Each call returns one."""
        if self.held != version:
            return RolloutError(f"replica {self.index} is stale: it has weights {self.held}, not version {version}")
        self.waiting += requests
        made = [sample(self.waiting.pop().key, version)] if self.waiting else []
        return self.world.spoil(self.index, made)
