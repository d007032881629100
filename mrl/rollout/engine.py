"""Behavior and rules common to all rollout engines."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from mrl.config.hardware import DEFAULT_UTILIZATION
from mrl.config.schema import ENGINES
from mrl.config.sglang import SglangConfig
from mrl.errors import DeviceFull, NameUnknown, RolloutError, did_you_mean
from mrl.registry import load_attribute
from mrl.rollout.requests import Generated, GenerationRequest, Sampling

Part = Literal["weights", "kv_cache"]
Cache = Literal["recompute", "keep"]
"""Treatment of the keys and values of samples under way when weights arrive in flight."""


@dataclass(frozen=True)
class FreeMemory:
    """Memory of one device of a sleeping engine, as the driver reports it."""

    free_bytes: int
    total_bytes: int
    wanted_bytes: int
    """Bytes that one part of the engine needs to wake up."""

    @property
    def lacking_bytes(self) -> int:
        return self.wanted_bytes - self.free_bytes


@dataclass(frozen=True)
class EngineSettings:
    model: Path
    """Directory in Hugging Face format."""
    dtype: str
    device: Literal["cpu", "cuda"]
    max_tokens: int
    """Largest length of a prompt with its response."""
    vocab: int
    sockets: Path
    """The run's private directory of sockets for incoming weights."""
    replica: str
    tp: int = 1
    vllm: dict[str, Any] = field(default_factory=dict)
    """Arguments for vLLM."""
    sglang: SglangConfig = field(default_factory=SglangConfig)
    share: int = 0
    """Largest number of samples under way, which determines how many are processed at a time."""
    loads_files: bool = False
    """Whether weights come from the model's files; otherwise the trainer sends them."""
    reads_text: bool = False
    """Whether texts may end responses, for which the engine needs the tokenizer."""
    takes_weights_in_flight: bool = False
    """Whether weights may change between two tokens of a sample."""
    adapter_rank: int = 0
    """Rank of the adapters that the engine applies to the weights; 0 for plain weights."""
    returns_routes: bool = False
    """Whether samples come with the experts that each layer chose for each token."""
    records: Path | None = None
    """Run whose directory gets the schedule of the engine's calls."""
    replays: Path | None = None
    """Run whose schedule is replayed."""
    pp: int = 1
    """Pipeline stages, each with `tp` workers."""
    dp: int = 1
    """Ranks that generate different samples and share the experts."""
    nodes: tuple[str, ...] = ()
    """Addresses of the engine's nodes; empty if it is on one node."""
    node: int = 0
    """Number of this process's node among them."""
    port: int = 0
    """Port on the first of them where the engine's workers or processes meet."""
    secret: str = field(default="", repr=False)
    """Known only to the processes of this engine over several nodes."""

    @property
    def num_workers(self) -> int:
        return self.tp * self.pp * self.dp


class EngineFollower(ABC):
    """The part of an engine on one of its nodes after the first. The engine on the first node directs it."""

    @abstractmethod
    def watch(self) -> None:
        """Wait until one of its processes ends, and raise an error that names it."""


