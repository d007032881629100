"""Numbers computed from a configuration: samples, updates, micro-batches, devices, replicas."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from mrl.config.algorithm import CHOOSING_LOSSES, NORM_ADVANTAGES, NUM_TIES, REFERENCE_ADVANTAGES, AlgorithmConfig
from mrl.config.mesh import Mesh
from mrl.config.schema import (
    BatchConfig,
    Config,
    MegatronModelConfig,
    ParallelConfig,
    RolloutConfig,
    TrainedModelConfig,
)
from mrl.config.sft import WITHOUT_REFERENCE, AnyConfig, DpoConfig, RankedConfig, SftBatchConfig, SftConfig


@dataclass(frozen=True)
class RoleBatch:
    """Work of one data-parallel rank of a role in one update. A frozen role processes a whole step at once."""

    samples_per_rank: int
    tokens_per_micro_batch: int
    """Token limit of a micro-batch: `max_tokens_per_device` on each context-parallel device."""
    longest_sample_tokens: int

    @property
    def max_micro_batches(self) -> int:
        """Return the number of micro-batches if every sample has full length. Shorter samples need fewer."""
        return math.ceil(self.samples_per_rank / (self.tokens_per_micro_batch // self.longest_sample_tokens))


def samples_per_step(batch: BatchConfig) -> int:
    return batch.prompts_per_step * batch.samples_per_prompt


def updates_per_step(batch: BatchConfig) -> int:
    return samples_per_step(batch) // batch.samples_per_update * batch.epochs_per_step


def needs_old_log_probs(config: Config) -> bool:
    """Return whether the trainer computes old log-probs: the policy changes between sampling and the last update of a
    step, or something else reads them. With one update per step, the log-probs in that update are the old ones."""
    algorithm = config.algorithm
    if algorithm.old_log_probs != "trainer":
        return False
    reads = algorithm.kl.where in ("reward", "both") or algorithm.loss.policy in CHOOSING_LOSSES
    reads = reads or algorithm.advantage in REFERENCE_ADVANTAGES + NORM_ADVANTAGES
    return updates_per_step(config.batch) > 1 or reads or algorithm.correction is not None


def teaches_itself(config: AnyConfig) -> bool:
    """Return whether the policy is its own teacher, which reads another prompt."""
    if not isinstance(config, Config) or config.algorithm.distillation is None:
        return False
    return config.algorithm.distillation.context is not None and not config.teaching_models()


def shows_success(algorithm: AlgorithmConfig) -> bool:
    """Return whether a teacher reads another sample of the prompt. Then a sample may have no teacher."""
    distillation = algorithm.distillation
    return distillation is not None and "{success}" in (distillation.context or "")


def compares_teacher(algorithm: AlgorithmConfig) -> bool:
    """Return whether validation compares the policy with a teacher. Without training's groups there is no success."""
    return algorithm.distillation is not None and not shows_success(algorithm)


def longest_teacher_tokens(config: Config) -> int:
    """Return the tokens of the longest sample that a teacher reads."""
    distillation = config.algorithm.distillation
    if distillation is None or distillation.context is None or distillation.context_tokens is None:
        return longest_sample_tokens(config.rollout)
    return distillation.context_tokens + config.rollout.max_response_tokens


def corrects_engines(config: Config) -> bool:
    """Return whether the loss weighs samples by their probability under the policy and under the engine that drew
    them."""
    return config.algorithm.correction is not None or config.algorithm.old_log_probs == "engine"


def shares_actor(config: AnyConfig, role: str) -> bool:
    """Return whether a role has adapters on the actor's frozen model, in the actor's processes."""
    lora = config.trained_roles()[role].lora if role in config.trained_roles() else None
    return role == "critic" and lora is not None and lora.base == "actor"


def keeps_reference(config: AnyConfig) -> bool:
    """Return whether a frozen copy of the actor is kept in host memory. With adapters, the actor itself is frozen."""
    return has_reference(config) and config.actor.lora is None


def reads_reference(algorithm: AlgorithmConfig) -> bool:
    """Return whether a KL or the advantages compare the policy with the reference."""
    return algorithm.kl.where != "none" or algorithm.advantage in REFERENCE_ADVANTAGES


def has_reference(config: AnyConfig) -> bool:
    """Return whether the actor computes the reference: with a copy of its first weights, or without its adapters."""
    if isinstance(config, Config):
        return reads_reference(config.algorithm) and config.reference is None
    if not isinstance(config, DpoConfig) or config.preference.loss in WITHOUT_REFERENCE:
        return False
    return config.preference.reference == "in_place"


