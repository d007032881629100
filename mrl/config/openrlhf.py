"""Flags of OpenRLHF's `train_ppo_ray` in a configuration of mrl, under their names with dots and before."""

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
    set_default,
    set_kl,
    set_machines,
)
from mrl.config.values import KeyPath
from mrl.config.verl_values import Convert, Values, among, same, zero_if_negative

_PROGRAM = re.compile(r"openrlhf\.cli\.train_ppo_ray$")
_OLD = {
    "train_batch_size": "train.batch_size",
    "rollout_batch_size": "rollout.batch_size",
    "n_samples_per_prompt": "rollout.n_samples_per_prompt",
    "max_epochs": "train.max_epochs",
    "pretrain": "actor.model_name_or_path",
    "reward_pretrain": "reward.model_name_or_path",
    "critic_pretrain": "critic.model_name_or_path",
    "actor_learning_rate": "actor.adam.lr",
    "critic_learning_rate": "critic.adam.lr",
    "init_kl_coef": "algo.kl.init_coef",
    "use_kl_loss": "algo.kl.use_loss",
    "kl_estimator": "algo.kl.estimator",
    "advantage_estimator": "algo.advantage.estimator",
    "prompt_data": "data.prompt_dataset",
    "input_key": "data.input_key",
    "label_key": "data.label_key",
    "apply_chat_template": "data.apply_chat_template",
    "generate_max_len": "rollout.max_new_tokens",
    "vllm_num_engines": "vllm.num_engines",
    "vllm_tensor_parallel_size": "vllm.tensor_parallel_size",
    "actor_num_nodes": "actor.num_nodes",
    "actor_num_gpus_per_node": "actor.num_gpus_per_node",
    "colocate_all_models": "train.colocate_all",
    "remote_rm_url": "reward.remote_url",
    "gamma": "algo.advantage.gamma",
    "lambd": "algo.advantage.lambd",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "gradient_checkpointing": "actor.gradient_checkpointing_enable",
    "zero_stage": "ds.zero_stage",
    "packing_samples": "ds.packing_samples",
    "save_steps": "ckpt.save_steps",
    "eval_steps": "eval.steps",
    "seed": "train.seed",
}
"""Flags of versions before 0.10 -> their names with dots."""
_SAME = {
    "actor.model_name_or_path": "model.path",
    "critic.model_name_or_path": "model.critic",
    "reward.model_name_or_path": "reward_model.path",
    "rollout.batch_size": "batch.prompts_per_step",
    "rollout.n_samples_per_prompt": "batch.samples_per_prompt",
    "train.max_epochs": "batch.epochs_per_step",
    "rollout.max_new_tokens": "rollout.max_response_tokens",
    "rollout.temperature": "rollout.temperature",
    "rollout.top_p": "rollout.top_p",
    "vllm.tensor_parallel_size": "rollout.tp",
    "vllm.gpu_memory_utilization": "rollout.vllm.gpu_memory_utilization",
    "vllm.enforce_eager": "rollout.vllm.enforce_eager",
    "data.prompt_dataset": "data.train.NAME.dataset",
    "eval.dataset": "data.validation.NAME.dataset",
    "data.input_key": "data.train.NAME.columns.prompt",
    "data.label_key": "data.train.NAME.columns.ground_truth",
    "eval.temperature": "validation.temperature",
    "eval.n_samples_per_prompt": "validation.samples_per_prompt",
    "actor.adam.lr": "actor.optimizer.lr",
    "critic.adam.lr": "critic.optimizer.lr",
    "actor.max_norm": "actor.optimizer.clip_grad",
    "critic.max_norm": "critic.optimizer.clip_grad",
    "actor.adam.weight_decay": "actor.optimizer.weight_decay",
    "ds.ring_attn_size": "actor.parallel.cp",
    "train.max_tokens_per_gpu": "actor.max_tokens_per_device",
    "ckpt.max_num": "training.keep",
    "train.seed": "training.seed",
    "actor.eps_clip": "algorithm.loss.clip_low, algorithm.loss.clip_high",
    "actor.dual_clip": "algorithm.loss.dual_clip",
    "critic.value_clip": "algorithm.loss.value_clip",
    "actor.entropy_coef": "algorithm.loss.entropy_coef",
    "algo.advantage.gamma": "algorithm.gamma",
    "algo.advantage.lambd": "algorithm.lam",
    "algo.kl.target": "algorithm.kl.target",
    "algo.kl.horizon": "algorithm.kl.horizon_samples",
    "reward.overlong_buffer_len": "algorithm.overlong.buffer_tokens",
    "reward.overlong_penalty_factor": "algorithm.overlong.factor",
    "actor.policy_loss_type": "algorithm.loss.policy",
}
_ESTIMATORS = {
    "group_norm": "grpo",
    "reinforce": "reinforce_plus_plus",
    "reinforce_baseline": "reinforce_plus_plus_baseline",
}


