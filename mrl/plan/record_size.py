"""Size of a recorded step, from above: the numbers of its tokens and the prints of its tensors."""

from __future__ import annotations

from mrl.config.arithmetic import longest_sample_tokens, mask_bytes, role_devices, samples_per_step, updates_per_step
from mrl.config.schema import Config
from mrl.config.sft import AnyConfig
from mrl.models.spec import ModelSpec
from mrl.models.table import hf_tensors
from mrl.plan.known_models import model_spec

_BYTES_PER_TOKEN = 64
"""Token ids, masks and log-probs, each in samples and batch; values, advantages and the text."""
_BYTES_PER_SAMPLE = 1000
_BYTES_PER_PRINT = 300
_KINDS_OF_STATE, _MOMENTS = 4, 2
_MODULES_PER_LAYER, _SIDES = 14, 2


def recorded_in(config: AnyConfig) -> list[int]:
    """Return the steps that are recorded for any value of their metrics. A run of epochs has an unknown last step."""
    record, last = config.training.record, config.training.steps
    every = range(record.every, last + 1, record.every) if record.every and last is not None else ()
    return sorted({*record.steps, *every})


def record_size(config: AnyConfig) -> int:
    """Return the largest number of bytes of one step."""
    spec, updates = model_spec(config.model.path), 1
    if isinstance(config, Config):
        size, updates = _sample_bytes(config, spec), updates_per_step(config.batch)
    else:
        longest = config.batch.max_prompt_tokens + config.batch.max_response_tokens
        size = config.batch.rows_per_update * (longest * _BYTES_PER_TOKEN + _BYTES_PER_SAMPLE)
    for role, model in config.trained_roles().items():
        stage_ranks = role_devices(config, role) // model.parallel.pp  # a rank has the tensors of its stage
        tensors, modules = len(hf_tensors(spec, "lm")), _MODULES_PER_LAYER * (spec.num_layers + 1)
        prints = tensors * _KINDS_OF_STATE * _MOMENTS
        watched = tensors * config.training.record.gradients + _SIDES * modules * config.training.record.activations
        prints += updates * watched
        size += stage_ranks * prints * _BYTES_PER_PRINT
    return size


def _sample_bytes(config: Config, spec: ModelSpec) -> int:
    per_token, distillation = _BYTES_PER_TOKEN, config.algorithm.distillation
    if config.algorithm.router_replay != "none" and spec.moe is not None:
        per_token += 2 * 2 * spec.num_layers * spec.moe.experts_per_token
    if config.algorithm.keep_sampling_mask:
        per_token += 2 * mask_bytes(config.rollout.top_k)
    if distillation is not None and distillation.form == "full":
        per_token += 4 * spec.hidden
    return samples_per_step(config.batch) * (longest_sample_tokens(config.rollout) * per_token + _BYTES_PER_SAMPLE)