def longest_sample_tokens(limits: RolloutConfig | SftBatchConfig) -> int:
    """Return the tokens of a sample with the longest prompt and the longest response."""
    return limits.max_prompt_tokens + limits.max_response_tokens


def rows_per_step(config: AnyConfig) -> int:
    return config.batch.rows_per_update if isinstance(config, SftConfig) else samples_per_step(config.batch)


def role_devices(config: AnyConfig, role: str) -> int:
    return config.placement.pools[config.placement.roles[role]]


def make_mesh(parallel: ParallelConfig, world_size: int) -> Mesh:
    return Mesh(world_size, tp=parallel.tp, cp=parallel.cp, pp=parallel.pp, ep=parallel.ep, etp=parallel.etp)


def role_mesh(config: AnyConfig, role: str) -> Mesh:
    return make_mesh(config.model_roles()[role].parallel, role_devices(config, role))


def shard_size(config: AnyConfig, role: str) -> int | None:
    """Return the ranks that share one copy of a model that torch shards; None if Megatron runs it."""
    model = config.model_roles()[role]
    return (model.fsdp.shard_size or role_devices(config, role)) if model.strategy == "fsdp" else None


def held_dtype(model: MegatronModelConfig) -> str:
    """Return the dtype of the model's weights that a rank holds between steps, apart from an optimizer's own copy."""
    learns = isinstance(model, TrainedModelConfig) and model.lora is None  # with adapters, the model itself is frozen
    return "float32" if model.strategy == "fsdp" and learns else model.dtype


def role_batch(config: AnyConfig, role: str) -> RoleBatch:
    """Return the share of an update, or of a step, that one data-parallel rank of a role processes."""
    model, samples, longest = config.model_roles()[role], rows_per_step(config), tokens_limit(config)
    if isinstance(config, Config) and role in config.trained_roles():
        samples = config.batch.samples_per_update
    return RoleBatch(
        samples_per_rank=samples // role_mesh(config, role).dp,
        tokens_per_micro_batch=model.max_tokens_per_device * model.parallel.cp,
        longest_sample_tokens=longest,
    )


def tokens_limit(config: AnyConfig) -> int:
    """Return the tokens of the longest sample or row in a step. For pairs, both responses share a micro-batch and count
    together."""
    longest = longest_sample_tokens(config.batch if isinstance(config, SftConfig) else config.rollout)
    return 2 * longest if isinstance(config, RankedConfig) and config.is_of_pairs() else longest


def has_own_rollout_pool(config: Config) -> bool:
    """Return whether the engines have their own devices, so that they never take turns with the trainer."""
    roles = config.placement.roles
    return roles.get("rollout", roles["actor"]) != roles["actor"]


def gets_adapters_only(config: Config) -> bool:
    """Return whether engines that hold the frozen weights stay awake, so that new versions are adapters only."""
    applies_adapters = config.actor.lora is not None and config.actor.lora.sync == "adapters"
    return applies_adapters and (has_own_rollout_pool(config) or not config.sync.offload)


def cache_in_flight(config: Config) -> Literal["recompute", "keep"] | None:
    """Return what to do with the KV cache of running samples when weights arrive. Return None if weights never arrive
    in flight."""
    if config.asynchrony.weights != "in_flight":
        return None
    is_weighed = has_own_rollout_pool(config) and corrects_engines(config)
    return config.asynchrony.cache or ("keep" if is_weighed else "recompute")


def rollout_devices(config: Config) -> int:
    return role_devices(config, "rollout" if has_own_rollout_pool(config) else "actor")


def devices_per_engine_node(config: Config) -> int:
    """Return the devices that an engine has on each of its nodes. Over several nodes, it has all devices of each."""
    return min(config.rollout.num_devices, config.cluster.devices_per_node)


def engine_nodes(config: Config) -> int:
    """Return the number of nodes that an engine is on."""
    return config.rollout.num_devices // devices_per_engine_node(config)


def num_engines(config: Config) -> int:
    return config.rollout.replicas or rollout_devices(config) // config.rollout.num_devices


def mask_width(top_k: int, vocab: int) -> int:
    """Return the number of likeliest tokens that must be known to know a whole sampling mask."""
    return min(top_k + NUM_TIES, vocab)


def mask_bytes(top_k: int) -> int:
    """Return the largest number of bytes of a token's sampling mask, of int32."""
    return 4 * (top_k + NUM_TIES)
