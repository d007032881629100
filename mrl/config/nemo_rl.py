"""NeMo-RL's keys in a configuration of mrl."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mrl.config import verl_values as to
from mrl.config.algorithm import KL_ESTIMATORS
from mrl.config.peer_import import EPOCHS, PER_UPDATE, PROMPTS, SAMPLES, UPDATES, Batch, Imported, KeyReport, Peer
from mrl.config.peer_values import (
    count_of,
    first_of,
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
from mrl.config.verl_values import Convert, Values, among, same

_TP = "policy.megatron_cfg.tensor_model_parallel_size"
_SAME = {
    "grpo.num_prompts_per_step": "batch.prompts_per_step",
    "grpo.num_generations_per_prompt": "batch.samples_per_prompt",
    "grpo.max_num_steps": "training.steps",
    "grpo.val_period": "validation.every",
    "grpo.val_at_start": "validation.first",
    "grpo.val_num_generations_per_prompt": "validation.samples_per_prompt",
    "grpo.seed": "training.seed",
    "policy.model_name": "model.path",
    "policy.precision": "actor.dtype",
    "policy.max_grad_norm": "actor.optimizer.clip_grad",
    "loss_fn.ratio_clip_min": "algorithm.loss.clip_low",
    "loss_fn.ratio_clip_max": "algorithm.loss.clip_high",
    "loss_fn.ratio_clip_c": "algorithm.loss.dual_clip",
    "policy.generation.temperature": "rollout.temperature",
    "policy.generation.top_p": "rollout.top_p",
    "policy.generation.val_temperature": "validation.temperature",
    "policy.generation.val_top_p": "validation.top_p",
    "policy.generation.stop_strings": "rollout.stop",
    "policy.generation.stop_token_ids": "rollout.stop_token_ids",
    "policy.generation.vllm_cfg.tensor_parallel_size": "rollout.tp",
    "policy.generation.vllm_cfg.pipeline_parallel_size": "rollout.pp",
    "policy.generation.vllm_cfg.gpu_memory_utilization": "rollout.vllm.gpu_memory_utilization",
    "policy.generation.vllm_cfg.enforce_eager": "rollout.vllm.enforce_eager",
    "data.shuffle": "data.shuffle",
    "policy.tokenizer.chat_template_kwargs": "data.template",
    "checkpointing.checkpoint_dir": "run.dir",
    "checkpointing.save_period": "training.save_every",
    "checkpointing.keep_top_k": "training.keep",
    "policy.megatron_cfg.tensor_model_parallel_size": "actor.parallel.tp",
    "policy.megatron_cfg.pipeline_model_parallel_size": "actor.parallel.pp",
    "policy.megatron_cfg.context_parallel_size": "actor.parallel.cp",
    "policy.megatron_cfg.expert_model_parallel_size": "actor.parallel.ep",
    "policy.megatron_cfg.expert_tensor_parallel_size": "actor.parallel.etp",
    "policy.megatron_cfg.num_layers_in_first_pipeline_stage": "actor.parallel.first_stage_layers",
    "policy.megatron_cfg.num_layers_in_last_pipeline_stage": "actor.parallel.last_stage_layers",
    "policy.megatron_cfg.moe_router_bias_update_rate": "actor.router_bias_update_rate",
    "policy.dtensor_cfg.context_parallel_size": "actor.parallel.cp",
    **{
        f"policy.megatron_cfg.optimizer.{key}": f"actor.optimizer.{key}"
        for key in ("lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps")
    },
    "policy.optimizer.kwargs.lr": "actor.optimizer.lr",
    "policy.optimizer.kwargs.weight_decay": "actor.optimizer.weight_decay",
    "policy.optimizer.kwargs.eps": "actor.optimizer.adam_eps",
}


def _if_on(name: str) -> Convert:
    return lambda value, values: f"={name}" if value is True else ", which is not set"


def _scaled_min(value: Any, values: Values) -> str:
    lr = first_of(values, "policy.megatron_cfg.optimizer.lr")
    both = isinstance(value, int | float) and isinstance(lr, int | float) and lr
    return f"={value / lr:g}, which is min_lr / lr" if both else ""


_CONVERTED: Mapping[str, tuple[str, Convert]] = {
    "policy.train_global_batch_size": ("batch.samples_per_update", noted("in samples, as there")),
    "loss_fn.token_level_loss": ("algorithm.loss.aggregation", switch("token-mean", "seq-mean-token-mean")),
    "loss_fn.sequence_level_importance_ratios": ("algorithm.loss.policy", _if_on("gspo")),
    "loss_fn.use_cispo": ("algorithm.loss.policy", _if_on("cispo")),
    "loss_fn.truncated_importance_sampling_ratio": ("algorithm.correction.upper", same),
    "grpo.use_dynamic_sampling": ("algorithm.dynamic_sampling", said("a section to add if it is true")),
    "grpo.dynamic_sampling_max_gen_batches": ("algorithm.dynamic_sampling.most_rounds", same),
    "grpo.async_grpo.max_trajectory_age_steps": ("asynchrony.ahead", same),
    "grpo.async_grpo.in_flight_weight_updates": ("asynchrony.weights", switch("in_flight", "between")),
    "grpo.async_grpo.recompute_kv_cache_after_weight_updates": ("asynchrony.cache", switch("recompute", "keep")),
    "grpo.reward_shaping.overlong_buffer_length": ("algorithm.overlong.buffer_tokens", same),
    "grpo.reward_shaping.overlong_buffer_penalty": ("algorithm.overlong.factor", same),
    "policy.generation.backend": ("rollout.engine", among(("vllm", "transformers"))),
    "policy.generation.top_k": ("rollout.top_k", to.default(0)),
    "policy.generation.val_top_k": ("validation.top_k", to.default(0)),
    "policy.megatron_cfg.sequence_parallel": ("actor.parallel.sequence_parallel", sequence_parallel(_TP)),
    "policy.megatron_cfg.activation_checkpointing": ("actor.megatron.recompute_granularity", _if_on("full")),
    "policy.dtensor_cfg.activation_checkpointing": ("actor.fsdp.recompute", same),
    "policy.megatron_cfg.optimizer.min_lr": ("actor.schedule.min_lr_ratio", _scaled_min),
    "policy.megatron_cfg.scheduler.lr_warmup_iters": ("actor.schedule.warmup_steps", noted("in updates")),
    "policy.megatron_cfg.scheduler.lr_decay_style": ("actor.schedule.decay", among(("constant", "linear", "cosine"))),
    "policy.megatron_cfg.scheduler.lr_decay_iters": ("actor.schedule.decay_steps", noted("in updates")),
    "data.train.dataset_name": ("data.train.NAME.dataset", said("a file: `mrl data` writes some of these data sets")),
    "data.validation.dataset_name": ("data.validation.NAME.dataset", said("a file, as for data.train")),
    "data.default.prompt_file": ("data.train.NAME.dataset", said("put its text into the prompts of the file")),
}
_READ = "read together with other keys"
_MICRO = "micro-batches follow from actor.max_tokens_per_device"
_MEGATRON = "Megatron's own setting: actor.megatron has keys of its transformer's configuration"
_READ_KEYS = """
    loss_fn.reference_policy_kl_penalty loss_fn.reference_policy_kl_type loss_fn.use_kl_in_reward cluster.*
    grpo.normalize_rewards grpo.use_leave_one_out_baseline grpo.adv_estimator.* policy.max_total_sequence_length
    data.max_input_seq_length policy.generation.max_new_tokens policy.generation.colocated.* grpo.async_grpo.*
    policy.megatron_cfg.enabled policy.dtensor_cfg.enabled policy.dtensor_cfg.tensor_parallel_size
    policy.optimizer.kwargs.betas grpo.reward_shaping.* logger.wandb_enabled logger.tensorboard_enabled
    logger.mlflow_enabled logger.swanlab_enabled loss_fn.use_importance_sampling_correction