def _estimator(value: Any, values: Values) -> str:
    if value == "group_norm" and first_of(values, "algo.advantage.no_std_norm"):
        return "=dr_grpo"
    return among(ADVANTAGES, **_ESTIMATORS)(value, values)


_CONVERTED: Mapping[str, tuple[str, Convert]] = {
    "train.batch_size": ("batch.samples_per_update", noted("in samples, as there")),
    "algo.advantage.estimator": ("algorithm.advantage", _estimator),
    "ckpt.save_steps": ("training.save_every", zero_if_negative),
    "eval.steps": ("validation.every", zero_if_negative),
    "ds.param_dtype": ("actor.dtype", among(("bfloat16", "float32"), bf16="bfloat16", fp32="float32")),
    "actor.gradient_checkpointing_enable": ("actor.fsdp.recompute", same),
    "ckpt.load_enable": ("training.resume", lambda value, values: "=auto" if value is True else "=never"),
    "algo.dynamic_filtering_range": ("algorithm.dynamic_sampling", said("which drops groups with equal scores")),
    "train.agent_func_path": ("agent.environments", said("an environment of your own: docs/agents.md")),
    "train.async_enable": ("asynchrony.ahead", lambda value, values: "=1, with engines in their own pool"),
    "train.async_queue_size": ("asynchrony.ahead", said("which counts batches that are generated ahead")),
    "train.partial_rollout_enable": ("asynchrony.weights", lambda value, values: "=in_flight"),
    "reward.remote_url": ("reward.functions.NAME.name", said("`http` asks a service; a file: docs/extend.md")),
    "logger.wandb.key": ("training.trackers", said("[wandb], and WANDB_API_KEY in the environment")),
    "logger.tensorboard_dir": ("training.trackers", lambda value, values: "=[tensorboard], in the run's directory"),
}
_MICRO = "micro-batches follow from actor.max_tokens_per_device"
_READ = "read together with other keys"
_DEEPSPEED = "DeepSpeed is not used: actor.strategy is fsdp or megatron"
_SAVED = "run.dir and run.name determine where a run is, and a checkpoint always holds everything"
_SHARED = "roles of one pool always take turns on its devices, and move to the host"
_REASONS: Mapping[str, str] = {
    **dict.fromkeys(("train.micro_batch_size", "rollout.micro_batch_size", "train.dynamic_batch_enable"), _MICRO),
    "rollout.max_tokens_per_gpu": _MICRO,
    **dict.fromkeys(("ckpt.path", "ckpt.output_dir", "ckpt.save_hf", "ckpt.disable_ds", "ckpt.max_mem"), _SAVED),
    **dict.fromkeys(("vllm.enable_sleep", "ds.enable_sleep", "ref.offload", "reward.offload"), _SHARED),
    **dict.fromkeys(
        ("ds.zero_stage", "ds.adam_offload", "ds.zpg", "ds.overlap_comm", "ds.grad_accum_dtype"), _DEEPSPEED
    ),
    **dict.fromkeys(
        ("ds.attn_implementation", "ds.ring_attn_head_stride"), "each device has one attention for packed rows"
    ),
    "ds.packing_samples": "rows are always packed, without padding",
    "ds.use_liger_kernel": "the head and its loss are always fused",
    "vllm.sync_backend": "weights travel from shard to shard: sync.bucket_bytes",
    "vllm.enable_prefix_caching": "vLLM decides it",
    "data.max_samples": "a source is read whole; make a smaller file",
    "data.prompt_split": "a data set is files: data.train.NAME.dataset",
    "data.dataloader_num_workers": "prompts are encoded when they are drawn",
    "train.num_episodes": "training.steps counts steps, and prompts start over after all were drawn",
    "logger.logging_steps": "every step is logged",
    **dict.fromkeys(("logger.wandb.project", "logger.wandb.run_name", "logger.wandb.group"), "trackers read WANDB_*"),
    "algo.kl.estimator": _READ,
    **dict.fromkeys(
        [
            "algo.kl.init_coef",
            "algo.kl.use_loss",
            "data.apply_chat_template",
            "data.max_len",
            "vllm.num_engines",
            "train.colocate_all",
            "actor.num_nodes",
            "actor.num_gpus_per_node",
            "critic.num_nodes",
            "critic.num_gpus_per_node",
            "ref.num_nodes",
            "program",
            "ref.num_gpus_per_node",
            "reward.num_nodes",
            "reward.num_gpus_per_node",
            "train.colocate_actor_ref",
            "algo.advantage.is_correction_enable",
            "algo.advantage.is_correction_threshold",
            "algo.advantage.is_correction_type",
            "algo.advantage.no_std_norm",
            "train.colocate_critic_reward",
            "algo.dynamic_filtering_enable",
            "ds.tensor_parallel_size",
        ],
        _READ,
    ),
    "reward.normalize_enable": "scores are used unchanged; whiten advantages instead (algorithm.whiten)",
    "reward.clip_range": "reward.max_abs_score refuses larger scores",
    "reward.stop_properly_penalty_coef": "algorithm.overlong penalizes long responses",
    "critic.freezing_steps": "training.critic_warmup_steps trains only the critic",
    "train.enable_ema": "no average of weights is kept",
}


