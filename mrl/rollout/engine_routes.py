"""Routes of a vLLM engine's samples: the experts that each layer chose for each token of prompt and response."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from vllm.outputs import RequestOutput

from mrl.errors import RolloutError
from mrl.models.families import read_spec
from mrl.rollout.engine import EngineSettings
from mrl.rollout.requests import Generated, Routes

OnWorkers = Callable[..., list[Any]]


def route_arguments(device: Literal["cpu", "cuda"]) -> dict[str, Any]:
    """Return vLLM's arguments for routes. On CPUs mrl records them, and would miss tokens from the prefix cache."""
    return {"enable_prefix_caching": False} if device == "cpu" else {"enable_return_routed_experts": True}


class EngineRoutes:
    """Adds the routes to finished samples, after checking that they can be routes of this model."""

    def __init__(self, settings: EngineSettings, on_workers: OnWorkers) -> None:
        spec = read_spec(settings.model)
        if spec.moe is None:
            raise RolloutError(f"{settings.model} has no experts, so there are no routes")
        self._num_experts = spec.moe.num_experts
        self._layers = [layer for layer in range(spec.num_layers) if spec.has_experts(layer)]
        self._num_chosen = spec.moe.experts_per_token
        self._on_workers, self._records = on_workers, settings.device == "cpu"
        self._numbers: dict[str, str] = {}
        """Names of the requests under way in the workers."""
        if self._records:
            on_workers("record_routes")

    def add(self, key: str, number: str) -> None:
        self._numbers[key] = number

    def forget(self) -> None:
        self._numbers.clear()
        if self._records:
            self._on_workers("forget_routes")

    def added(self, samples: Sequence[Generated], outputs: Sequence[RequestOutput]) -> list[Generated]:
        """Return the samples with their routes."""
        if not samples:
            return []
        numbers = [self._numbers.pop(sample.key) for sample in samples]
        if self._records:
            by_request: dict[str, Any] = {}
            for of_worker in self._on_workers("take_routes", requests=numbers):
                by_request |= of_worker
            if missing := {*numbers} - by_request.keys():
                raise RolloutError("no worker has recorded the routes of a sample", where=min(missing))
            routes = [by_request[number] for number in numbers]
        else:
            routes = [self._of_layers(output) for output in outputs]
        lengths = [len(output.prompt_token_ids) + len(output.outputs[0].token_ids) - 1 for output in outputs]
        return [
            replace(sample, routes=self._checked(sample.key, of_sample, length))
            for sample, of_sample, length in zip(samples, routes, lengths, strict=True)
        ]

    def _of_layers(self, output: RequestOutput) -> Any:
        """Return the rows of the layers with experts. vLLM returns all layers."""
        routes = output.outputs[0].routed_experts
        if routes is None:
            raise RolloutError("vLLM returned no routes of a sample", where=output.request_id)
        return routes[:, self._layers]

    def _checked(self, key: str, routes: Any, length: int) -> Routes:
        """Return the routes in their smallest type. Every token but the last must have them, with distinct experts."""
        expected = (length, len(self._layers), self._num_chosen)
        if routes.shape[0] < length or routes.shape[1:] != expected[1:]:
            raise RolloutError(f"the engine returned routes {[*routes.shape]}, expected {[*expected]}", where=key)
        routes = routes[:length].astype(np.int16)
        if bool((routes < 0).any()) or bool((routes >= self._num_experts).any()):
            token = int(np.argwhere((routes < 0) | (routes >= self._num_experts))[0, 0])
            raise RolloutError(
                f"token {token} has the routes {routes[token].tolist()}, not {self._num_experts} experts", where=key
            )
        in_order = np.sort(routes, axis=-1)
        if bool((in_order[..., 1:] == in_order[..., :-1]).any()):
            raise RolloutError("a layer chose the same expert twice for a token", where=key)
        smallest: Routes = routes.astype(np.uint8) if self._num_experts <= 256 else routes
        return smallest
