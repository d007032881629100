"""What every rollout engine does, and the rules that hold for all of them: who may ask for what, and when."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from mrl.config.hardware import DEFAULT_UTILIZATION
from mrl.config.schema import ENGINES
from mrl.errors import DeviceFull, NameUnknown, RolloutError, did_you_mean
from mrl.registry import load_attribute
from mrl.rollout.requests import Generated, GenerationRequest, Sampling

Part = Literal["weights", "kv_cache"]
Cache = Literal["recompute", "keep"]
"""What becomes of the keys and values of samples under way when weights come in flight."""


@dataclass(frozen=True)
class FreeMemory:
    """The memory of one device of an engine that sleeps, as its driver counts it."""

    free_bytes: int
    total_bytes: int
    wanted_bytes: int
    """What one part of the engine takes when it wakes."""

    @property
    def lacking_bytes(self) -> int:
        return self.wanted_bytes - self.free_bytes


@dataclass(frozen=True)
class EngineSettings:
    model: Path
    """A directory in Hugging Face format."""
    dtype: str
    device: Literal["cpu", "cuda"]
    max_tokens: int
    """Of a prompt and its response together."""
    vocab: int
    sockets: Path
    """The run's private directory for the sockets that weights arrive through."""
    replica: str
    tp: int = 1
    vllm: dict[str, Any] = field(default_factory=dict)
    """Arguments that are passed on to vLLM."""
    share: int = 0
    """Samples that it may have under way, from which follows how many it works on at a time."""
    loads_files: bool = False
    """Whether it serves what the model's files hold; else its weights come from the trainer."""
    reads_text: bool = False
    """Whether responses end at texts, so that the engine needs the tokenizer."""
    takes_weights_in_flight: bool = False
    """Whether weights may change between two tokens of a sample."""
    records: Path | None = None
    """The run in whose directory it is written down what the engine is asked when."""
    replays: Path | None = None
    """The run that is followed in that."""


