"""Worker groups without processes. They record their calls in order, and return the configured answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from mrl.config.mesh import Mesh
from mrl.controller import DeviceSlots, RayClassWithInitArgs
from mrl.rollout.requests import Generated, GenerationRequest

NODES = {"actor": ["n0", "n0", "n1", "n1"], "receiver": ["n2", "n1"]}
"""Where the devices are."""


@dataclass
class Stage:
    """All groups of a run, their recorded calls, and their answers."""

    asked: list[tuple[str, ...]] = field(default_factory=list)
    """Role, method, and the arguments as text. `get` precedes a method if the caller waited for its result."""
    arguments: dict[tuple[str, str], tuple[Any, ...]] = field(default_factory=dict)
    answers: dict[tuple[str, str], Callable[..., Any]] = field(default_factory=dict)
    started: dict[str, StubGroup] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.Lock)

    def note(self, *entry: str) -> None:
        with self.lock:
            self.asked.append(entry)

    def take(self) -> list[tuple[str, ...]]:
        """Return and clear the recorded calls, without waits. The same call to several replicas is one entry."""
        with self.lock:
            found, self.asked[:] = [each for each in self.asked if each[1] != "get"], []
        lines: list[tuple[str, ...]] = []
        for role, *rest in found:
            name = "replicas" if role.startswith("rollout-") else role
            if not lines or lines[-1] != (name, *rest):
                lines.append((name, *rest))
        return lines


class StubGroup:
    """Replaces a `RayWorkerGroup`; every method exists."""

    def __init__(
        self,
        stage: Stage,
        role: str,
        worker: RayClassWithInitArgs,
        mesh: Mesh,
        context: Any,
        slots: DeviceSlots | None = None,
    ) -> None:
        self.stage, self.role, self.worker, self.mesh, self.slots = stage, role, worker, mesh, slots
        self.context = context
        stage.started[role] = self

    def shutdown(self) -> None:
        self.stage.note(self.role, "shutdown")

    def __getattr__(self, name: str) -> StubMethod:
        return StubMethod(self, name)


class StubMethod:
    """One method of a stub."""

    def __init__(self, group: StubGroup, name: str) -> None:
        self.group, self.name = group, name

    def __call__(self, *args: Any) -> Any:
        return self.future(*args).get()

    def future(self, *args: Any) -> Any:
        stage, role, name = self.group.stage, self.group.role, self.name
        stage.note(role, name, *map(str, () if name in QUIET else args))
        stage.arguments[role, name] = args
        answer = stage.answers.get((role, name), DEFAULTS.get(name, lambda *_: None))

        def get() -> Any:
            stage.note(role, "get", name)
            return answer(*args)

        return SimpleNamespace(get=get)


QUIET = ("submit_and_poll", "prepare_sending", "prepare_receiving")


def finished(requests: Sequence[GenerationRequest], _: object, version: int, __: float) -> list[Generated]:
    """Return every request at once."""
    return [Generated(each.key, np.ones(1, np.int32), np.zeros(1, np.float32), "stop", version) for each in requests]


DEFAULTS: dict[str, Callable[..., Any]] = {
    "submit_and_poll": finished,
    "full_tensor_reason": lambda: "",
    "wake": lambda part: [],
    "send_weights": lambda version, workers: [report(10, 8), report(5, 5)],
}


def report(received: int, least: int, failure: str = "", moved: float = 0.0, lost: float = 0.0) -> Any:
    """Return the tested fields of a `ReshardReport`."""
    numbers = {"bytes_received": received, "least_bytes": least, "moved": moved, "lost": lost, "adapter_bytes": 0}
    return SimpleNamespace(failure=failure, adapters="", **numbers)
