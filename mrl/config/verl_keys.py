"""Answers to verl's keys in a configuration: mrl's key with its value, or the reason why mrl has none.

docs/coming-from-verl.md explains each key in more detail.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mrl.config import verl_values as to
from mrl.config.algorithm import AGGREGATIONS, KL_ESTIMATORS, POLICY_LOSSES
from mrl.config.values import UNUSABLE, KeyPath
from mrl.config.verl_values import Convert, Values, among, name_alone, same, zero_if_negative

_DECAYS = ("constant", "linear", "cosine")
NAMES: Mapping[str, tuple[str, Convert]] = {
    # data
    "train_files": ("data.train.NAME.dataset", same),
    "val_files": ("data.validation.NAME.dataset", same),
    "prompt_key": ("data.train.NAME.columns.prompt", same),
    "reward_fn_key": ("data.train.NAME.columns.data_source", same),
    "max_prompt_length": ("rollout.max_prompt_tokens", same),
    "max_response_length": ("rollout.max_response_tokens", same),
    "max_obs_length": ("agent.environments.NAME.max_observation_tokens", same),
    "train_batch_size": ("batch.prompts_per_step", same),
    "filter_overlong_prompts": ("data.overlong", to.overlong),
    "truncation": ("data.overlong", to.overlong),
    **dict.fromkeys(("data.shuffle", "shuffle_train_dataloader"), ("data.shuffle", same)),
    "custom_cls.path": ("data.train.NAME.dataset", name_alone),
    "custom_cls.name": ("data.train.NAME.dataset", name_alone),
    "apply_chat_template_kwargs": ("data.template", name_alone),
    "custom_chat_template": ("data.template_file", name_alone),
    # models and their training
    "actor_rollout_ref.model.path": ("model.path", same),
    "critic.model.path": ("model.critic", same),
    "reward_model.model.path": ("reward_model.path", same),
    "reward_model.enable": ("reward_model", to.optional_section),
    "enable_gradient_checkpointing": ("ROLE.megatron.recompute_granularity", to.recompute),
    "activations_checkpoint_granularity": ("ROLE.megatron.recompute_granularity", same),
    "activations_checkpoint_method": ("ROLE.megatron.recompute_method", same),
    "activations_checkpoint_num_layers": ("ROLE.megatron.recompute_num_layers", same),
    "ppo_mini_batch_size": ("batch.samples_per_update", to.samples_per_update),
    "ppo_epochs": ("batch.epochs_per_step", same),
    "ref.log_prob_max_token_len_per_gpu": ("ROLE.max_tokens_per_device", same),
    "ppo_max_token_len_per_gpu": ("ROLE.max_tokens_per_device", same),
    **dict.fromkeys(("lora_rank", "lora.rank"), ("ROLE.lora.rank", to.lora_rank)),
    **dict.fromkeys(("lora_alpha", "lora.alpha"), ("ROLE.lora.alpha", same)),
    "target_modules": ("ROLE.lora.targets", to.lora_targets),
    "lora_adapter_path": ("ROLE.lora.path", same),
    "lr": ("ROLE.optimizer.lr", same),
    "weight_decay": ("ROLE.optimizer.weight_decay", same),
    "grad_clip": ("ROLE.optimizer.clip_grad", same),
    "clip_grad": ("ROLE.optimizer.clip_grad", same),
    "lr_warmup_steps": ("ROLE.schedule.warmup_steps", to.warmup_updates),
    "lr_warmup_steps_ratio": ("ROLE.schedule.warmup_steps", to.warmup_share),
    "lr_decay_steps": ("ROLE.schedule.decay_steps", to.decay_updates),
    "optim.total_training_steps": ("ROLE.schedule.decay_steps", to.decay_updates),
    "warmup_style": ("ROLE.schedule.decay", among(_DECAYS)),
    "lr_scheduler_type": ("ROLE.schedule.decay", among(_DECAYS)),
    "lr_decay_style": ("ROLE.schedule.decay", among(_DECAYS)),
    "min_lr_ratio": ("ROLE.schedule.min_lr_ratio", to.default(0.0)),
    "min_lr": ("ROLE.schedule.min_lr_ratio", name_alone),
    "tensor_model_parallel_size": ("ROLE.parallel.tp", same),
    "pipeline_model_parallel_size": ("ROLE.parallel.pp", same),
    "virtual_pipeline_model_parallel_size": ("ROLE.parallel.vpp", to.default(1)),
    "context_parallel_size": ("ROLE.parallel.cp", same),
    "ulysses_sequence_parallel_size": ("ROLE.parallel.cp", same),
    "expert_model_parallel_size": ("ROLE.parallel.ep", same),
    "expert_tensor_parallel_size": ("ROLE.parallel.etp", same),
    "sequence_parallel": ("ROLE.parallel.sequence_parallel", to.sequence_parallel),
    "megatron.dtype": ("ROLE.dtype", same),
    "param_offload": ("sync.offload", to.one_switch),
    "grad_offload": ("sync.offload", to.one_switch),
    "optimizer_offload": ("sync.offload", to.one_switch),
    "free_cache_engine": ("sync.offload", to.one_switch),
    "megatron.seed": ("training.seed", same),
    # algorithm
    "adv_estimator": ("algorithm.advantage", to.advantage),
    "algorithm.gamma": ("algorithm.gamma", same),
    "algorithm.lam": ("algorithm.lam", same),
    "norm_adv_by_std_in_grpo": ("algorithm.advantage", to.grpo_by_std),
    "clip_ratio": ("algorithm.loss.clip_low, algorithm.loss.clip_high", same),
    "clip_ratio_low": ("algorithm.loss.clip_low", same),
    "clip_ratio_high": ("algorithm.loss.clip_high", same),
    "clip_ratio_c": ("algorithm.loss.dual_clip", same),
    "cliprange_value": ("algorithm.loss.value_clip", same),
    "loss_mode": ("algorithm.loss.policy", among(POLICY_LOSSES)),
    "tau_pos": ("algorithm.loss.tau_pos", to.of_loss("sapo")),
    "tau_neg": ("algorithm.loss.tau_neg", to.of_loss("sapo")),
    "clip_cov_ratio": ("algorithm.loss.cov_share", to.of_loss("clip_cov")),
    "clip_cov_lb": ("algorithm.loss.cov_low", to.of_loss("clip_cov")),
    "clip_cov_ub": ("algorithm.loss.cov_high", to.of_loss("clip_cov")),
    "kl_cov_ratio": ("algorithm.loss.cov_share", to.of_loss("kl_cov")),
    "dro_beta": ("algorithm.loss.dro_beta", to.of_loss("dro")),
    "ppo_kl_coef": ("algorithm.loss.cov_kl_coef", to.of_loss("kl_cov")),
    "loss_agg_mode": ("algorithm.loss.aggregation", among(AGGREGATIONS)),
    "loss_scale_factor": ("algorithm.loss.horizon_tokens", same),
    "entropy_coeff": ("algorithm.loss.entropy_coef", same),
    "use_kl_in_reward": ("algorithm.kl.where", to.kl_where),
    "use_kl_loss": ("algorithm.kl.where", to.kl_where),
    "kl_coef": ("algorithm.kl.coef", to.kl_coef("use_kl_in_reward", "kl_loss_coef")),
    "kl_loss_coef": ("algorithm.kl.coef", to.kl_coef("use_kl_loss", "algorithm.kl_ctrl.kl_coef")),
    "kl_penalty": ("algorithm.kl.in_reward", among(KL_ESTIMATORS)),
    "kl_loss_type": ("algorithm.kl.in_loss", among(KL_ESTIMATORS)),
    "kl_ctrl.type": ("algorithm.kl.target", to.kl_target),
    "target_kl": ("algorithm.kl.target", to.kl_target),
    "kl_ctrl.horizon": ("algorithm.kl.horizon_samples", to.if_adaptive),
    "max_num_gen_batches": ("algorithm.dynamic_sampling.most_rounds", same),
    **{
        f"{section}.{key}": (f"algorithm.overlong.{name}", same)
        for section in ("overlong_buffer", "overlong_buffer_cfg")
        for key, name in (("len", "buffer_tokens"), ("penalty_factor", "factor"))
    },
    "router_replay.mode": ("algorithm.router_replay", among(("R2", "R3"), disabled="none")),
    "bypass_mode": ("algorithm.old_log_probs", to.bypass),
    "rollout_is": ("algorithm.correction.level", same),
    "rollout_is_threshold": ("algorithm.correction.upper", same),
    # rollout and validation
    "rollout.name": ("rollout.engine", among(("vllm", "transformers"), hf="transformers")),
    "n": ("batch.samples_per_prompt", same),
    "n_agent": ("batch.samples_per_prompt", same),
    "rollout.temperature": ("rollout.temperature", same),
    "rollout.top_p": ("rollout.top_p", same),
    "rollout.top_k": ("rollout.top_k", zero_if_negative),
    "prompt_length": ("rollout.max_prompt_tokens", same),
    "response_length": ("rollout.max_response_tokens", same),
    "rollout.tensor_model_parallel_size": ("rollout.tp", same),
    "rollout.ignore_eos": ("rollout.ignore_eos", same),
    **{
        name: (f"rollout.vllm.{name}", same)
        for name in ("gpu_memory_utilization", "enforce_eager", "max_num_seqs", "max_num_batched_tokens")
    },
    "val_kwargs.n": ("validation.samples_per_prompt", same),
    "val_kwargs.temperature": ("validation.temperature", to.sampled_at),
    "val_kwargs.top_p": ("validation.top_p", to.sampled_at),
    "val_kwargs.top_k": ("validation.top_k", zero_if_negative),
    "val_kwargs.do_sample": ("validation.greedy", to.greedy),
    "multi_turn": ("agent.environments", name_alone),
    "multi_turn.enable": ("agent.environments", to.optional_section),
    "multi_turn.max_turns": ("agent.environments.NAME.max_turns", same),
    "multi_turn.tool_config_path": ("agent.environments.NAME.tools", name_alone),
    "multi_turn.format": ("agent.environments.NAME.format", name_alone),
    "max_turns": ("agent.environments.NAME.max_turns", to.search_turns),
    "do_search": ("agent.environments.NAME.name=search_r1", name_alone),
    "retriever.url": ("agent.environments.NAME.options.url", same),
    "retriever.topk": ("agent.environments.NAME.options.topk", same),
    "test_freq": ("validation.every", zero_if_negative),
    "val_before_train": ("validation.first", same),
    "log_val_generations": ("validation.save_samples", name_alone),
    "validation_data_dir": ("validation.save_samples", to.is_set),
    "rollout_data_dir": ("training.samples_every", to.samples_every),
    # rewards and the run
    "custom_reward_function.path": ("reward.functions.NAME.name", name_alone),
    "custom_reward_function.name": ("reward.functions.NAME.name", name_alone),
    "reward_manager": ("reward.manager", name_alone),
    "total_training_steps": ("training.steps", same),
    "experiment_name": ("run.name", same),
    "default_local_dir": ("run.dir", same),
    "logger": ("training.trackers", to.trackers),
    "nnodes": ("cluster.nodes", same),
    "n_gpus_per_node": ("cluster.devices_per_node", same),
    "save_freq": ("training.save_every", zero_if_negative),
    "critic_warmup": ("training.critic_warmup_steps", same),
    "resume_mode": ("training.resume", among(("auto", "never"), disable="never")),
    "max_actor_ckpt_to_keep": ("training.keep", same),
    "max_critic_ckpt_to_keep": ("training.keep", same),
    "ray_wait_register_center_timeout": ("deadlines.start_s", same),
}
"""Last parts of verl's key -> mrl's key and the conversion of its value. The longest match applies. ROLE is the role
that verl's key configures."""

