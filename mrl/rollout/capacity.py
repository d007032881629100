"""How many samples and tokens an engine processes at a time, from its cache size; used by the plan and the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mrl.config.arithmetic import longest_sample_tokens, num_engines, samples_per_step
from mrl.config.hardware import DEFAULT_UTILIZATION, ENGINE_RESERVE_BYTES
from mrl.config.schema import Config
from mrl.dtypes import ITEM_BYTES
from mrl.models.rollout_table import adapter_slot_bytes, engine_bytes, stage_layers
from mrl.models.spec import ModelSpec
from mrl.models.windows import window_elements
from mrl.rollout.quantization import FP8_BYTES, cache_bytes_per_element, is_online_fp8
from mrl.rounding import round_up

MAX_SEQUENCES = 1024
"""Largest number of samples that an engine processes at a time: with more, its host cannot keep up with its GPU."""
_MIN_SEQUENCES, _SEQUENCE_STEP = 128, 64
_TOKENS, _FEW_TOKENS, _CPU_TOKENS = 16384, 8192, 2048
_GRAPH_SEQUENCES = 512
"""Number of sequences up to which vLLM captures CUDA graphs by default."""


def engine_share(config: Config) -> int:
    """Return how many samples an engine may have under way: its share of a step and of the steps ahead."""
    ahead = config.asynchrony.ahead if config.asynchrony.weights == "in_flight" else 0
    return -(-samples_per_step(config.batch) * (1 + ahead) // num_engines(config))


@dataclass(frozen=True)
class EngineDemand:
    """Work and resources of an engine."""

    spec: ModelSpec
    tp: int
    dtype: str
    device: Literal["cpu", "cuda"]
    memory_bytes: int
    """Memory of one device. On a CPU it only limits the cache."""
    max_tokens: int
    """Largest length of a prompt with its response."""
    share: int
    """Result of `engine_share`."""
    vllm: Mapping[str, Any]
    """The user's `rollout.vllm`."""
    adapter_rank: int = 0
    """Rank of the adapters that the engine applies; 0 for plain weights."""
    pp: int = 1
    """Pipeline stages."""
    dp: int = 1
    """Ranks that share the experts and the engine's samples. Each has a cache and a limit of samples."""

    @property
    def _stages(self) -> list[range]:
        """Layers of each stage."""
        return [stage_layers(self.spec.num_layers, self.pp, stage) for stage in range(self.pp)]

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Return the bytes that a device of the stage with the largest cache caches of one token."""
        elements = max(self.spec.cached_elements(self.tp, layers) for layers in self._stages)
        return elements * cache_bytes_per_element(self.vllm, self.item_bytes)

    @property
    def state_bytes(self) -> int:
        """Return the bytes that one device keeps of a sample of any length: in layers with a window, and as states of
        linear attention."""
        states = self.spec.gdn.state_bytes(self.tp, self.item_bytes) if self.spec.gdn else 0
        elements = max(window_elements(self.spec, self.tp, layers) for layers in self._stages)
        return elements * cache_bytes_per_element(self.vllm, self.item_bytes) + states

    @property
    def weight_bytes(self) -> int:
        linear_bytes = FP8_BYTES if is_online_fp8(self.vllm) else None
        return engine_bytes(self.spec, self.tp, self.dtype, linear_bytes, self.pp, self.dp)[0]

    @property
    def adapter_bytes(self) -> int:
        return adapter_slot_bytes(self.spec, self.tp, self.adapter_rank, self.dtype, self.pp)

    @property
    def utilization(self) -> float:
        utilization: float = self.vllm.get("gpu_memory_utilization", DEFAULT_UTILIZATION)
        return utilization

    def work_bytes(self, sequences: int, tokens: int) -> int:
        """Return the memory of a prefill of `tokens` tokens and three copies of the logits of `sequences` sequences."""
        return tokens * _widest(self.spec, self.tp) * self.item_bytes + 3 * sequences * self.spec.vocab * 4

    def cache_bytes(self, work_bytes: int) -> int:
        """Return the bytes left for keys and values; negative if the rest does not fit."""
        if self.vllm.get("kv_cache_memory_bytes") is not None:
            return int(self.vllm["kv_cache_memory_bytes"])
        used = self.weight_bytes + self.adapter_bytes + work_bytes + ENGINE_RESERVE_BYTES
        return int(self.utilization * self.memory_bytes) - used


@dataclass(frozen=True)
class EngineCapacity:
    """Largest step of an engine."""

    max_num_seqs: int
    max_num_batched_tokens: int

    def arguments(self, vllm: Mapping[str, Any], device: str) -> dict[str, int]:
        """Return vLLM's arguments, with CUDA graphs up to the number of sequences that decode at a time."""
        arguments = {"max_num_seqs": self.max_num_seqs, "max_num_batched_tokens": self.max_num_batched_tokens}
        user_keys = ("enforce_eager", "compilation_config", "cudagraph_capture_sizes", "max_cudagraph_capture_size")
        if device == "cuda" and self.max_num_seqs > _GRAPH_SEQUENCES and not any(map(vllm.get, user_keys)):
            arguments["max_cudagraph_capture_size"] = self.max_num_seqs
        return arguments