class RolloutEngine(ABC):
    """One model that generates. Requests start and finish independently.

    Weights change in between, or between two tokens of those under way, whose first token of each version is noted.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.weight_version: int | None = None
        """None while what it holds came from a file, or from an update that failed."""
        self.unfinished: dict[str, list[tuple[int, int]]] = {}
        """The samples that it has begun: from which of its tokens on which version of the weights draws each."""
        self.full_tensor_reason = ""
        """Why fused and sharded tensors cannot be written into this engine; empty where they can."""
        self.resident: set[Part] = {"weights", "kv_cache"}

    def start(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> None:
        self._need("weights", "kv_cache")
        if self.weight_version is None:
            raise RolloutError(f"{self.settings.replica} is stale: it holds no weights that the trainer has sent")
        for request in requests:
            check_request(request, self.settings)
        keys = {request.key for request in requests}
        if len(keys) < len(requests) or keys & self.unfinished.keys():
            raise RolloutError(f"two samples of {self.settings.replica} have the same key")
        self.unfinished |= {key: [(0, self.weight_version)] for key in keys}
        self._start(requests, sampling)

    def step(self) -> list[Generated]:
        finished = []
        for sample in self._step():
            (_, first), *switches = self.unfinished.pop(sample.key, [(0, sample.weight_version)])
            finished.append(replace(sample, weight_version=first, switches=tuple(switches)))
        return finished

    def abort(self) -> None:
        self._abort(self.unfinished)
        self.unfinished.clear()

    def receive_weights(self, version: int, cache: Cache | None = None) -> None:
        """Take in one version of the weights, whole or not at all, and forget what was computed with another.

        With samples under way that is refused, unless it is said what becomes of what was computed for them.
        """
        self._need("weights")
        if self.unfinished and cache is None:
            raise RolloutError(f"{self.settings.replica} got new weights with {len(self.unfinished)} samples under way")
        num_written = self._num_written() if self.unfinished else {}
        self.weight_version = None  # what a failed update leaves behind is of no version
        if not self.settings.loads_files:
            self._receive_weights(version, keeps_cache=cache == "keep")
        self.weight_version = version
        for key, first in num_written.items():
            drawn_by = self.unfinished[key]
            if drawn_by[-1][0] == first:
                drawn_by.pop()  # those drew nothing of it
            drawn_by.append((first, version))

    def sleep(self, *, keep: bool = False) -> None:
        """Give the device's memory back: weights are sent again, and the cache is worth nothing after that.

        What is under way goes on after that where it is to be kept; else there must be nothing.
        """
        self._need("weights", "kv_cache")
        if self.unfinished and not keep:
            raise RolloutError(f"{self.settings.replica} fell asleep with {len(self.unfinished)} samples under way")
        self._sleep()
        self.resident.clear()
        self.weight_version = None

    def wake(self, part: Part) -> list[FreeMemory]:
        """Take the memory of one part again: first the weights, and the cache once they are there.

        Where a device has not got it, the part sleeps on, and the devices of the engine are returned.
        """
        if part in self.resident or (part == "kv_cache" and "weights" not in self.resident):
            raise RolloutError(f"{self.settings.replica} cannot wake its {part}: awake are {sorted(self.resident)}")
        rooms = self._wake(part)
        if not rooms:
            self.resident.add(part)
        return rooms

    def _need(self, *parts: Part) -> None:
        if asleep := sorted({*parts} - self.resident):
            raise RolloutError(f"{self.settings.replica} sleeps: its {' and '.join(asleep)} must be woken first")

    @abstractmethod
    def close(self) -> None:
        """End every process of the engine."""

    @abstractmethod
    def _start(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> None: ...

    @abstractmethod
    def _step(self) -> list[Generated]: ...

    @abstractmethod
    def _abort(self, keys: Iterable[str]) -> None: ...

    @abstractmethod
    def _num_written(self) -> Mapping[str, int]:
        """Return how many tokens each sample under way has."""

    @abstractmethod
    def _receive_weights(self, version: int, *, keeps_cache: bool) -> None:
        """Take them in; unless it is kept, forget what was computed, also for the samples under way."""

    @abstractmethod
    def _sleep(self) -> None:
        """Give all memory back; what was computed for the samples under way is computed anew when they go on."""

    @abstractmethod
    def _wake(self, part: Part) -> list[FreeMemory]: ...


def can_step(engine: RolloutEngine) -> bool:
    """Return whether there is something under way, and all that it takes to go on with it."""
    return bool(engine.unfinished) and engine.weight_version is not None and len(engine.resident) == 2


def need_version(engine: RolloutEngine, version: int) -> None:
    """Refuse to serve with other weights than these."""
    if (held := engine.weight_version) != version:
        raise RolloutError(f"{engine.settings.replica} is stale: it holds weights {held}, not version {version}")


def engine_class(name: str) -> type[RolloutEngine]:
    """The engine of that name, or the class at `package.module:attribute`; only what is used is loaded."""
    if name not in ENGINES and ":" not in name:
        raise NameUnknown(f'unknown rollout engine "{name}"', fix=did_you_mean(name, ENGINES))
    found: type[RolloutEngine] = load_attribute(ENGINES.get(name, name))
    return found


def check_request(request: GenerationRequest, settings: EngineSettings) -> None:
    """Refuse what an engine would cut short, or look up beyond its table, without a word."""
    num_prompt = len(request.prompt_ids)
    if not num_prompt or request.max_tokens < 1 or num_prompt + request.max_tokens > settings.max_tokens:
        raise RolloutError(
            f"{num_prompt} prompt tokens and {request.max_tokens} more do not fit into {settings.max_tokens}",
            where=request.key,
        )
    if request.prompt_ids.min() < 0 or request.prompt_ids.max() >= settings.vocab:
        raise RolloutError(f"a prompt token is not in [0, {settings.vocab})", where=request.key)


_GIB = 1 << 30


@dataclass(frozen=True)
class RoleMemory:
    """What a process has of its GPU: taken from the driver by torch's allocator, and of that in use."""

    reserved_bytes: int
    allocated_bytes: int


def device_full(
    part: Part, device: str, room: FreeMemory, held: Mapping[str, RoleMemory], vllm: Mapping[str, Any]
) -> DeviceFull:
    """The error, with what each role's process holds, and the key that would make room; `vllm` is `rollout.vllm`."""
    others = room.total_bytes - room.free_bytes - sum(each.reserved_bytes for each in held.values())
    holders = [
        f"{role} {_gib(each.reserved_bytes)} ({_gib(each.allocated_bytes)} in use)" for role, each in held.items()
    ]
    what = (
        f"waking an engine's {part} takes {_gib(room.wanted_bytes)}, and {_gib(room.free_bytes)} of "
        f"{_gib(room.total_bytes)} are free: {_gib(room.lacking_bytes)} too little. Held by {', '.join(holders)}; "
        f"{_gib(others)} by CUDA, the engine itself and other programs"
    )
    largest = max(held, key=lambda role: held[role].reserved_bytes)
    fix = f"a smaller {largest}.max_tokens_per_device, or end other programs on it (nvidia-smi)"
    if part == "kv_cache" and (cache := vllm.get("kv_cache_memory_bytes")) is not None:
        fix = f"rollout.vllm.kv_cache_memory_bytes={max(0, cache - room.lacking_bytes)}; or {fix}"
    elif part == "kv_cache":
        utilization = vllm.get("gpu_memory_utilization", DEFAULT_UTILIZATION) - room.lacking_bytes / room.total_bytes
        fix = f"rollout.vllm.gpu_memory_utilization={math.floor(100 * utilization) / 100:g}; or {fix}"
    return DeviceFull(what, where=device, fix=fix)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB"