_MICRO = "micro-batches follow from max_tokens_per_device of each role"
_TEXT = "mrl trains only on text"
_FSDP = "Megatron trains every role unless ROLE.strategy is fsdp: see docs/fsdp.md"
_PACKED = "rows are always packed, without padding"
_SEEDS = "training.seed decides the order of samples"
_CODE = "code in a model's repository is never imported; add a model family instead (docs/extend.md)"
_CHECKPOINT = "a checkpoint always holds everything, as safetensors that any layout reads"
_SERVED = "engines always take requests one by one, and return each sample as soon as it is finished"
_WRITTEN = "training always uses only tokens that the model wrote, regardless of tags"
REASONS: Mapping[str, str] = {
    "enable_chunked_prefill": "vLLM decides it on GPUs",
    "data.tokenizer": "the tokenizer is the model's",
    "tokenizer_path": "the tokenizer is the model's",
    "input_tokenizer": "a reward model with another tokenizer than the policy gets the text",
    "val_batch_size": "all prompts of a validation go to the engines at once",
    "train_data_num": "a source is read whole; make a smaller file",
    "val_data_num": "a source is read whole; make a smaller file",
    "max_start_length": "the first prompt is bounded by rollout.max_prompt_tokens",
    "return_raw_input_ids": "rewards and reward models get what they need",
    "return_raw_chat": "environments always get the messages",
    "filter_overlong_prompts_workers": "prompts are encoded when they are drawn",
    "image_key": _TEXT,
    "video_key": _TEXT,
    "hybrid_engine": "engines share the actor's devices unless placement.roles gives `rollout` a pool",
    "external_lib": _CODE,
    "trust_remote_code": _CODE,
    "override_config.*": "the model follows its config.json",
    "use_remove_padding": _PACKED,
    "return_last_hidden_state": "no caller needs hidden states of the policy",
    **dict.fromkeys(
        (
            *("use_liger", "use_fused_loss", "use_fused_kernels"),
            *("entropy_checkpointing", "entropy_from_logits_with_chunking"),
        ),
        "the head and its loss are always fused",
    ),
    "model.lora.dropout": "log-probs would not be those of the policy that the engine samples from",
    "model.lora.type": "each Hugging Face module has its own pair of adapters",
    "exclude_modules": "actor.lora.targets lists the modules that have adapters",
    "strategy": _FSDP,
    "fsdp_config.*": _FSDP,
    "use_torch_compile": "Megatron's own fused kernels are used",
    **dict.fromkeys(
        (
            *("ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu", "use_dynamic_bsz"),
            *("micro_batch_size", "micro_batch_size_per_gpu"),
            *("forward_micro_batch_size", "forward_micro_batch_size_per_gpu", "forward_max_token_len_per_gpu"),
            *("log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu"),
            *("log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu"),
        ),
        _MICRO,
    ),
    "data_loader_seed": _SEEDS,
    "actor.shuffle": "the samples of a step are shuffled if there are several updates",
    "critic.shuffle": "the samples of a step are shuffled if there are several updates",
    "checkpoint.*": _CHECKPOINT,
    "load_weight": "weights are always loaded",
    **dict.fromkeys(
        ("profile.*", "profiler.*", "global_profiler.*"),
        "`mrl profile` and training.profile trace whole steps over all processes: docs/profile.md",
    ),
    "use_distributed_optimizer": "the optimizer is always distributed",
    "use_dist_checkpointing": _CHECKPOINT,
    "dist_checkpointing_path": _CHECKPOINT,
    **dict.fromkeys(("use_mbridge", "vanilla_mbridge"), "models are read from their Hugging Face files in one way"),
    "disable_mm_preprocessor_cache": _TEXT,
    "nccl_timeout": "deadlines.call_s limits every call",
    "calculate_log_probs": "engines always return the log-probs of their samples",
    "use_legacy_worker_impl": "each role has one worker class: ROLE.worker",
    **dict.fromkeys(
        ("layered_summon", "update_weights_bucket_megabytes"), "weights travel in parts: sync.bucket_bytes"
    ),
    **dict.fromkeys(("sync_actor", "sync_actor_alpha", "sync_steps"), "the reference model never changes"),
    "rollout.mode": _SERVED,
    "chat_scheduler": _SERVED,
    "use_fire_sampling": "the sampled distribution must be the trained one",
    "rollout.do_sample": "training always samples; validation.greedy does not",
    "rollout.dtype": "engines use actor.dtype",
    "load_format": "engines get their weights from the actor",
    "max_model_len": "it is rollout.max_prompt_tokens plus rollout.max_response_tokens",
    "disable_log_stats": "mrl sets it",
    "swap_space": "this vLLM has no swap space",
    "layer_name_map.*": "each model family has a table of its tensors",
    "rollout_n": "batch.samples_per_prompt applies to every role",
    "max_length": "a reward model always sees whole samples",
    **dict.fromkeys(
        ("launch_reward_fn_async", "use_reward_loop"), "rewards always run while other samples are generated"
    ),
    "num_examine": "samples are written to files: training.samples_every",
    "balance_batch": "rows are always distributed over ranks by their work",
    "total_epochs": "training.steps counts steps, and prompts start over after all were drawn",
    "project_name": "trackers read WANDB_PROJECT and the like from the environment",
    "default_hdfs_dir": "run.dir is a directory that every node can see",
    "resume_from_path": "run.dir and run.name determine which run continues",
    "del_local_ckpt_after_load": "training.keep determines how many checkpoints are kept",
    "max_ref_ckpt_to_keep": "the reference model is never saved",
    "val_only": "`mrl eval CONFIG` validates without training",
    "ray_init.*": "cluster.devices_per_node sets the slots of a CPU machine",
    "state_masking": _WRITTEN,
    "state_masking.*": _WRITTEN,
    "no_think_rl": "the format of an environment defines a turn",
    "reranker.*": "a retriever may rerank behind its own address",
}
"""Last parts of verl's key, or a section of it with `.*` -> reason why mrl has no such key."""
_LIBRARIES = {
    "override_transformer_config": "ROLE.megatron",
    "override_ddp_config": "ROLE.ddp",
    "override_optimizer_config": "ROLE.optimizer",
    "engine_kwargs": "rollout.vllm",
}
"""Sections of verl whose keys are a library's own -> the section with the same keys in mrl."""
_ROLES = {"actor_rollout_ref": "actor", "actor": "actor", "critic": "critic", "reward_model": "reward_model"}


