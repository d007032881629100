"""vLLM's engine with whole experts on each rank, which vLLM's own kernels cannot compute on a CPU.

They take the global number of an expert for one of the rank's own, and read beyond its experts. Here, choices of other
ranks' experts have the weight zero.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

from mrl.rollout import vllm_engine
from mrl.rollout.engine import EngineSettings
from mrl.weight_sync import vllm_receiver

_apply = CPUUnquantizedExperts.apply


class ExpertParallelEngine(vllm_engine.VllmEngine):
    def __init__(self, settings: EngineSettings) -> None:
        own = {"worker_extension_cls": f"{__name__}.WorkerExtension"}  # each worker loads this module
        arguments = vllm_engine.engine_arguments(settings) | own
        with mock.patch.object(vllm_engine, "engine_arguments", return_value=arguments):
            super().__init__(settings)


class WorkerExtension(vllm_receiver.WorkerExtension):
    """mrl's extension, in a process with the other kernel."""


def _apply_own_experts(self: Any, *, topk_weights: Any, topk_ids: Any, expert_map: Any, **arguments: Any) -> None:
    own_ids = expert_map[topk_ids.long()]
    weights, ids = topk_weights.masked_fill(own_ids < 0, 0.0), own_ids.clamp(min=0).to(topk_ids.dtype)
    _apply(self, topk_weights=weights, topk_ids=ids, expert_map=expert_map, **arguments)


CPUUnquantizedExperts.apply = _apply_own_experts
