"""Memory of one device of an engine: weights, work space, cache, and the buckets in which weights arrive."""

from __future__ import annotations

from dataclasses import dataclass

from mrl.config.arithmetic import longest_sample_tokens, num_engines
from mrl.config.hardware import Hardware
from mrl.config.schema import Config
from mrl.errors import PlacementError, counted
from mrl.models.rollout_table import EngineSizes
from mrl.models.spec import ModelSpec
from mrl.plan.assumptions import ASSUMPTIONS, RESERVE
from mrl.plan.reshard_traffic import handed_over, sent_sizes
from mrl.rollout.capacity import engine_capacity, planned_demand
from mrl.rollout.quantization import is_online_fp8

_SLOT_SHARE = 0.75  # share of the memory of two buckets, as the reshard divides it


@dataclass(frozen=True)
class EngineMemory:
    """Memory of one device of an engine."""

    parts: tuple[tuple[str, int, str], ...]
    """(name, bytes, origin) of each part."""
    cache_bytes: int
    token_bytes: int
    """Bytes of the keys and values of one token on one device."""
    state_bytes: int
    """Bytes of the keys and values of one sample in layers with a window, if other layers have none."""
    sample_bytes: int
    """Bytes of a sample of full length."""
    max_sequences: int
    """Sequences that vLLM runs at a time."""
    max_tokens: int
    """Tokens that vLLM computes in one step."""
    bucket_bytes: int
    """Bytes on both sides while weights arrive."""
    count_bytes: int
    """Bytes of the token counts that the sampler keeps for penalties, in the memory pool of the weights."""

    @property
    def message_bytes(self) -> int:
        """Return the bytes of the buckets that are for messages, on a device without an engine."""
        return int(self.bucket_bytes * (1 - _SLOT_SHARE))

    @property
    def cache_tokens(self) -> int:
        """Return the tokens that fit, if layers with a window among others without one keep none."""
        return max(0, self.cache_bytes) // self.token_bytes

    def num_held(self, tokens: float) -> float:
        """Return how many samples of that length fit into the cache."""
        return max(0, self.cache_bytes) / (tokens * self.token_bytes + self.state_bytes)

    @property
    def full_samples(self) -> int:
        """Return the samples of full length that an engine can process at a time."""
        return min(max(0, self.cache_bytes) // self.sample_bytes, self.max_sequences)


def engine_memory(config: Config, spec: ModelSpec, hardware: Hardware) -> EngineMemory:
    """Return the memory that vLLM needs, and what remains for its cache."""
    rollout, options = config.rollout, config.rollout.vllm
    EngineSizes.of(rollout, spec).check(spec)
    if num_engines(config) < 1:
        raise PlacementError(f"no engine with {counted(rollout.num_devices, 'device')} fits on its devices")
    demand = planned_demand(config, spec, hardware.memory_bytes)
    capacity, reserve = engine_capacity(demand), ASSUMPTIONS.engine_reserve_bytes
    sequences, tokens = capacity.max_num_seqs, capacity.max_num_batched_tokens
    _, largest = handed_over(spec, sent_sizes(config, spec), demand.dtype)
    quantized = is_online_fp8(options)
    split = f"tp {rollout.tp}" + (f" in the fullest of {rollout.pp} stages" if rollout.pp > 1 else "")
    split += f" and dp {rollout.dp}" if rollout.dp > 1 else ""
    held = f"the parameters of a worker at {split} in {'FP8' if quantized else demand.dtype}"
    work = demand.work_bytes(sequences, tokens)
    cache, origin = demand.cache_bytes(work), "kv_cache_memory_bytes"
    if options.get("kv_cache_memory_bytes") is None:
        key = "mem_fraction_static" if rollout.engine == "sglang" else "gpu_memory_utilization"
        origin = f"{key} {demand.utilization:g} of the device, less the above"
    return EngineMemory(
        parts=(
            ("weights", demand.weight_bytes, held),
            *([("adapters", demand.adapter_bytes, "vLLM's slot for one adapter")] if demand.adapter_rank else []),
            ("work space", work, f"{tokens} tokens of a prefill, three copies of the logits of {sequences} sequences"),
            (RESERVE, reserve, "assumed, for an engine's process, including captured graphs"),
            ("cache", max(0, cache), origin),
        ),
        cache_bytes=cache,
        token_bytes=demand.token_bytes,
        state_bytes=demand.state_bytes,
        sample_bytes=demand.token_bytes * longest_sample_tokens(rollout) + demand.state_bytes,
        max_sequences=sequences,
        max_tokens=tokens,
        bucket_bytes=2 * max(config.sync.bucket_bytes, int(largest / _SLOT_SHARE)),
        count_bytes=sequences * spec.vocab * 4,
    )
