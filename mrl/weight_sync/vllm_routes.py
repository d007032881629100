"""Routes in vLLM's workers: which experts each layer chose for each token of a request.

On GPUs vLLM keeps them itself. On CPUs it cannot, so a worker records them here, through the hook of vLLM's routers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor
from vllm.model_executor.layers.fused_moe.layer import MoERunner

from mrl.errors import RolloutError

Routes = npt.NDArray[np.int16]


class RouteRecorder:
    """Routes of all requests under way. A token that is computed again keeps the routes that drew the next token."""

    def __init__(self, model_runner: Any) -> None:
        self._runner = model_runner
        layers = [module for module in model_runner.model.modules() if isinstance(module, MoERunner)]
        layers.sort(key=lambda module: module.layer_id)
        for position, layer in enumerate(layers):
            layer.router.set_capture_fn(partial(self._record, position))
        config = model_runner.model_config
        self._shape = (len(layers), config.get_num_experts_per_tok())
        self._routes: dict[str, Routes] = {}
        self._spans: list[tuple[str, int, int]] = []
        """Requests of the pass under way, with their first token and the number of their tokens."""
        prepare, dummy_run = model_runner._prepare_inputs, model_runner._dummy_run

        def prepare_and_note(scheduler_output: Any, num_scheduled: Any) -> Any:
            self._begin(num_scheduled.tolist())
            return prepare(scheduler_output, num_scheduled)

        def run_without_requests(*arguments: Any, **options: Any) -> Any:
            self._spans = []
            return dummy_run(*arguments, **options)

        model_runner._prepare_inputs, model_runner._dummy_run = prepare_and_note, run_without_requests

    def take(self, requests: Sequence[str]) -> dict[str, Routes]:
        """Return the routes of finished requests by their tokens, without the last one, which no pass has computed.

        Requests of other data-parallel ranks are not in the result.
        """
        return {request: self._routes.pop(request) for request in requests if request in self._routes}

    def forget(self) -> None:
        self._routes.clear()

    def _begin(self, num_scheduled: Sequence[int]) -> None:
        batch = self._runner.input_batch
        firsts = batch.num_computed_tokens_cpu[: len(num_scheduled)].tolist()
        self._spans = list(zip(batch.req_ids, firsts, num_scheduled, strict=True))
        for request, first, number in self._spans:
            missing = first + number - len(self._routes.get(request, ()))
            if missing > 0:
                new = np.full((missing, *self._shape), -1, np.int16)
                before = self._routes.get(request)
                self._routes[request] = new if before is None else np.concatenate([before, new])

    def _record(self, position: int, experts_TK: Tensor) -> None:
        if not self._spans:  # a pass without requests
            return
        routed, scheduled = len(experts_TK), sum(number for _, _, number in self._spans)
        if routed != scheduled:
            raise RolloutError(f"a router chose experts for {routed} tokens, but {scheduled} were scheduled")
        experts, start = experts_TK.numpy(), 0
        for request, first, number in self._spans:
            routes_TK = self._routes[request][first : first + number, position]
            np.copyto(routes_TK, experts[start : start + number], where=routes_TK < 0, casting="unsafe")
            start += number
