"""Flags of slime in a configuration of mrl. Sizes of batches are prompts and samples in both."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mrl.config.algorithm import ADVANTAGES
from mrl.config.peer_flags import read_flags
from mrl.config.peer_import import EPOCHS, PER_UPDATE, PROMPTS, SAMPLES, UPDATES, Batch, Imported, KeyReport, Peer
from mrl.config.peer_values import (
    count_of,
    first_of,
    fit_longest,
    noted,
    product,
    said,
    sequence_parallel,
    set_default,
    set_kl,
    set_machines,
    switch,
)
from mrl.config.values import KeyPath
from mrl.config.verl_values import Convert, Values, among, same, zero_if_negative

_PROGRAM = re.compile(r"(^|/)train(_async)?\.py$")
_DECAYS = ("constant", "linear", "cosine")


def read_slime(text: str, name: str) -> dict[KeyPath, Any]:
    return read_flags(text, name, _PROGRAM)


def _advantage(value: Any, values: Values) -> str:
    grpo = "dr_grpo" if values.get("disable_grpo_std_normalization") else "grpo"
    if value == "gspo":
        return f"={grpo}, with algorithm.loss.policy=gspo"
    return among(ADVANTAGES, grpo=grpo, ppo="gae", reinforce_plus_plus_baseline="reinforce_plus_plus_baseline")(
        value, values
    )


def _per_update(value: Any, values: Values) -> str:
    return f"={value}, in samples, as there" if type(value) is int else ""


def _by_steps(value: Any, values: Values) -> str:
    samples = product(count_of(values, "rollout_batch_size"), count_of(values, "n_samples_per_prompt", default=1))
    return f"={samples // value}, which is {samples} samples / {value} steps" if samples and value else ""


def _scaled_min(value: Any, values: Values) -> str:
    lr = first_of(values, "lr", default=1e-6)
    return f"={value / lr:g}, which is min_lr / lr" if isinstance(value, int | float) and lr else ""


_SAME = {
    "hf_checkpoint": "model.path",
    "num_rollout": "training.steps",
    "rollout_batch_size": "batch.prompts_per_step",
    "n_samples_per_prompt": "batch.samples_per_prompt",
    "rollout_max_prompt_len": "rollout.max_prompt_tokens",
    "rollout_max_response_len": "rollout.max_response_tokens",
    "rollout_temperature": "rollout.temperature",
    "rollout_top_p": "rollout.top_p",
    "rollout_stop": "rollout.stop",
    "rollout_stop_token_ids": "rollout.stop_token_ids",
    "rollout_num_gpus_per_engine": "rollout.tp",
    "rollout_shuffle": "data.shuffle",
    "input_key": "data.train.NAME.columns.prompt",
    "label_key": "data.train.NAME.columns.ground_truth",
    "metadata_key": "data.train.NAME.columns.extra_info",
    "eval_interval": "validation.every",
    "n_samples_per_eval_prompt": "validation.samples_per_prompt",
    "eval_top_p": "validation.top_p",
    "eval_temperature": "validation.temperature",
    "save_interval": "training.save_every",
    "seed": "training.seed",
    "tensor_model_parallel_size": "actor.parallel.tp",
    "pipeline_model_parallel_size": "actor.parallel.pp",
    "context_parallel_size": "actor.parallel.cp",
    "expert_model_parallel_size": "actor.parallel.ep",
    "expert_tensor_parallel_size": "actor.parallel.etp",
    "decoder_first_pipeline_num_layers": "actor.parallel.first_stage_layers",
    "decoder_last_pipeline_num_layers": "actor.parallel.last_stage_layers",
    "recompute_granularity": "actor.megatron.recompute_granularity",
    "recompute_method": "actor.megatron.recompute_method",
    "recompute_num_layers": "actor.megatron.recompute_num_layers",
    "recompute_modules": "actor.megatron.recompute_modules",
    "lr": "actor.optimizer.lr",
    "weight_decay": "actor.optimizer.weight_decay",
    "adam_beta1": "actor.optimizer.adam_beta1",
    "adam_beta2": "actor.optimizer.adam_beta2",
    "adam_eps": "actor.optimizer.adam_eps",
    "clip_grad": "actor.optimizer.clip_grad",
    "gamma": "algorithm.gamma",
    "lambd": "algorithm.lam",
    "entropy_coef": "algorithm.loss.entropy_coef",
    "eps_clip": "algorithm.loss.clip_low, algorithm.loss.clip_high",
    "eps_clip_high": "algorithm.loss.clip_high",
    "eps_clip_c": "algorithm.loss.dual_clip",
    "value_clip": "algorithm.loss.value_clip",
    "tis_clip": "algorithm.correction.upper",
}
_CONVERTED: Mapping[str, tuple[str, Convert]] = {
    "global_batch_size": ("batch.samples_per_update", _per_update),
    "num_steps_per_rollout": ("batch.samples_per_update", _by_steps),
    "advantage_estimator": ("algorithm.advantage", _advantage),
    "use_rollout_logprobs": ("algorithm.old_log_probs", switch("engine", "trainer")),
    "rollout_top_k": ("rollout.top_k", zero_if_negative),
    "sequence_parallel": ("actor.parallel.sequence_parallel", sequence_parallel("tensor_model_parallel_size")),
    "max_tokens_per_gpu": ("actor.max_tokens_per_device", same),
    "lr_decay_style": ("actor.schedule.decay", among(_DECAYS)),
    "lr_warmup_iters": ("actor.schedule.warmup_steps", noted("in updates")),
    "lr_decay_iters": ("actor.schedule.decay_steps", noted("in updates")),
    "min_lr": ("actor.schedule.min_lr_ratio", _scaled_min),
    "sglang_mem_fraction_static": ("rollout.vllm.gpu_memory_utilization", noted("of vLLM instead of SGLang")),
    "skip_eval_before_train": ("validation.first", lambda value, values: "=false" if value is True else "=true"),
    "use_wandb": ("training.trackers", lambda value, values: "=[wandb]"),
    "use_tensorboard": ("training.trackers", lambda value, values: "=[tensorboard]"),
    "eval_max_response_len": ("rollout.max_response_tokens", said("which also limits validation")),
    "dynamic_sampling_filter_path": (
        "algorithm.dynamic_sampling",
        said("a section to add, if the filter drops equal scores"),
    ),
    "partial_rollout": ("asynchrony.weights", said("in_flight carries unfinished samples over: docs/asynchrony.md")),
    "custom_rm_path": ("reward.functions.NAME.name", said("a function of your own takes a sample: docs/extend.md")),
    "custom_generate_function_path": ("agent.environments", said("an environment of your own: docs/agents.md")),
}
_MODEL = "the model follows its config.json"
_RUN = "run.dir and run.name determine what is saved and which run continues"
_MICRO = "micro-batches follow from actor.max_tokens_per_device"
_DTYPE = "gradients and reductions are in float32"
_READ = "read together with other keys"
_MODEL_FLAGS = """
    swiglu num_layers hidden_size ffn_hidden_size num_attention_heads group_query_attention num_query_groups
    use_rotary_position_embeddings disable_bias_linear add_qkv_bias normalization norm_epsilon rotary_base
    vocab_size kv_channels qk_layernorm rotary_percent untie_embeddings_and_output_weights num_experts
    moe_ffn_hidden_size moe_layer_freq moe_router_topk moe_router_pre_softmax moe_router_score_function
    moe_shared_expert_intermediate_size multi_latent_attention q_lora_rank kv_lora_rank position_embedding_type
    rope_scaling_factor source spec make_vocab_size_divisible_by no_position_embedding post_self_attn_layernorm
    post_mlp_layernorm mtp_num_layers
