"""What verl's keys are called here: whoever writes one is told the name. docs/coming-from-verl.md says more of each."""

from __future__ import annotations

from mrl.config.values import KeyPath

NAMES = {
    "adv_estimator": "algorithm.advantage",
    "clip_ratio": "algorithm.loss.clip_low, algorithm.loss.clip_high",
    "clip_ratio_c": "algorithm.loss.dual_clip",
    "clip_ratio_high": "algorithm.loss.clip_high",
    "clip_ratio_low": "algorithm.loss.clip_low",
    "cliprange_value": "algorithm.loss.value_clip",
    "context_parallel_size": "ROLE.parallel.cp",
    "critic_warmup": "training.critic_warmup_steps",
    "default_local_dir": "run.dir",
    "entropy_coeff": "algorithm.loss.entropy_coef",
    "experiment_name": "run.name",
    "expert_model_parallel_size": "ROLE.parallel.ep",
    "expert_tensor_parallel_size": "ROLE.parallel.etp",
    "filter_overlong_prompts": "data.overlong",
    "kl_coef": "algorithm.kl.coef",
    "kl_loss_coef": "algorithm.kl.coef",
    "kl_loss_type": "algorithm.kl.in_loss",
    "kl_penalty": "algorithm.kl.in_reward",
    "logger": "training.trackers",
    "loss_agg_mode": "algorithm.loss.aggregation",
    "loss_mode": "algorithm.loss.policy",
    "lr": "ROLE.optimizer.lr",
    "lr_warmup_steps": "ROLE.schedule.warmup_steps",
    "max_prompt_length": "rollout.max_prompt_tokens",
    "max_response_length": "rollout.max_response_tokens",
    "multi_turn": "agent.environments",
    "n": "batch.samples_per_prompt",
    "n_gpus_per_node": "cluster.devices_per_node",
    "nnodes": "cluster.nodes",
    "pipeline_model_parallel_size": "ROLE.parallel.pp",
    "ppo_epochs": "batch.epochs_per_step",
    "ppo_max_token_len_per_gpu": "ROLE.max_tokens_per_device",
    "ppo_mini_batch_size": "batch.samples_per_update",
    "resume_mode": "training.resume",
    "save_freq": "training.save_every",
    "target_kl": "algorithm.kl.target",
    "test_freq": "validation.every",
    "total_training_steps": "training.steps",
    "train_batch_size": "batch.prompts_per_step",
    "use_kl_in_reward": "algorithm.kl.where=reward",
    "use_kl_loss": "algorithm.kl.where=loss",
    "val_before_train": "validation.first",
    "virtual_pipeline_model_parallel_size": "ROLE.parallel.vpp",
}
"""By the last part of verl's key; ROLE is actor or critic, whichever the key is of."""


def key_for(path: KeyPath) -> str | None:
    """Return what verl's key is called here; None where it is none that has another name."""
    role = {"actor_rollout_ref": "actor", "actor": "actor", "critic": "critic"}.get(path[0])
    if path[-1] == "tensor_model_parallel_size":
        name = "rollout.tp" if "rollout" in path[:-1] else "ROLE.parallel.tp"
    else:
        name = NAMES.get(path[-1], "")
    return None if role is None and "ROLE" in name else name.replace("ROLE", role or "") or None