def read_openrlhf(text: str, name: str) -> dict[KeyPath, Any]:
    """Return the flags under their names with dots."""
    flags = read_flags(text, name, _PROGRAM)
    return {tuple(_OLD.get(".".join(path), ".".join(path)).split(".")): value for path, value in flags.items()}


def _name_for(path: KeyPath) -> tuple[str, Convert] | None:
    key = ".".join(path)
    return _CONVERTED.get(key) or ((_SAME[key], same) if key in _SAME else None)


def _reason_for(path: KeyPath) -> str | None:
    return _REASONS.get(".".join(path))


def _has_critic(values: Values) -> bool:
    return bool(first_of(values, "algo.advantage.estimator", default="gae") == "gae")


def _switched_off(path: KeyPath, values: Values) -> str:
    key = ".".join(path)
    if key.startswith("critic.") and key not in _REASONS and not _has_critic(values):
        return "only the estimator gae has a critic"
    return ""


def _finish(made: Imported, values: Values, leaves: Mapping[KeyPath, Any]) -> None:
    clip = first_of(values, "actor.eps_clip_low_high")
    if isinstance(clip, list) and len(clip) == 2:
        made.set("algorithm.loss.clip_low", clip[0], again=True)
        made.set("algorithm.loss.clip_high", clip[1], again=True)
        made.unknown[:] = [report for report in made.unknown if report.key != "actor.eps_clip_low_high"]
        shown = f"algorithm.loss.clip_low={clip[0]}, algorithm.loss.clip_high={clip[1]}"
        made.taken.append(KeyReport("actor.eps_clip_low_high", clip, shown))
    in_loss = first_of(values, "algo.kl.use_loss") is True
    key, coef = "algo.kl.init_coef", first_of(values, "algo.kl.init_coef", default=0.01)
    set_kl(made, key, "loss" if in_loss else "reward", coef, first_of(values, "algo.kl.estimator", default="k1"))
    if first_of(values, "algo.advantage.is_correction_enable") is True:
        low_high = first_of(values, "algo.advantage.is_correction_threshold", default=[0.5, 5.0])
        kind = first_of(values, "algo.advantage.is_correction_type", default="tis")
        correction = {"level": "token", "beyond": "truncate" if kind == "tis" else "mask", "upper": low_high[-1]}
        made.set("algorithm.correction", correction)
        remark = (
            "icepop masks ratios beyond the bounds" if kind == "icepop" else "ratios beyond the bound are truncated"
        )
        made.changed.append(KeyReport("is_correction_*", kind, f"algorithm.correction={correction}", remark))
    if first_of(values, "algo.dynamic_filtering_enable") is True:
        set_default(
            made, "algorithm.dynamic_sampling.most_rounds", 4, "mrl's default: rounds before a step is an error"
        )
    if first_of(values, "actor.dual_clip") is None:
        set_default(made, "algorithm.loss.dual_clip", None, "no lower bound of the loss there")
    set_default(made, "algorithm.advantage", "gae", "the estimator there, if none is given")
    if first_of(values, "data.apply_chat_template") is not True:
        set_default(made, "data.raw_text", True, "prompts are plain text without apply_chat_template")
    made.values.get("data", {}).get("train", {}).get("main", {}).setdefault("columns", {}).setdefault(
        "data_source", None
    )
    _add_lengths(made, values)
    fit_longest(made, "train.max_tokens_per_gpu")
    _add_roles(made, values)


