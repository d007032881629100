"""An engine without a model. Each sample ends at its token limit."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from mrl.errors import RolloutError
from mrl.rollout.engine import EngineSettings, FreeMemory, Part, RolloutEngine
from mrl.rollout.requests import Generated, GenerationRequest, Sampling

SETTINGS = EngineSettings(Path("model"), "float32", "cpu", 40, 100, Path("sockets"), "rollout-0")


def request(key: str, max_tokens: int = 3) -> GenerationRequest:
    return GenerationRequest(key, key, np.ones(3, np.int32), 0, max_tokens)


class CountingEngine(RolloutEngine):
    """Records the calls of its subclass methods, and their threads."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self.left: dict[str, int] = {}
        self.asked: dict[str, int] = {}
        self.notes: list[object] = []
        self.threads = {threading.get_ident()}
        self.gate = threading.Event()
        self.gate.set()
        self.full_tensor_reason = "it has no tensors"
        self.fault: Exception | None = None
        self.rooms: list[FreeMemory] = []

    def close(self) -> None:
        """Do nothing: the engine holds no resources."""

    def _start(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> None:
        self._note("start")
        self.left |= {each.key: each.max_tokens for each in requests}
        self.asked |= {each.key: each.max_tokens for each in requests}
        self.sampling = sampling

    def _step(self) -> list[Generated]:
        self._note("step")
        assert self.gate.wait(20), "the test never let this step end"
        if self.fault is not None:
            raise self.fault
        assert self.weight_version is not None, "a step with weights of no version"
        self.left = {key: left - 1 for key, left in self.left.items()}
        ended = [key for key, left in self.left.items() if not left]
        for key in ended:
            del self.left[key]
        nothing = np.zeros(1, np.int32), np.zeros(1, np.float32)
        return [Generated(key, *nothing, "length", self.weight_version) for key in ended]

    def _abort(self, keys: Iterable[str]) -> None:
        self._note(("abort", sorted(keys)))
        for key in keys:
            del self.left[key]

    def _receive_weights(self, version: int, *, keeps_cache: bool) -> None:
        self._note(("weights", version, self.weight_version))
        if version < 0:
            raise RolloutError("the weights are torn")

    def _num_written(self) -> Mapping[str, int]:
        return {key: self.asked[key] - left for key, left in self.left.items()}

    def _sleep(self) -> None:
        self._note("sleep")

    def _wake(self, part: Part) -> list[FreeMemory]:
        self._note(("wake", part))
        return self.rooms

    def _note(self, what: object) -> None:
        self.threads.add(threading.get_ident())
        self.notes.append(what)