"""
_READ_FLAGS = """
    use_kl_loss kl_loss_coef kl_loss_type kl_coef use_tis rm_type reward_key apply_chat_template prompt_data
    eval_prompt_data colocate actor_num_nodes actor_num_gpus_per_node rollout_num_gpus calculate_per_token_loss
    disable_grpo_std_normalization program num_gpus_per_node critic_num_nodes critic_num_gpus_per_node
"""
_REASONS: Mapping[str, str] = {
    **dict.fromkeys(
        _MODEL_FLAGS.split(),
        _MODEL,
    ),
    **dict.fromkeys(("load", "save", "save_debug_rollout_data", "load_debug_rollout_data", "ckpt_format"), _RUN),
    "ref_load": "the reference is model.path before training",
    **dict.fromkeys(("use_dynamic_batch_size", "micro_batch_size", "log_probs_max_tokens_per_gpu"), _MICRO),
    "balance_data": "rows are always distributed over ranks by their work",
    **dict.fromkeys(("attention_dropout", "hidden_dropout"), "nothing is dropped out"),
    **dict.fromkeys(("accumulate_allreduce_grads_in_fp32", "attention_softmax_in_fp32"), _DTYPE),
    **dict.fromkeys(
        ("optimizer_cpu_offload", "overlap_cpu_optimizer_d2h_h2d"), "sync.offload moves the whole optimizer"
    ),
    "use_precision_aware_optimizer": _DTYPE,
    **dict.fromkeys(("moe_token_dispatcher_type", "moe_enable_deepep"), "tokens reach experts by alltoall"),
    "attention_backend": "each device has one attention for packed rows",
    "optimizer": "Adam is the optimizer",
    **dict.fromkeys(
        _READ_FLAGS.split(),
        _READ,
    ),
    **dict.fromkeys(
        ("wandb_project", "wandb_group", "wandb_key", "wandb_team"), "trackers read WANDB_* of the environment"
    ),
    "num_epoch": "training.steps counts steps, and prompts start over after all were drawn",
    "over_sampling_batch_size": "algorithm.dynamic_sampling draws as many prompts as are missing",
    "train_backend": "actor.strategy: Megatron, or docs/fsdp.md",
    "use_fault_tolerance": "engines that die are always replaced",
    "update_weight_buffer_size": "sync.bucket_bytes",
    "normalize_advantages": "algorithm.whiten concerns `gae` alone; reinforce_plus_plus always normalizes",
    "rollout_max_context_len": "it is rollout.max_prompt_tokens plus rollout.max_response_tokens",
}
_REWARDS = {
    "deepscaler": "math",
    "math": "math",
    "dapo": "dapo",
    "f1": "f1",
    "gpqa": "multiple_choice",
    "ifbench": "ifeval",
}


def _name_for(path: KeyPath) -> tuple[str, Convert] | None:
    return _CONVERTED.get(path[0]) or ((_SAME[path[0]], same) if path[0] in _SAME else None)


def _reason_for(path: KeyPath) -> str | None:
    of_engines = "an option of SGLang: engines are vLLM (rollout.vllm)" if path[0].startswith("sglang_") else None
    return _REASONS.get(path[0]) or of_engines


def _switched_off(path: KeyPath, values: Values) -> str:
    if path[0] == "value_clip" and first_of(values, "advantage_estimator") != "ppo":
        return "only the advantage estimator ppo has a critic"
    return "use_tis is not set" if path[0] == "tis_clip" and not values.get("use_tis") else ""


def _finish(made: Imported, values: Values, leaves: Mapping[KeyPath, Any]) -> None:
    in_loss = values.get("use_kl_loss") is True
    coef = first_of(values, "kl_loss_coef", default=0.0) if in_loss else first_of(values, "kl_coef", default=0.0)
    where, estimator = ("loss", first_of(values, "kl_loss_type", default="k1")) if in_loss else ("reward", None)
    set_kl(made, "kl_loss_coef" if in_loss else "kl_coef", where, coef, estimator)
    if values.get("advantage_estimator") == "gspo":
        made.set("algorithm.loss.policy", "gspo")
    per_token = values.get("calculate_per_token_loss") is True
    aggregation = "token-mean" if per_token else "seq-mean-token-mean"
    set_default(
        made, "algorithm.loss.aggregation", aggregation, "the loss is a mean over samples unless it is per token"
    )
    if first_of(values, "eps_clip_c") is None:
        set_default(made, "algorithm.loss.dual_clip", None, "no lower bound of the loss there")
    if values.get("use_tis") is True:
        set_default(made, "algorithm.correction.level", "token", "use_tis")
    set_default(made, "data.shuffle", False, "prompts are shuffled with rollout_shuffle alone")
    if values.get("apply_chat_template") is not True:
        set_default(made, "data.raw_text", True, "prompts are plain text without apply_chat_template")
    if str(values.get("program", "")).endswith("train_async.py"):
        set_default(made, "asynchrony.ahead", 1, "train_async.py generates one batch ahead")
    _add_data(made, values)
    fit_longest(made, "max_tokens_per_gpu")
    nodes, here = (
        count_of(values, key, default=n) or n for key, n in (("actor_num_nodes", 1), ("actor_num_gpus_per_node", 8))
    )
    engines = None if values.get("colocate") is True else count_of(values, "rollout_num_gpus", default=nodes * here)
    roles = dict.fromkeys(["actor", *["critic"] * (values.get("advantage_estimator") == "ppo")], "")
    set_machines(made, nodes, here, engines, roles)
    shown = f"placement.pools={made.values['placement']['pools']}"
    made.taken.append(KeyReport("actor_num_nodes, actor_num_gpus_per_node, rollout_num_gpus, colocate", "", shown))


def _add_data(made: Imported, values: Values) -> None:
    """Add the files, and the reward that `rm_type` names."""
    for name, part in (("prompt_data", "train"), ("eval_prompt_data", "validation")):
        words = values.get(name)
        words = words if isinstance(words, list) else [words] if isinstance(words, str) else []
        pairs = dict(zip(words[::2], words[1::2], strict=False)) if part == "validation" else dict.fromkeys(words[:1])
        for label, path in pairs.items():
            key, file = (f"data.{part}.{label if path else 'main'}.dataset", path or label)
            made.set(key, str(file))
            made.taken.append(KeyReport(name, file, f"{key}={file}"))
    kind = str(values.get("rm_type", "")).removeprefix("boxed_")
    if kind in _REWARDS:
        made.set("reward.functions.main.name", _REWARDS[kind])
        remark = "compare its answers with those of rm_type on some samples"
        made.changed.append(
            KeyReport("rm_type", values["rm_type"], f"reward.functions.main.name={_REWARDS[kind]}", remark)
        )
    elif kind:
        made.left_out.append(
            KeyReport("rm_type", kind, "reward.functions.main.name", "no built-in function: docs/extend.md")
        )
    columns = made.values.get("data", {}).get("train", {}).get("main", {}).setdefault("columns", {})
    columns.setdefault("data_source", None)


def _batch(values: Values) -> Batch:
    prompts, n = count_of(values, "rollout_batch_size"), count_of(values, "n_samples_per_prompt", default=1)
    samples, steps = product(prompts, n), count_of(values, "num_steps_per_rollout")
    per_update = count_of(values, "global_batch_size") or (samples // steps if samples and steps else None)
    updates = samples // per_update if samples and per_update else None
    return {PROMPTS: prompts, SAMPLES: samples, PER_UPDATE: per_update, UPDATES: updates, EPOCHS: 1}


SLIME = Peer("slime", _name_for, _reason_for, _switched_off, _finish, _batch, {("n_samples_per_prompt",): 1})