def _add_lengths(made: Imported, values: Values) -> None:
    total, response = count_of(values, "data.max_len", default=2048), count_of(values, "rollout.max_new_tokens")
    if total and response and total > response:
        made.set("rollout.max_prompt_tokens", total - response)
        shown, remark = f"rollout.max_prompt_tokens={total - response}", "max_len minus max_new_tokens"
        made.changed.append(KeyReport("data.max_len", total, shown, remark))
    else:
        remark = "a limit of prompt and response together: set rollout.max_prompt_tokens and max_response_tokens"
        made.left_out.append(KeyReport("data.max_len", total, "rollout.max_prompt_tokens", remark))
    default = count_of(values, "train.max_tokens_per_gpu")
    if default is None and total:
        micro = count_of(values, "train.micro_batch_size", default=1) or 1
        made.set("actor.max_tokens_per_device", micro * total)
        remark = f"{micro} samples of up to {total} tokens"
        shown = f"actor.max_tokens_per_device={micro * total}"
        made.changed.append(KeyReport("train.micro_batch_size", micro, shown, remark))


def _add_roles(made: Imported, values: Values) -> None:
    """Add pools, strategies and the schedule. Without colocate_all, roles have their own devices there."""
    roles = ["actor", *["critic"] * _has_critic(values), *["reward_model"] * ("reward_model" in made.values)]
    tokens = made.values.get("actor", {}).get("max_tokens_per_device")
    recomputes = made.values.get("actor", {}).get("fsdp", {}).get("recompute") is True
    for role in roles:
        made.set(f"{role}.strategy", "fsdp")
        if recomputes and role == "critic":
            made.set("critic.fsdp.recompute", True)
        made.set(f"{role}.max_tokens_per_device", tokens)
    made.changed.append(KeyReport("ds", "", "strategy=fsdp", f"in place of DeepSpeed, for {', '.join(roles)}"))
    for role in roles[: 1 + _has_critic(values)]:
        set_default(made, f"{role}.optimizer.weight_decay", 0.0, "no decay there unless a flag says so")
        set_default(
            made, f"{role}.schedule.decay", "cosine", "cosine_with_min_lr; set decay_steps and warmup_steps (3 %)"
        )
        set_default(made, f"{role}.schedule.min_lr_ratio", 0.1, "cosine_with_min_lr")
    nodes, here = (
        count_of(values, f"actor.num_{what}", default=8 if "gpus" in what else 1) for what in ("nodes", "gpus_per_node")
    )
    own, tp = count_of(values, "vllm.num_engines"), count_of(values, "vllm.tensor_parallel_size", default=1)
    engines = None if first_of(values, "train.colocate_all") is True else product(own, tp)
    set_machines(made, nodes or 1, here or 8, engines, dict.fromkeys(roles, ""))
    if first_of(values, "train.colocate_all") is not True:
        remark = "roles with their own devices there share the actor's here"
        made.changed.append(KeyReport("colocate_all", False, "placement.roles", remark))


def _batch(values: Values) -> Batch:
    prompts, n = (
        count_of(values, "rollout.batch_size", default=1024),
        count_of(values, "rollout.n_samples_per_prompt", default=1),
    )
    per_update, epochs = (
        count_of(values, "train.batch_size", default=128),
        count_of(values, "train.max_epochs", default=1),
    )
    samples = product(prompts, n)
    updates = samples // per_update * epochs if samples and per_update and epochs else None
    return {PROMPTS: prompts, SAMPLES: samples, PER_UPDATE: per_update, UPDATES: updates, EPOCHS: epochs}


_DEFAULTS: Mapping[KeyPath, Any] = {
    ("rollout", "batch_size"): 1024,
    ("rollout", "n_samples_per_prompt"): 1,
    ("train", "batch_size"): 128,
    ("actor", "adam", "lr"): 1e-6,
}
OPENRLHF = Peer("OpenRLHF", _name_for, _reason_for, _switched_off, _finish, _batch, _DEFAULTS)
