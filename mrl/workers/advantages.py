"""Advantages of a shard: token rewards, KL penalty, the estimator (which may use the whole batch), and metrics."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mrl.algos.advantages import (
    VARIANCE_FLOOR,
    AdvantageInputs,
    apply_kl_penalty,
    estimate_advantages,
    kl_penalized_scores,
    scores_to_token_rewards,
)
from mrl.algos.groups import Outcomes
from mrl.algos.kl import mean_row_kl, token_kl
from mrl.algos.rows import Reduce, Rows, apply_mask
from mrl.config.algorithm import REFERENCE_ADVANTAGES, AlgorithmConfig
from mrl.protocol import DataProto
from mrl.protocol.columns import jagged
from mrl.workers.messages import WholeBatch
from mrl.workers.model_worker import optional_values, response_mask


def shard_advantages(
    batch: DataProto, whole: WholeBatch, config: AlgorithmConfig, sum_over_shards: Reduce, max_over_shards: Reduce
) -> DataProto:
    """Return the shard's advantages, and the returns if the estimator has any.

    The metrics cover all shards, including the mean KL to the reference (0 without a penalty).
    """
    rows, mask_T = Rows.of(torch.from_numpy(batch.lengths("responses").copy())), response_mask(batch)
    columns = optional_values(batch, "values", "old_log_probs", "ref_log_probs", "score_norms")
    scores_B, position_B = batch["scores"], batch["position"]
    assert isinstance(scores_B, torch.Tensor), "`scores` has one number per row"
    rewards_T, kl = scores_to_token_rewards(scores_B, rows, mask_T), 0.0
    if config.kl.where in ("reward", "both"):
        kl_T = token_kl(config.kl.in_reward, columns["old_log_probs"], columns["ref_log_probs"], mask_T)
        rewards_T = apply_kl_penalty(rewards_T, kl_T, mask_T, whole.kl_coef)
        scores_B = kl_penalized_scores(scores_B, kl_T, rows, mask_T, whole.kl_coef)
        kl = mean_row_kl(kl_T, rows, mask_T, sum_over_shards)
    sample_B = torch.tensor(whole.sample_of_row)[position_B]
    row_values = [scores_B.double(), rows.count(mask_T).double(), torch.ones_like(scores_B).double()]
    if config.advantage in REFERENCE_ADVANTAGES:
        ratio_T = columns["old_log_probs"].double() - columns["ref_log_probs"].double()
        row_values.append(rows.sum(apply_mask(ratio_T, mask_T)))
    sums = torch.zeros(len(row_values), len(whole.uids), dtype=torch.float64)
    sums.index_add_(1, sample_B, torch.stack(row_values))
    scores_S, num_tokens_S, num_rows_S, *log_ratios_S = sum_over_shards(sums)
    inputs = AdvantageInputs(
        rows,
        mask_T,
        rewards_T,
        columns.get("values"),
        batch["baseline_scores"] if "baseline_scores" in batch.columns() else None,
        Outcomes(
            scores_S / num_rows_S,
            whole.uids,
            num_tokens_S,
            [(weight, torch.tensor(reward_S, dtype=torch.float64)) for weight, reward_S in whole.rewards],
            log_ratios_S[0] if log_ratios_S else None,
        ),
        sample_B,
        sum_over_shards,
        columns.get("score_norms"),
    )
    estimate = estimate_advantages(inputs, config)
    all_B = torch.ones(rows.num_rows, dtype=torch.bool)
    measured = {
        "rewards": (rows.sum(apply_mask(rewards_T, mask_T)), all_B),
        "advantages": (estimate.advantages_T, mask_T),
    }
    values_T, returns_T = columns.get("values"), estimate.returns_T
    if values_T is not None and returns_T is not None:
        measured |= {"returns": (returns_T, mask_T), "values": (values_T, mask_T)}
    figures = _distributions(measured, sum_over_shards, max_over_shards) | {**estimate.figures}
    if values_T is not None and returns_T is not None:
        figures["critic/vf_explained_var"] = _explained(returns_T, values_T, mask_T, sum_over_shards)
    estimates = {"advantages": estimate.advantages_T} | ({} if returns_T is None else {"returns": returns_T})
    columns_T = {name: jagged(column_T.float(), batch.lengths("responses")) for name, column_T in estimates.items()}
    return DataProto.from_dict(columns_T, meta_info=figures | {"reward/kl": kl}, row_ids=batch.row_ids)


def _distributions(
    measured: Mapping[str, tuple[Tensor, Tensor]], sum_over_shards: Reduce, max_over_shards: Reduce
) -> dict[str, float]:
    """Return mean, largest and smallest of each column over all shards, only over the entries that count."""
    sums, extremes = [], []
    for x, counted in measured.values():
        sums += [apply_mask(x.double(), counted).sum(), counted.sum().double()]
        extremes += [torch.where(counted, sign * x.double(), -torch.inf).max() for sign in (1, -1)]
    totals, ends = sum_over_shards(torch.stack(sums)).tolist(), max_over_shards(torch.stack(extremes)).tolist()
    figures: dict[str, float] = {}
    for number, name in enumerate(measured):
        total, count = totals[2 * number : 2 * number + 2]
        largest, smallest = ends[2 * number], -ends[2 * number + 1]
        figures |= {f"critic/{name}/mean": total / max(count, 1.0)}
        figures |= {f"critic/{name}/max": largest, f"critic/{name}/min": smallest}
    return figures


def _explained(returns_T: Tensor, values_T: Tensor, mask_T: Tensor, sum_over_shards: Reduce) -> float:
    """Return the explained variance of the critic: 1 - var(returns - values) / var(returns)."""
    columns = [apply_mask(column_T.double(), mask_T) for column_T in (returns_T, returns_T - values_T)]
    sums = [mask_T.sum().double(), *(part.sum() for column_T in columns for part in (column_T, column_T.square()))]
    count, *parts = sum_over_shards(torch.stack(sums)).tolist()
    count = max(count, 1.0)
    returns_var, errors_var = (parts[at + 1] / count - (parts[at] / count) ** 2 for at in (0, 2))
    return float(1.0 - errors_var / (returns_var + VARIANCE_FLOOR))
