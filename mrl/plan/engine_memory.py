"""What a rollout engine has on each of its devices, and how many samples its cache holds."""

from __future__ import annotations

from dataclasses import dataclass

from mrl.config.arithmetic import has_own_rollout_pool, longest_sample_tokens, num_engines
from mrl.config.hardware import DEFAULT_UTILIZATION, Hardware
from mrl.config.schema import Config
from mrl.dtypes import ITEM_BYTES
from mrl.errors import PlacementError
from mrl.models.rollout_table import EngineSizes
from mrl.models.spec import ModelSpec
from mrl.plan.assumptions import ASSUMPTIONS, GIB
from mrl.plan.weights import engine_elements

# vLLM's own, which depend on the device:
_BATCHED_TOKENS, _FEW_BATCHED_TOKENS, _SEQUENCES, _FEW_SEQUENCES, _LARGE_DEVICE = 16384, 8192, 1024, 256, 70 * GIB
RESERVE = "CUDA and NCCL"
_SLOT_SHARE = 0.75  # of the memory for two buckets, as the reshard divides it


@dataclass(frozen=True)
class EngineMemory:
    """One device of an engine."""

    parts: tuple[tuple[str, int, str], ...]
    """What, bytes and origin."""
    cache_bytes: int
    token_bytes: int
    """Keys and values of one token on one device."""
    sample_bytes: int
    """Of a sample of full length."""
    most_sequences: int
    """That vLLM runs at a time."""
    bucket_bytes: int
    """On both sides while weights come in."""

    @property
    def cache_tokens(self) -> int:
        return max(0, self.cache_bytes) // self.token_bytes

    @property
    def full_samples(self) -> int:
        """Return the samples of full length that an engine works on at a time."""
        return min(max(0, self.cache_bytes) // self.sample_bytes, self.most_sequences)


def rollout_pool(config: Config) -> str:
    return config.placement.roles["rollout" if has_own_rollout_pool(config) else "actor"]


def engine_memory(config: Config, spec: ModelSpec, hardware: Hardware) -> EngineMemory:
    """Return what vLLM takes, and what it leaves for its cache."""
    rollout, given = config.rollout, config.rollout.vllm
    EngineSizes(rollout.tp).check(spec)
    if num_engines(config) < 1:
        raise PlacementError(f"no engine of {rollout.tp} devices fits on the devices that it may use")
    item = ITEM_BYTES[given.get("dtype", config.actor.dtype)]
    elements, largest = engine_elements(spec, rollout.tp)
    is_large = hardware.memory_bytes >= _LARGE_DEVICE
    tokens = given.get("max_num_batched_tokens") or (_BATCHED_TOKENS if is_large else _FEW_BATCHED_TOKENS)
    sequences = given.get("max_num_seqs") or (_SEQUENCES if is_large else _FEW_SEQUENCES)
    work = tokens * _widest(spec, rollout.tp) * item + 3 * sequences * spec.vocab * 4
    reserve = ASSUMPTIONS.engine_reserve_bytes
    token_bytes = 2 * spec.num_layers * max(1, spec.num_kv_heads // rollout.tp) * spec.head_dim * item
    utilization = given.get("gpu_memory_utilization", DEFAULT_UTILIZATION)
    cache = int(utilization * hardware.memory_bytes) - elements * item - work - reserve
    origin = f"gpu_memory_utilization {utilization:g} of the device, less the above"
    if given.get("kv_cache_memory_bytes") is not None:
        cache, origin = int(given["kv_cache_memory_bytes"]), "kv_cache_memory_bytes"
    return EngineMemory(
        parts=(
            ("weights", elements * item, f"{elements:,} elements of a worker at tp {rollout.tp}, {item} bytes each"),
            ("work space", work, f"{tokens} tokens of a prefill, three copies of logits of {sequences} sequences"),
            (RESERVE, reserve, "assumed, of an engine's process, its captured graphs included"),
            ("cache", max(0, cache), origin),
        ),
        cache_bytes=cache,
        token_bytes=token_bytes,
        sample_bytes=token_bytes * longest_sample_tokens(rollout),
        most_sequences=sequences,
        bucket_bytes=2 * max(config.sync.bucket_bytes, int(largest * item / _SLOT_SHARE)),
    )


def _widest(spec: ModelSpec, tp: int) -> int:
    """Return the elements per token of a layer at work: hidden states, and the widest of its parts."""
    attention = spec.qkv_rows // tp
    mlp = 3 * spec.ffn // tp
    if spec.moe:
        mlp = max(mlp, spec.moe.experts_per_token * (spec.hidden + 3 * spec.moe.expert_ffn // tp))
    return 3 * spec.hidden + max(attention, mlp)
