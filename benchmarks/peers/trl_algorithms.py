"""TRL's losses on the cases of `benchmarks/algorithms.py`. Runs in TRL's own environment.

    python trl_algorithms.py CASES.npz RESULTS.npz

The losses are methods of trainers that want a model and a dataset; they are called on an object that has just the
attributes that they read, with the log-probs and entropies given.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from answers import answer
from trl.rewards import get_soft_overlong_punishment
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import entropy_from_logits, nanstd

Outputs = dict[str, Any]


def arguments(delta: float | None = None) -> SimpleNamespace:
    gates = {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.25}
    gammas = {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
    return SimpleNamespace(use_bias_correction_kl=False, delta=delta, steps_per_generation=1, **gates, **gammas)


def trainer(case: dict[str, Any], **changes: Any) -> SimpleNamespace:
    entropies = entropy_from_logits(case["logits"])
    log_probs = case["log_probs"].clone().requires_grad_()
    defaults: dict[str, Any] = {
        "log_probs": log_probs,
        "_get_per_token_logps_and_entropies": lambda *_, **__: (log_probs, entropies, None),
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "get_off_policy_mask": GRPOTrainer.get_off_policy_mask,
        "get_gamma_weights": GRPOTrainer.get_gamma_weights,
        "importance_sampling_level": "token",
        "beta": 0.0,
        "loss_type": "grpo",
        "epsilon_low": case["clip_low"],
        "epsilon_high": case["clip_high"],
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        "model": SimpleNamespace(training=True),
        "current_gradient_accumulation_steps": 1,
        "max_completion_length": case["horizon"],
        "_entropy_bonus_enabled": False,
        "use_adaptive_entropy": False,
        "_metrics": {"train": defaultdict(list)},
        "args": arguments(),
        "accelerator": SimpleNamespace(
            num_processes=1,
            sync_gradients=True,
            gather=lambda x: x,
            gather_for_metrics=lambda x: x,
            reduce=lambda x, reduction: x,
        ),
    }
    return SimpleNamespace(**(defaults | changes))


def loss_of(case: dict[str, Any], **changes: Any) -> Outputs:
    fake = trainer(case, **changes)
    mask = case["mask"]
    inputs = {
        "prompt_ids": torch.zeros(mask.shape[0], 1, dtype=torch.long),
        "prompt_mask": torch.ones(mask.shape[0], 1, dtype=torch.long),
        "completion_ids": torch.zeros(mask.shape, dtype=torch.long),
        "completion_mask": mask,
        "advantages": case["row_advantages"],
        "old_per_token_logps": case["old_near"],
        "ref_per_token_logps": case["ref_near"],
        "importance_sampling_ratio": None if fake.loss_type == "vespo" else case["weights"],
        "num_items_in_batch": mask.sum(),
    }
    loss = GRPOTrainer._compute_loss(fake, None, inputs)
    loss.backward()
    return {"loss": loss, "gradient": fake.log_probs.grad}


def grpo(**changes: Any) -> Any:
    return lambda case: loss_of(case, **changes)


def two_sided(case: dict[str, Any]) -> Outputs:
    return loss_of(case, args=arguments(case["dual_clip"]))


def cispo(case: dict[str, Any]) -> Outputs:
    return loss_of(case, loss_type="cispo", epsilon_high=1 + case["clip_high"])


def overlong(case: dict[str, Any]) -> Outputs:
    punish = get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)
    return {"penalty": punish([[0] * length for length in case["long_lengths"]])}


FUNCTIONS = {
    "policy ppo, loss grpo": grpo(),
    "policy ppo, loss bnpo": grpo(loss_type="bnpo"),
    "policy ppo, loss dapo": grpo(loss_type="dapo"),
    "policy ppo, loss dr_grpo": grpo(loss_type="dr_grpo"),
    "policy ppo, two-sided clip": two_sided,
    "policy ppo, kl in loss": grpo(beta=0.1),
    "policy ppo, rollout weights": grpo(use_vllm=True, vllm_importance_sampling_correction=True),
    "policy ppo, entropy bonus": grpo(loss_type="bnpo", _entropy_bonus_enabled=True, entropy_coef=0.2),
    "policy gspo, loss luspo": grpo(loss_type="luspo", importance_sampling_level="sequence"),
    "policy gspo": grpo(importance_sampling_level="sequence"),
    "policy cispo": cispo,
    "policy sapo": grpo(loss_type="sapo"),
    "policy vespo": grpo(loss_type="vespo"),
    "policy ppo, off-policy masking": grpo(off_policy_mask_threshold=0.05),
    "overlong penalty": overlong,
    "group standard deviation": lambda case: {"std": nanstd(case["scores"])},
}


if __name__ == "__main__":
    answer(FUNCTIONS, *sys.argv[1:])
