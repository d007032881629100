"""How much an engine works on at a time, decided from the cache that it has; the plan and the engine both ask here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mrl.config.arithmetic import longest_sample_tokens, num_engines, samples_per_step
from mrl.config.hardware import DEFAULT_UTILIZATION, ENGINE_RESERVE_BYTES
from mrl.config.schema import Config
from mrl.dtypes import ITEM_BYTES
from mrl.models.rollout_table import engine_elements
from mrl.models.spec import ModelSpec
from mrl.rounding import round_up

MAX_SEQUENCES = 1024
"""Samples that an engine works on at a time at most: beyond that, its host falls behind its GPU."""
_MIN_SEQUENCES, _SEQUENCE_STEP = 128, 64
_TOKENS, _FEW_TOKENS, _CPU_TOKENS = 16384, 8192, 2048
_GRAPH_SEQUENCES = 512
"""Up to which vLLM captures CUDA graphs by itself."""


def engine_share(config: Config) -> int:
    """Return how many samples an engine may have under way: its share of a step, and of the steps that are ahead."""
    ahead = config.asynchrony.ahead if config.asynchrony.weights == "in_flight" else 0
    return -(-samples_per_step(config.batch) * (1 + ahead) // num_engines(config))


@dataclass(frozen=True)
class EngineDemand:
    """What an engine serves, and with what."""

    spec: ModelSpec
    tp: int
    dtype: str
    device: Literal["cpu", "cuda"]
    memory_bytes: int
    """Of a device; on a CPU it decides nothing but the cache."""
    max_tokens: int
    """Of a prompt and its response together."""
    share: int
    """As `engine_share` says."""
    vllm: Mapping[str, Any]
    """The user's `rollout.vllm`."""

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Return the bytes of one token's keys and values on one device."""
        heads = max(1, self.spec.num_kv_heads // self.tp)
        return 2 * self.spec.num_layers * heads * self.spec.head_dim * self.item_bytes

    @property
    def weight_bytes(self) -> int:
        return engine_elements(self.spec, self.tp)[0] * self.item_bytes

    @property
    def utilization(self) -> float:
        found: float = self.vllm.get("gpu_memory_utilization", DEFAULT_UTILIZATION)
        return found

    def work_bytes(self, sequences: int, tokens: int) -> int:
        """Return what a prefill of so many tokens takes, and three copies of the logits of so many sequences."""
        return tokens * _widest(self.spec, self.tp) * self.item_bytes + 3 * sequences * self.spec.vocab * 4

    def cache_bytes(self, work_bytes: int) -> int:
        """Return what is left for keys and values, less than 0 where something else does not fit."""
        if self.vllm.get("kv_cache_memory_bytes") is not None:
            return int(self.vllm["kv_cache_memory_bytes"])
        taken = self.weight_bytes + work_bytes + ENGINE_RESERVE_BYTES
        return int(self.utilization * self.memory_bytes) - taken


@dataclass(frozen=True)
class EngineCapacity:
    """What one step of an engine takes at most."""

    max_num_seqs: int
    max_num_batched_tokens: int

    def arguments(self, vllm: Mapping[str, Any], device: str) -> dict[str, int]:
        """Return vLLM's arguments that say this, with CUDA graphs up to as many sequences as decode at a time."""
        found = {"max_num_seqs": self.max_num_seqs, "max_num_batched_tokens": self.max_num_batched_tokens}
        of_user = ("enforce_eager", "compilation_config", "cudagraph_capture_sizes", "max_cudagraph_capture_size")
        if device == "cuda" and self.max_num_seqs > _GRAPH_SEQUENCES and not any(map(vllm.get, of_user)):
            found["max_cudagraph_capture_size"] = self.max_num_seqs
        return found


def engine_capacity(demand: EngineDemand) -> EngineCapacity:
    """Return the engine's share as far as its cache holds it, and fewer tokens where the cache is the limit.

    A sample under way is assumed to take a quarter of the longest: half as long as it may be, and half written.
    """
    given, wanted, tokens = demand.vllm, max(_MIN_SEQUENCES, demand.share), _TOKENS
    if demand.device == "cpu":
        sequences, tokens = _MIN_SEQUENCES, max(_CPU_TOKENS, demand.max_tokens)  # prompts are not cut there
    else:
        cache = demand.cache_bytes(demand.work_bytes(_MIN_SEQUENCES, _FEW_TOKENS))
        held = max(0, cache) // (demand.token_bytes * max(1, demand.max_tokens // 4))
        sequences = min(MAX_SEQUENCES, round_up(min(wanted, max(held, _MIN_SEQUENCES)), _SEQUENCE_STEP))
        tokens = _TOKENS if held >= wanted else _FEW_TOKENS
        if given.get("enable_chunked_prefill") is False:
            tokens = max(tokens, demand.max_tokens)
    # No step can take more tokens than its sequences have, or fewer than sequences.
    sequences = given.get("max_num_seqs") or min(sequences, given.get("max_num_batched_tokens") or sequences)
    tokens = max(sequences, min(tokens, sequences * demand.max_tokens))
    return EngineCapacity(sequences, given.get("max_num_batched_tokens") or tokens)


def planned_demand(config: Config, spec: ModelSpec, memory_bytes: int) -> EngineDemand:
    """Return what each engine of a run has to serve."""
    rollout = config.rollout
    return EngineDemand(
        spec=spec,
        tp=rollout.tp,
        dtype=rollout.vllm.get("dtype", config.actor.dtype),
        device="cuda" if config.cluster.device == "gpu" else "cpu",
        memory_bytes=memory_bytes,
        max_tokens=longest_sample_tokens(rollout),
        share=engine_share(config),
        vllm=rollout.vllm,
    )


def _widest(spec: ModelSpec, tp: int) -> int:
    """Return the elements per token of a layer at work: hidden states, and the widest of its parts."""
    attention = spec.qkv_rows // tp
    mlp = 3 * spec.ffn // tp
    if spec.moe:
        mlp = max(mlp, spec.moe.experts_per_token * (spec.hidden + 3 * spec.moe.expert_ffn // tp))
    return 3 * spec.hidden + max(attention, mlp)