"""
_MICRO_KEYS = """
    policy.train_micro_batch_size policy.logprob_batch_size policy.logprob_chunk_size policy.dynamic_batching.*
    policy.sequence_packing.* policy.make_sequence_length_divisible_by policy.generation_batch_size
"""
_REASONS: Mapping[str, str] = {
    **dict.fromkeys(
        _READ_KEYS.split(),
        _READ,
    ),
    **dict.fromkeys(
        _MICRO_KEYS.split(),
        _MICRO,
    ),
    **dict.fromkeys(("grpo.val_batch_size", "grpo.max_val_samples"), "a validation generates all its prompts at once"),
    "grpo.max_num_epochs": "training.steps counts steps, and prompts start over after all were drawn",
    "grpo.max_rollout_turns": "agent.environments.NAME.max_turns",
    "grpo.val_at_end": "the last step is always validated",
    "grpo.batch_multiplier": "algorithm.dynamic_sampling draws as many prompts as are missing",
    "grpo.reward_scaling.*": "scores are used unchanged: scale them in the reward function",
    "grpo.*": "a feature that mrl does not have, or a default of it",
    "loss_fn.*": "a variant of the loss that mrl does not have, or a default of it",
    "reward_penalties.*": "such a penalty is a reward function with a negative weight",
    "policy.tokenizer.*": "the tokenizer is the model's",
    "policy.hf_config_overrides.*": "the model follows its config.json",
    "policy.megatron_cfg.distributed_data_parallel_config.*": "Megatron's own setting: actor.ddp",
    "policy.megatron_cfg.optimizer.*": "Megatron's own setting: actor.optimizer",
    "policy.megatron_cfg.peft.*": "adapters are the section actor.lora: docs/lora.md",
    "policy.dtensor_cfg.lora_cfg.*": "adapters are the section actor.lora: docs/lora.md",
    "policy.megatron_cfg.*": _MEGATRON,
    "policy.dtensor_cfg.*": "torch's sharding has no such setting here: docs/fsdp.md",
    "policy.scheduler.*": "torch's schedulers: set actor.schedule by hand",
    "policy.optimizer.*": "Adam is the optimizer",
    "policy.generation.vllm_cfg.*": "vLLM's own setting: rollout.vllm has its engine's arguments",
    "policy.generation.*": "a setting of engines or transfers that mrl decides itself",
    "policy.draft.*": "there are no draft models",
    "policy.*": "a setting that mrl decides itself, or does not have",
    "checkpointing.*": "a checkpoint always holds everything, as safetensors that any layout reads",
    "data.*": "data.train.NAME has a file and its columns",
    "env.*": "rewards are reward.functions; environments are agent.environments",
    "logger.*": "trackers read the environment (WANDB_PROJECT and the like)",
    "data_plane.*": "columns stay where workers write them",
    "on_policy_distillation": "algorithm.distillation and the section teacher",
    "teacher.*": "the section teacher and algorithm.distillation: docs/preferences.md",
}


def _name_for(path: KeyPath) -> tuple[str, Convert] | None:
    key = ".".join(path)
    return _CONVERTED.get(key) or ((_SAME[key], same) if key in _SAME else None)


def _reason_for(path: KeyPath) -> str | None:
    starts = [".".join(path), *(".".join((*path[:size], "*")) for size in range(len(path) - 1, 0, -1))]
    starts += [f"{'.'.join(path)}.*"]
    return next((_REASONS[start] for start in starts if start in _REASONS), None)


def _switched_off(path: KeyPath, values: Values) -> str:
    """Return why a key has no effect: null, or the switch of its section is off."""
    value, key = first_of(values, ".".join(path)), ".".join(path)
    for section in ("policy.megatron_cfg", "policy.dtensor_cfg", "grpo.async_grpo", "grpo.reward_shaping"):
        if key.startswith(f"{section}.") and first_of(values, f"{section}.enabled") is not True:
            return f"{section}.enabled is not true"
    megatron = first_of(values, "policy.megatron_cfg.enabled") is True
    if megatron and key.startswith(("policy.optimizer.", "policy.scheduler.")):
        return "Megatron's optimizer is in policy.megatron_cfg"
    if key == "grpo.dynamic_sampling_max_gen_batches" and first_of(values, "grpo.use_dynamic_sampling") is not True:
        return "grpo.use_dynamic_sampling is not true"
    is_null = value is None and key not in ("policy.generation.top_k", "policy.generation.val_top_k")
    return "null, which sets nothing" if is_null and key != "loss_fn.ratio_clip_c" else ""


def _finish(made: Imported, values: Values, leaves: Mapping[KeyPath, Any]) -> None:
    where = "reward" if first_of(values, "loss_fn.use_kl_in_reward") is True else "loss"
    kind = first_of(values, "loss_fn.reference_policy_kl_type", default="k3")
    coef = first_of(values, "loss_fn.reference_policy_kl_penalty", default=0.0)
    set_kl(made, "loss_fn.reference_policy_kl_penalty", where, coef, kind if kind in KL_ESTIMATORS else None)
    if first_of(values, "loss_fn.ratio_clip_c") is None:
        set_default(made, "algorithm.loss.dual_clip", None, "ratio_clip_c is null")
    _add_advantage(made, values)
    if first_of(values, "loss_fn.use_importance_sampling_correction") is True:
        set_default(made, "algorithm.correction.level", "token", "use_importance_sampling_correction")
    is_megatron = first_of(values, "policy.megatron_cfg.enabled") is True
    tp = count_of(values, "policy.dtensor_cfg.tensor_parallel_size", default=1)
    if not is_megatron and tp == 1:
        made.set("actor.strategy", "fsdp")
        made.taken.append(KeyReport("policy.dtensor_cfg.enabled", True, "actor.strategy=fsdp"))
    elif not is_megatron:
        made.set("actor.parallel.tp", tp)
        remark = "Megatron, because mrl's fsdp has no tensor parallelism"
        made.changed.append(KeyReport("policy.dtensor_cfg.tensor_parallel_size", tp, f"actor.parallel.tp={tp}", remark))
        if (made.values["actor"].pop("fsdp", None) or {}).get("recompute"):
            made.set("actor.megatron.recompute_granularity", "full")
    megatron = made.values.get("actor", {}).get("megatron", {})
    if megatron.get("recompute_granularity") == "full":
        made.set("actor.megatron.recompute_method", "uniform")
        made.set("actor.megatron.recompute_num_layers", 1)
    betas = None if is_megatron else first_of(values, "policy.optimizer.kwargs.betas")
    for name, beta in zip(("adam_beta1", "adam_beta2"), betas or (), strict=False):
        made.set(f"actor.optimizer.{name}", beta)
    _drop_validation(made, values)
    _add_lengths(made, values)
    env = first_of(values, "data.default.env_name", "data.train.env_name", default="")
    if env == "math":
        made.set("reward.functions.main.name", "math_verify")
        remark = "compare its answers with those of the environment on some samples"
        made.changed.append(KeyReport("env.math", "", "reward.functions.main.name=math_verify", remark))
    names = [name for name in ("wandb", "tensorboard", "mlflow", "swanlab")
             if first_of(values, f"logger.{name}_enabled") is True]  # fmt: skip
    if names:
        set_default(made, "training.trackers", names, "logger.NAME_enabled")
    _add_machines(made, values)


def _drop_validation(made: Imported, values: Values) -> None:
    """Leave out the period of validations without data: the data sets there have names that are no files."""
    if made.values.get("validation", {}).pop("every", None) is not None:
        key, remark = "grpo.val_period", "without data.validation: add a file, and set the period by hand"
        made.taken[:] = [report for report in made.taken if report.key != key]
        made.left_out.append(KeyReport(key, first_of(values, key), "validation.every", remark))


def _add_advantage(made: Imported, values: Values) -> None:
    name = first_of(values, "grpo.adv_estimator.name", default="grpo")
    scaled, left_out = (
        first_of(values, f"grpo.adv_estimator.{key}", f"grpo.{key}") is True
        for key in ("normalize_rewards", "use_leave_one_out_baseline")
    )
    baseline = first_of(values, "grpo.adv_estimator.minus_baseline") is True
    advantage = {
        "grpo": "grpo" if scaled else "rloo" if left_out else "dr_grpo",
        "reinforce_plus_plus": "reinforce_plus_plus_baseline" if baseline else "reinforce_plus_plus",
        "gae": "gae",
    }.get(name)
    if advantage is None:
        made.left_out.append(KeyReport("grpo.adv_estimator.name", name, "algorithm.advantage", "set it by hand"))
        return
    made.set("algorithm.advantage", advantage)
    exact = name != "grpo" or not (scaled and left_out)
    remark = "" if exact else "baseline and standard deviation leave out the sample itself there, and include it here"
    report = KeyReport("grpo.adv_estimator.name", name, f"algorithm.advantage={advantage}", remark)
    (made.taken if exact else made.changed).append(report)


def _add_lengths(made: Imported, values: Values) -> None:
    """Add the lengths of prompt and response: there, one limit holds for both together."""
    total, prompt = count_of(values, "policy.max_total_sequence_length"), count_of(values, "data.max_input_seq_length")
    new = count_of(values, "policy.generation.max_new_tokens", default=total)
    if total and prompt and prompt < total:
        made.set("rollout.max_prompt_tokens", prompt)
        made.set("rollout.max_response_tokens", min(new or total, total - prompt))
        shown = f"rollout.max_prompt_tokens={prompt}, rollout.max_response_tokens={min(new or total, total - prompt)}"
        made.changed.append(KeyReport("policy.max_total_sequence_length", total, shown, "the rest after the prompt"))
    else:
        remark = "a limit of prompt and response together: set rollout.max_prompt_tokens and max_response_tokens"
        made.left_out.append(KeyReport("policy.max_total_sequence_length", total, "", remark))
    samples = count_of(values, "policy.train_micro_batch_size", default=1)
    if tokens := product(samples, total):
        made.set("actor.max_tokens_per_device", tokens)
        shown, remark = f"actor.max_tokens_per_device={tokens}", f"{samples} samples of up to {total} tokens"
        made.changed.append(KeyReport("policy.train_micro_batch_size", samples, shown, remark))


def _add_machines(made: Imported, values: Values) -> None:
    nodes, here = (count_of(values, f"cluster.{key}", default=1) or 1 for key in ("num_nodes", "gpus_per_node"))
    resources = "policy.generation.colocated.resources"
    engines = None
    if first_of(values, "policy.generation.colocated.enabled") is False:
        own = count_of(values, f"{resources}.num_nodes")
        engines = own * here if own else count_of(values, f"{resources}.gpus_per_node")
        nodes -= own or 0
    roles = dict.fromkeys(["actor", *["critic"] * (made.values.get("algorithm", {}).get("advantage") == "gae")], "")
    set_machines(made, nodes, here, engines, roles)
    pools = made.values["placement"]["pools"]
    if engines and nodes == 1 and not own:  # both on one node
        pools["trainers"] = here - engines
        made.set("cluster.nodes", 1, again=True)
    made.taken.append(KeyReport("cluster.num_nodes, cluster.gpus_per_node", "", f"placement.pools={pools}"))


def _batch(values: Values) -> Batch:
    prompts, n = count_of(values, "grpo.num_prompts_per_step"), count_of(values, "grpo.num_generations_per_prompt")
    samples, per_update = product(prompts, n), count_of(values, "policy.train_global_batch_size")
    updates = samples // per_update if samples and per_update else None
    return {PROMPTS: prompts, SAMPLES: samples, PER_UPDATE: per_update, UPDATES: updates, EPOCHS: 1}


NEMO_RL = Peer("NeMo-RL", _name_for, _reason_for, _switched_off, _finish, _batch)