def name_for(path: KeyPath) -> tuple[str, Convert] | None:
    """Return mrl's key for verl's key and the conversion of its value, or None if mrl has no such key."""
    role = "reference" if _is_reference(path) else _ROLES.get(path[0], "")
    key = next((key for key in _endings(path) if key in NAMES or key in REASONS), "")
    section = next((part for part in reversed(path[:-1]) if part in _LIBRARIES), None)
    if key in NAMES:
        name, convert = NAMES[key]
    elif section is not None and key not in REASONS:
        name, convert = f"{_LIBRARIES[section]}.{path[-1]}", same
    else:
        return None
    return None if "ROLE" in name and not role else (name.replace("ROLE", role), convert)


def reason_for(path: KeyPath) -> str | None:
    """Return why mrl has no equivalent of verl's key. Return None if it has one, or if verl has no such key."""
    key = next((key for key in _endings(path) if key in NAMES or key in REASONS), "")
    reason = REASONS.get(key)
    return None if reason is None else reason.replace("ROLE", _ROLES.get(path[0], "actor"))


def answer(path: KeyPath, value: Any, values: Values) -> str:
    """Return the full answer to a key of verl, or an empty string if it is not verl's."""
    if (match := name_for(path)) is not None:
        name, convert = match
        text = "" if value is UNUSABLE else convert(value, values)
        if name.startswith("reference."):
            text += ", which defaults to the actor's unless placement.roles.reference has a pool"
        names = name.split(", ")
        return f"verl's; here it is {', '.join(key + text for key in names) if text.startswith('=') else name + text}"
    reason = reason_for(path)
    return f"verl's; mrl has none: {reason}" if reason else ""


def _is_reference(path: KeyPath) -> bool:
    return path[:2] == ("actor_rollout_ref", "ref")


def _endings(path: KeyPath) -> Iterator[str]:
    """Yield the table entries that may match a key, most specific first."""
    for start in range(len(path)):
        yield ".".join(path[start:])
    for part in reversed(path):
        yield f"{part}.*"
