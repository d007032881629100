"""verl's functions on the cases of `benchmarks/algorithms.py`. Runs in verl's own environment.

python verl_algorithms.py CASES.npz RESULTS.npz
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from answers import answer
from verl.trainer.ppo import core_algos as algos
from verl.trainer.ppo import rollout_corr_helper as correction
from verl.utils import torch_functional
from verl.workers.config import ActorConfig, PolicyLossConfig

Outputs = dict[str, Any]


METRICS = dict.fromkeys(("vanilla", "geo_mean"), ("pg_clipfrac", "ppo_kl", "pg_clipfrac_lower")) | {"kl_cov": ()}
"""Metrics of losses that are not those of most. In mrl, `ppo_kl` of KL-Cov has a sign."""


def actor(case: dict[str, Any], **changes: Any) -> ActorConfig:
    own = {"clip_ratio_low": case["clip_low"], "clip_ratio_high": case["clip_high"], "clip_ratio_c": case["dual_clip"]}
    return ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **(own | changes))


def policy(name: str, mode: str, clip: str = "", weights: bool = False, old: str = "old", **changes: Any) -> Any:
    def run(case: dict[str, Any]) -> Outputs:
        bounds = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2} if clip == "equal" else {}
        log_probs = case["log_probs"].clone().requires_grad_()
        loss, metrics = algos.get_policy_loss_fn(name)(
            old_log_prob=case[old],
            log_prob=log_probs,
            advantages=case["advantages"],
            response_mask=case["mask"],
            loss_agg_mode=mode,
            config=actor(case, **bounds, **changes),
            rollout_is_weights=case["weights"] if weights else None,
        )
        loss.backward()
        if name == "clip_cov":  # verl drops no token that PPO clips, whose loss is not 0, but its gradient is
            return {"gradient": log_probs.grad}
        found = {"loss": loss, "gradient": log_probs.grad}
        for key in METRICS.get(name, ("pg_clipfrac", "ppo_kl")):
            if f"actor/{key}" in metrics:
                found[key] = metrics[f"actor/{key}"]
        return found

    return run


def kl(name: str) -> Any:
    def run(case: dict[str, Any]) -> Outputs:
        log_probs = case["log_probs"].clone().requires_grad_()
        value = algos.kl_penalty(log_probs, case["ref"], name)
        (value * case["mask"]).sum().backward()
        return {"value": value * case["mask"], "gradient": log_probs.grad}

    return run


def aggregated(mode: str) -> Any:
    return lambda case: {"loss": algos.agg_loss(case["values"], case["mask"], mode, loss_scale_factor=case["horizon"])}


def outcome(function: Any, **settings: Any) -> Any:
    def run(case: dict[str, Any]) -> Outputs:
        rewards = case["scores_on_last"].clone()
        found, _ = function(
            token_level_rewards=rewards,
            response_mask=case["mask"],
            index=np.array(case["uids"], dtype=object),
            **settings,
        )
        return {"advantages": found * case["mask"]}

    return run


def gdpo(case: dict[str, Any]) -> Outputs:
    attention = torch.cat([torch.ones(len(case["uids"]), 1), case["inside"]], 1).long()
    found, _ = algos.compute_gdpo_outcome_advantage(
        token_level_rewards=case["scores_on_last"],
        response_mask=case["mask"],
        index=np.array(case["uids"], dtype=object),
        config={"gdpo_reward_keys": ["scores", "more_scores"], "gdpo_reward_weights": [0.75, -0.25]},
        non_tensor_batch={name: case[name].numpy() for name in ("scores", "more_scores")},
        batch={"prompts": attention[:, :1], "attention_mask": attention},
    )
    return {"advantages": found * case["mask"]}


def optimal_token_baseline(case: dict[str, Any]) -> Outputs:
    found, _ = algos.compute_multi_turn_optimal_token_baseline_advantage(
        token_level_rewards=case["rewards"],
        response_mask=case["mask"],
        index=np.array(case["uids"], dtype=object),
        old_log_probs=case["drawn"],
        sum_pi_squared=case["sum_squared"],
        handle_zero_tail=False,
    )
    return {"advantages": found * case["mask"]}


def gae(case: dict[str, Any]) -> Outputs:
    found, returns = algos.compute_gae_advantage_return(
        case["rewards"], case["values"], case["mask"], case["gamma"], case["lam"]
    )
    return {"advantages": found * case["mask"], "returns": returns * case["mask"]}


def reinforce_plus_plus(case: dict[str, Any]) -> Outputs:
    found, returns = algos.compute_reinforce_plus_plus_outcome_advantage(
        case["rewards"], case["mask"], config=SimpleNamespace(gamma=case["gamma"])
    )
    return {"advantages": found, "returns": returns}


def remax(case: dict[str, Any]) -> Outputs:
    found, returns = algos.compute_remax_outcome_advantage(case["rewards"], case["baselines"], case["mask"])
    return {"advantages": found * case["mask"], "returns": returns * case["mask"]}


def value_loss(case: dict[str, Any]) -> Outputs:
    values = case["values"].clone().requires_grad_()
    loss, clipped = algos.compute_value_loss(values, case["returns"], case["old_values"], case["mask"], 0.3)
    loss.backward()
    return {"loss": loss, "gradient": values.grad, "vf_clipfrac": clipped}


def entropy(case: dict[str, Any]) -> Outputs:
    return {"loss": algos.compute_entropy_loss(case["logits"], case["mask"])}


def adaptive_kl(case: dict[str, Any]) -> Outputs:
    controller = algos.AdaptiveKLController(0.2, target_kl=0.5, horizon=100)
    coefficients = []
    for measured in case["values"].abs().flatten()[:5].tolist():
        controller.update(measured, 16)
        coefficients.append(controller.value)
    return {"coef": coefficients}


def importance(level: str, threshold: Any) -> Any:
    def run(case: dict[str, Any]) -> Outputs:
        weights, metrics = correction.compute_rollout_correction_weights(
            case["log_probs"] - case["rollout"], case["mask"], level, threshold
        )
        return {
            "weights": weights,
            "rollout_is_mean": metrics["rollout_is_mean"],
            "rollout_is_eff_sample_size": metrics["rollout_is_eff_sample_size"],
        }

    return run


def geometric_rejection(case: dict[str, Any]) -> Outputs:
    # verl's bounds are on pi_rollout / pi_train, the inverse of an importance ratio.
    kept, _ = correction.compute_rollout_rejection_mask(
        case["log_probs"] - case["rollout"], case["mask"], "seq_mean_k1", f"{1 / 1.5}_{1 / 0.5}"
    )
    return {"kept": kept}


def rejection(statistic: str, threshold: str) -> Any:
    def run(case: dict[str, Any]) -> Outputs:
        log_ratio = case["log_probs"] - case["rollout"]
        kept, metrics = correction.compute_rollout_rejection_mask(log_ratio, case["mask"], statistic, threshold)
        names = ("rollout_rs_masked_fraction",)
        return {"kept": kept, **{name: metrics[name] for name in names}}

    return run


def mismatch(case: dict[str, Any]) -> Outputs:
    return correction.compute_offpolicy_metrics(case["log_probs"], case["rollout"], case["mask"])


FUNCTIONS = {
    **{f"kl {name}": kl(name) for name in ("k1", "abs", "k2", "k3", "k1+", "abs+", "k3+")},
    **{
        f"aggregate {mode}": aggregated(mode)
        for mode in ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
    },
    "advantage gae": gae,
    "advantage grpo": outcome(algos.compute_grpo_outcome_advantage),
    "advantage grpo (vectorized)": outcome(algos.compute_grpo_vectorized_outcome_advantage),
    "advantage dr_grpo": outcome(algos.compute_grpo_outcome_advantage, norm_adv_by_std_in_grpo=False),
    "advantage rloo": outcome(algos.compute_rloo_outcome_advantage),
    "advantage rloo (vectorized)": outcome(algos.compute_rloo_vectorized_outcome_advantage),
    "advantage opo": outcome(algos.compute_opo_outcome_advantage),
    "advantage gpg": outcome(algos.compute_gpg_outcome_advantage),
    "advantage grpo_passk": outcome(algos.compute_grpo_passk_outcome_advantage, config={}),
    "advantage gdpo": gdpo,
    "advantage optimal_token_baseline": optimal_token_baseline,
    "advantage reinforce_plus_plus": reinforce_plus_plus,
    "advantage reinforce_plus_plus_baseline": outcome(algos.compute_reinforce_plus_plus_baseline_outcome_advantage),
    "advantage remax": remax,
    "policy ppo": policy("vanilla", "token-mean", "equal"),
    "policy ppo (clip-higher)": policy("vanilla", "seq-mean-token-sum"),
    "policy ppo (rollout weights)": policy("vanilla", "token-mean", weights=True),
    "policy gspo": policy("gspo", "seq-mean-token-mean"),
    "policy cispo": policy("cispo", "token-mean"),
    "policy gmpo": policy("geo_mean", "token-mean"),
    "policy gpg": policy("gpg", "seq-mean-token-mean"),
    "policy sapo": policy("sapo", "seq-mean-token-mean", tau_pos=1.0, tau_neg=1.25),
    "policy dppo_tv": policy("dppo_tv", "token-mean", old="old_below", clip_ratio_c=20.0),
    "policy dppo_kl": policy("dppo_kl", "token-mean", old="old_below", clip_ratio_c=20.0),
    "policy dro": policy("dro", "token-mean", policy_loss=PolicyLossConfig(dro_beta=0.05)),
    "policy clip_cov": policy(
        *("clip_cov", "token-mean"),
        old="old_near",
        policy_loss=PolicyLossConfig(clip_cov_ratio=1.0, clip_cov_lb=0.1, clip_cov_ub=5.0),
    ),
    "policy kl_cov": policy(
        *("kl_cov", "token-mean"),
        old="old_near",
        policy_loss=PolicyLossConfig(kl_cov_ratio=0.3, ppo_kl_coef=0.5),
    ),
    "value loss": value_loss,
    "entropy bonus": entropy,
    "adaptive kl": adaptive_kl,
    "kl in reward": lambda case: {
        "rewards": algos.compute_rewards(case["rewards"], case["old"], case["ref"], 0.3) * case["mask"]
    },
    "whitening": lambda case: {"values": torch_functional.masked_whiten(case["values"], case["mask"]) * case["mask"]},
    "importance token truncate": importance("token", 2.0),
    "importance sequence truncate": importance("sequence", 2.0),
    "importance token mask": importance("token", "0.5_1.5"),
    "importance sequence mask": importance("sequence", "0.5_1.5"),
    "importance geometric mask": geometric_rejection,
    # verl's bounds of k1 are on pi_rollout / pi_train, the inverse of an importance ratio.
    "rejection token_k1": rejection("token_k1", f"{1 / 1.5}_{1 / 0.5}"),
    "rejection seq_sum_k1": rejection("seq_sum_k1", "1.5"),
    "rejection seq_mean_k3": rejection("seq_mean_k3", "0.05"),
    "rejection seq_max_k2": rejection("seq_max_k2", "0.1"),
    "mismatch metrics": mismatch,
}


if __name__ == "__main__":
    answer(FUNCTIONS, *sys.argv[1:])