def engine_capacity(demand: EngineDemand) -> EngineCapacity:
    """Return the engine's share if its cache can hold it, otherwise what the cache holds, with fewer tokens per step.

    A sample under way is assumed to need a quarter of the longest sample: half the length, half of it written.
    """
    options, num_wanted, tokens = demand.vllm, max(_MIN_SEQUENCES, -(-demand.share // demand.dp)), _TOKENS
    if demand.device == "cpu":
        sequences, tokens = _MIN_SEQUENCES, max(_CPU_TOKENS, demand.max_tokens)  # without chunked prefill
    else:
        cache = demand.cache_bytes(demand.work_bytes(_MIN_SEQUENCES, _FEW_TOKENS))
        num_held = max(0, cache) // (demand.token_bytes * max(1, demand.max_tokens // 4) + demand.state_bytes)
        sequences = min(MAX_SEQUENCES, round_up(min(num_wanted, max(num_held, _MIN_SEQUENCES)), _SEQUENCE_STEP))
        tokens = _TOKENS if num_held >= num_wanted else _FEW_TOKENS
        if options.get("enable_chunked_prefill") is False:
            tokens = max(tokens, demand.max_tokens)
    # A step has at most as many tokens as its sequences, and at least one token per sequence.
    sequences = options.get("max_num_seqs") or min(sequences, options.get("max_num_batched_tokens") or sequences)
    tokens = max(sequences, min(tokens, sequences * demand.max_tokens))
    return EngineCapacity(sequences, options.get("max_num_batched_tokens") or tokens)


def engine_options(config: Config) -> Mapping[str, Any]:
    """Return the settings of an engine's memory by vLLM's names."""
    if config.rollout.engine != "sglang":
        return config.rollout.vllm
    own = config.rollout.sglang
    options = {"gpu_memory_utilization": own.mem_fraction_static, "max_num_seqs": own.max_running_requests}
    return {name: value for name, value in options.items() if value is not None}


def planned_demand(config: Config, spec: ModelSpec, memory_bytes: int) -> EngineDemand:
    """Return the demand on each engine of a run."""
    rollout = config.rollout
    return EngineDemand(
        spec=spec,
        tp=rollout.tp,
        dtype=rollout.vllm.get("dtype", config.actor.dtype),
        device="cuda" if config.cluster.device == "gpu" else "cpu",
        memory_bytes=memory_bytes,
        max_tokens=longest_sample_tokens(rollout),
        share=engine_share(config),
        vllm=engine_options(config),
        adapter_rank=config.actor.lora.engine_rank if config.actor.lora else 0,
        pp=rollout.pp,
        dp=rollout.dp,
    )


def _widest(spec: ModelSpec, tp: int) -> int:
    """Return the elements per token of a working layer: hidden states and its widest part."""
    attention = spec.qkv_rows // tp
    mlp = 3 * spec.ffn // tp
    if spec.moe:
        routed = spec.moe.experts_per_token * (spec.hidden + 3 * spec.moe.expert_ffn // tp)
        mlp = max(mlp, routed + 3 * spec.moe.shared_ffn // tp)
    return 3 * spec.hidden + max(attention, mlp)
