"""Advantages of a shard: rewards on tokens, the KL penalty, and the estimator, which may look at the whole batch."""

from __future__ import annotations

import torch

from mrl.algos.advantages import AdvantageInputs, Advantages, estimate_advantages
from mrl.algos.groups import Outcomes
from mrl.algos.kl import mean_row_kl, token_kl
from mrl.algos.rows import Reduce, Rows
from mrl.algos.token_rewards import apply_kl_penalty, kl_penalized_scores, scores_to_token_rewards
from mrl.config.algorithm import AlgorithmConfig
from mrl.protocol import DataProto
from mrl.workers.messages import WholeBatch
from mrl.workers.model_worker import optional_values, response_mask


def shard_advantages(
    batch: DataProto, whole: WholeBatch, config: AlgorithmConfig, sum_over_shards: Reduce
) -> tuple[Advantages, float]:
    """Return the shard's advantages, and the mean KL to the reference over all shards (0 where it is not charged)."""
    rows, mask_T = Rows.of(torch.from_numpy(batch.lengths("responses").copy())), response_mask(batch)
    columns = optional_values(batch, "values", "old_log_probs", "ref_log_probs")
    scores_B, position_B = batch["scores"], batch["position"]
    assert isinstance(scores_B, torch.Tensor), "`scores` has one number per row"
    rewards_T, kl = scores_to_token_rewards(scores_B, rows, mask_T), 0.0
    if config.kl.where in ("reward", "both"):
        kl_T = token_kl(config.kl.in_reward, columns["old_log_probs"], columns["ref_log_probs"], mask_T)
        rewards_T = apply_kl_penalty(rewards_T, kl_T, mask_T, whole.kl_coef)
        scores_B = kl_penalized_scores(scores_B, kl_T, rows, mask_T, whole.kl_coef)
        kl = mean_row_kl(kl_T, rows, mask_T, sum_over_shards)
    mine = torch.zeros(2, len(whole.uids), dtype=torch.float64)
    mine[:, position_B] = torch.stack([scores_B.double(), rows.count(mask_T).double()])
    everyone = sum_over_shards(mine)
    inputs = AdvantageInputs(
        rows,
        mask_T,
        rewards_T,
        columns.get("values"),
        batch["baseline_scores"] if "baseline_scores" in batch.columns() else None,
        Outcomes(everyone[0], whole.uids, everyone[1]),
        position_B,
        sum_over_shards,
    )
    return estimate_advantages(inputs, config), kl
