"""The adapter that a vLLM engine applies to its frozen weights: each version comes from the trainer's files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.v1.engine.llm_engine import LLMEngine

from mrl.errors import RolloutError
from mrl.rollout.engine import EngineSettings
from mrl.weight_sync.vllm_adapters import ADAPTER, adapter_directory

OnWorkers = Callable[..., list[Any]]


class EngineAdapters:
    """Loads the adapters of each version, and verifies what the workers then hold."""

    def __init__(self, engine: LLMEngine, settings: EngineSettings, on_workers: OnWorkers) -> None:
        self._engine, self._settings, self._on_workers = engine, settings, on_workers
        self.request: LoRARequest | None = None
        """Belongs to each request of vLLM. Samples under way keep theirs, which has the same number."""
        self.digest = ""
        """Digest of the file that the workers have loaded."""

    def load(self, version: int) -> None:
        """Replace the adapters with the files of this version, and verify that each worker's slot holds all of them."""
        directory = adapter_directory(self._settings.sockets, version)
        for number in self._engine.list_loras():
            self._engine.remove_lora(number)
        self._on_workers("forget_adapters")
        self.request = LoRARequest(directory.name, ADAPTER, str(directory))
        self._engine.add_lora(self.request)
        answers = [json.loads(answer) for answer in self._on_workers("loaded_adapters", directory=str(directory))]
        self._raise_first(problem for problem, _ in answers)
        digests = {digest for _, digest in answers}
        if len(digests) > 1:
            raise RolloutError(
                f"the workers read {len(digests)} different files of adapters",
                where=str(directory),
                fix="put run.dir on a file system that shows all nodes the same files",
            )
        (self.digest,) = digests

    def check_frozen(self) -> None:
        """Verify that the frozen weights, which are not sent again, have not changed since they arrived."""
        self._raise_first(self._on_workers("frozen_problem"))

    def _raise_first(self, problems: Iterable[str]) -> None:
        if problem := next(filter(None, problems), ""):
            raise RolloutError(problem, where=self._settings.replica)