class RolloutEngine(ABC):
    """A model that generates. Requests start and finish independently.

    Weights change between samples, or between tokens of samples under way; the first token of each version is recorded.
    """

    follower: ClassVar[staticmethod[[EngineSettings], EngineFollower] | None] = None
    """Starts the part of an engine on a further node; None if such engines cannot span nodes."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.weight_version: int | None = None
        """None if the weights come from a file or from a failed update."""
        self.unfinished: dict[str, list[tuple[int, int]]] = {}
        """Samples under way: for each, the first tokens and versions of the weights that draw from there on."""
        self.full_tensor_reason = ""
        """Why fused and sharded tensors cannot be written into this engine; empty if they can."""
        self.adapter_digest = ""
        """Digest of the adapters that the engine applies; empty if it applies none."""
        self.resident: set[Part] = {"weights", "kv_cache"}

    def start(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> None:
        self._need("weights", "kv_cache")
        if self.weight_version is None:
            raise RolloutError(f"{self.settings.replica} is stale: it has not received weights from the trainer")
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

    def receive_weights(self, version: int, cache: Cache | None = None, *, adapters_only: bool = False) -> None:
        """Load one version of the weights, completely or not at all, and drop caches computed with other weights.

        With samples under way, `cache` is required: it decides about what was computed for them. With `adapters_only`,
        the engine keeps its frozen weights.
        """
        self._need("weights")
        if self.unfinished and cache is None:
            raise RolloutError(f"{self.settings.replica} got new weights with {len(self.unfinished)} samples under way")
        num_written = self._num_written() if self.unfinished else {}
        self.weight_version = None  # a failed update leaves no valid version
        if not self.settings.loads_files:
            others = {"adapters_only": True} if adapters_only else {}
            self._receive_weights(version, keeps_cache=cache == "keep", **others)
        self.weight_version = version
        for key, first in num_written.items():
            versions = self.unfinished[key]
            if versions[-1][0] == first:
                versions.pop()  # the previous version drew no token
            versions.append((first, version))

    def sleep(self, *, keep: bool = False) -> None:
        """Free the device memory. Weights must be sent again afterwards, and the cache is lost.

        With `keep`, samples under way continue afterwards; without it, there must be none.
        """
        self._need("weights", "kv_cache")
        if self.unfinished and not keep:
            raise RolloutError(f"{self.settings.replica} fell asleep with {len(self.unfinished)} samples under way")
        self._sleep()
        self.resident.clear()
        self.weight_version = None

    def wake(self, part: Part) -> list[FreeMemory]:
        """Allocate the memory of one part again: first the weights, then, once they are loaded, the cache.

        If a device has too little free memory, the part stays asleep. Return the memory of the engine's devices in this
        case.
        """
        if part in self.resident or (part == "kv_cache" and "weights" not in self.resident):
            raise RolloutError(f"{self.settings.replica} cannot wake its {part}: awake: {sorted(self.resident)}")
        rooms = self._wake(part)
        if not rooms:
            self.resident.add(part)
        return rooms

    def _need(self, *parts: Part) -> None:
        if asleep := sorted({*parts} - self.resident):
            raise RolloutError(f"{self.settings.replica} is asleep: wake its {' and '.join(asleep)} first")

    @abstractmethod
    def close(self) -> None:
        """End all processes of the engine."""

    @abstractmethod
    def _start(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> None: ...

    @abstractmethod
    def _step(self) -> list[Generated]: ...

    @abstractmethod
    def _abort(self, keys: Iterable[str]) -> None: ...

    @abstractmethod
    def _num_written(self) -> Mapping[str, int]:
        """Return the number of tokens of each sample under way."""

    @abstractmethod
    def _receive_weights(self, version: int, *, keeps_cache: bool) -> None:
        """Load the weights. Unless the cache is kept, drop it, also for samples under way."""

    @abstractmethod
    def _sleep(self) -> None:
        """Free all memory. Samples under way are recomputed when they continue."""

    @abstractmethod
    def _wake(self, part: Part) -> list[FreeMemory]: ...


def can_step(engine: RolloutEngine) -> bool:
    """Return whether samples are under way and the engine has everything to continue them."""
    return bool(engine.unfinished) and engine.weight_version is not None and len(engine.resident) == 2


def need_version(engine: RolloutEngine, version: int) -> None:
    """Raise an error unless the engine has these weights."""
    if (version_held := engine.weight_version) != version:
        raise RolloutError(f"{engine.settings.replica} is stale: it has weights {version_held}, not version {version}")


def engine_class(name: str) -> type[RolloutEngine]:
    """Return the engine class of that name or at `package.module:attribute`. Nothing else is imported."""
    if name not in ENGINES and ":" not in name:
        raise NameUnknown(f'unknown rollout engine "{name}"', fix=did_you_mean(name, ENGINES))
    engine: type[RolloutEngine] = load_attribute(ENGINES.get(name, name))
    return engine


def check_request(request: GenerationRequest, settings: EngineSettings) -> None:
    """Raise an error on a request that an engine would silently cut, or with token ids beyond the vocabulary."""
    num_prompt = len(request.prompt_ids)
    if not num_prompt or request.max_tokens < 1 or num_prompt + request.max_tokens > settings.max_tokens:
        raise RolloutError(
            f"{num_prompt} prompt tokens and {request.max_tokens} new tokens exceed the limit of {settings.max_tokens}",
            where=request.key,
        )
    if request.prompt_ids.min() < 0 or request.prompt_ids.max() >= settings.vocab:
        raise RolloutError(f"a prompt token is not in [0, {settings.vocab})", where=request.key)


_GIB = 1 << 30


@dataclass(frozen=True)
class RoleMemory:
    """GPU memory of a process: reserved from the driver by torch's allocator, and the part of it in use."""

    reserved_bytes: int
    allocated_bytes: int


def device_full(
    part: Part, device: str, room: FreeMemory, memory_by_role: Mapping[str, RoleMemory], vllm: Mapping[str, Any]
) -> DeviceFull:
    """Return the error: it lists the memory of each role's process, and the key to change. `vllm` is `rollout.vllm`."""
    other_bytes = room.total_bytes - room.free_bytes - sum(memory.reserved_bytes for memory in memory_by_role.values())
    holders = [
        f"{role} {_gib(memory.reserved_bytes)} ({_gib(memory.allocated_bytes)} in use)"
        for role, memory in memory_by_role.items()
    ]
    problem = (
        f"waking an engine's {part} takes {_gib(room.wanted_bytes)}, but only {_gib(room.free_bytes)} of "
        f"{_gib(room.total_bytes)} are free ({_gib(room.lacking_bytes)} too little). Reserved by {', '.join(holders)}; "
        f"{_gib(other_bytes)} by CUDA, the engine itself and other programs"
    )
    largest = max(memory_by_role, key=lambda role: memory_by_role[role].reserved_bytes)
    fix = f"reduce {largest}.max_tokens_per_device, or end other programs on the device (nvidia-smi)"
    if part == "kv_cache" and (cache := vllm.get("kv_cache_memory_bytes")) is not None:
        fix = f"set rollout.vllm.kv_cache_memory_bytes={max(0, cache - room.lacking_bytes)}; or {fix}"
    elif part == "kv_cache":
        utilization = vllm.get("gpu_memory_utilization", DEFAULT_UTILIZATION) - room.lacking_bytes / room.total_bytes
        fix = f"set rollout.vllm.gpu_memory_utilization={math.floor(100 * utilization) / 100:g}; or {fix}"
    return DeviceFull(problem, where=device, fix=fix)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB"
