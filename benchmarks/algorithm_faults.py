"""A hundred mistakes that somebody could make in `mrl/algos/`: (file, text as it is, text with the mistake).

Each text occurs exactly once in its file. None fails on import, and each changes a number for some input.
"""

# ruff: noqa: E501  (lines of code are quoted whole)

from __future__ import annotations

FAULTS: tuple[tuple[str, str, str], ...] = (
    # rows: offsets, masks, time order
    ("rows.py", "torch.where(mask_T, x_T, torch.zeros", "torch.where(~mask_T, x_T, torch.zeros"),
    ("rows.py", "torch.where(mask_T, x_T, torch.zeros((), dtype=x_T.dtype, device=x_T.device))", "x_T * mask_T"),
    ("rows.py", "torch.promote_types(x.dtype, torch.float32)", "torch.promote_types(x.dtype, torch.bfloat16)"),
    ("rows.py", "lengths_B.cumsum(0) - lengths_B,", "lengths_B.cumsum(0),"),
    ("rows.py", "/ self.count(mask_T).clamp(min=1)", "/ self.lengths_B.clamp(min=1)"),
    ("rows.py", "/ self.count(mask_T).clamp(min=1)", "/ self.count(mask_T)"),
    ("rows.py", "self.sum(keep(x_T, mask_T)) /", "self.sum(x_T) /"),
    (
        "rows.py",
        "position_T = torch.where(mask_T, position_T, -1.0)",
        "position_T = torch.where(mask_T, position_T, 0.0)",
    ),
    ("rows.py", 'position_T, "max", lengths', 'position_T, "min", lengths'),
    (
        "rows.py",
        "later_T[: max(0, self.num_tokens - step)] = x_T[step:]",
        "later_T[step:] = x_T[: max(0, self.num_tokens - step)]",
    ),
    ("rows.py", "keep(later_T, position_T + step < ends_T)", "later_T"),
    ("rows.py", "keep(later_T, position_T + step < ends_T)", "keep(later_T, position_T + step <= ends_T)"),
    ("rows.py", "decay**step *", "decay *"),
    ("rows.py", "while step < longest:", "while 2 * step < longest:"),
    ("rows.py", "step *= 2", "step += 2"),
    # aggregate: denominators
    (
        "aggregate.py",
        "torch.stack([count_B.sum(), (count_B > 0).sum()])",
        "torch.stack([count_B.sum(), (count_B >= 0).sum()])",
    ),
    (
        "aggregate.py",
        "torch.stack([count_B.sum(), (count_B > 0).sum()])",
        "torch.stack([rows.lengths_B.sum(), (count_B > 0).sum()])",
    ),
    ("aggregate.py", "sum_over_ranks(local).tolist()", "local.tolist()"),
    (
        "aggregate.py",
        "return keep(AGGREGATIONS.resolve(self.mode)(self, rows, mask_T), mask_T)",
        "return AGGREGATIONS.resolve(self.mode)(self, rows, mask_T)",
    ),
    ("aggregate.py", "at_least_float32(keep(loss_T, mask_T))", "at_least_float32(loss_T)"),
    (
        "aggregate.py",
        "return _constant(1.0 / max(norm.totals.num_tokens, 1.0), mask_T)",
        "return _constant(1.0 / max(rows.num_tokens, 1.0), mask_T)",
    ),
    (
        "aggregate.py",
        "return _constant(1.0 / max(norm.totals.num_tokens, 1.0), mask_T)",
        "return _constant(1.0 / norm.totals.num_tokens, mask_T)",
    ),
    (
        "aggregate.py",
        "return _constant(1.0 / max(norm.totals.num_rows, 1.0), mask_T)",
        "return _constant(1.0 / max(rows.num_rows, 1.0), mask_T)",
    ),
    (
        "aggregate.py",
        "rows.count(mask_T).clamp(min=1).to(torch.float64)",
        "rows.lengths_B.clamp(min=1).to(torch.float64)",
    ),
    ("aggregate.py", "* max(norm.totals.num_rows, 1.0)\n", "* max(rows.num_rows, 1)\n"),
    ("aggregate.py", "/ norm.horizon_tokens", "/ int(rows.lengths_B.max())"),
    ("aggregate.py", "/ norm.horizon_tokens", "* norm.horizon_tokens"),
    # whitening: over what, and how
    ("whitening.py", "return mean, squares / (count - 1).clamp(min=1)", "return mean, squares / count.clamp(min=1)"),
    (
        "whitening.py",
        "sum_over_ranks(keep((x_T - mean).square(), mask_T).sum())",
        "keep((x_T - mean).square(), mask_T).sum()",
    ),
    (
        "whitening.py",
        "sum_over_ranks(keep((x_T - mean).square(), mask_T).sum())",
        "sum_over_ranks((x_T - mean).square().sum())",
    ),
    ("whitening.py", "keep((x_T - mean).square(), mask_T).sum()", "x_T.square().sum() - count * mean.square()"),
    ("whitening.py", "sum_over_ranks(torch.stack([mask_T", "alone(torch.stack([mask_T"),
    ("whitening.py", "(x_T - mean) * torch.rsqrt", "x_T * torch.rsqrt"),
    ("whitening.py", "VARIANCE_FLOOR = 1e-8", "VARIANCE_FLOOR = 1e-4"),
    ("whitening.py", "torch.rsqrt(variance + VARIANCE_FLOOR)", "(variance + VARIANCE_FLOOR)"),
    # groups
    (
        "groups.py",
        "number.setdefault(uid, len(number)) for uid",
        "number.setdefault(uid.lstrip('0'), len(number)) for uid",
    ),
    (
        "groups.py",
        "number.setdefault(uid, len(number)) for uid in uids",
        "row // 2 for row, uid in enumerate(uids) if number.setdefault(uid, len(number)) + 1",
    ),
    ("groups.py", "torch.argsort(group_B, stable=True)", "torch.arange(len(uids))"),
    ("groups.py", "x_B - first_G[self.group_B]", "x_B - x_B[0]"),
    ("groups.py", "shifted_B = self.from_first(x_B)", "shifted_B = x_B"),
    ("groups.py", "/ torch.where(total_G > 0, total_G, 1.0)", "/ total_G"),
    ("groups.py", "self.sum(weights_B * shifted_B)", "self.sum(shifted_B)"),
    ("groups.py", "(self.from_first(x_B) != 0)", "(self.from_first(x_B) > 0)"),
    ("groups.py", "        check_finite(self.scores_B, self.uids)\n", ""),
    ("groups.py", "(~torch.isfinite(scores_B))", "torch.isnan(scores_B)"),
    ("groups.py", 'float("nan") if reward is None', "0.0 if reward is None"),
    # token rewards
    (
        "token_rewards.py",
        "rewards_T[last_B[last_B >= 0]] =",
        "rewards_T[(rows.starts_B + rows.lengths_B - 1)[last_B >= 0]] =",
    ),
    (
        "token_rewards.py",
        "rewards_T[last_B[last_B >= 0]] = at_least_float32(scores_B)[last_B >= 0]",
        "rewards_T[last_B] = at_least_float32(scores_B)",
    ),
    ("token_rewards.py", "~mask_T & (rewards_T != 0)", "~mask_T & (rewards_T > 1e9)"),
    ("token_rewards.py", "scores_T - coef * keep(", "scores_T + coef * keep("),
    ("token_rewards.py", "keep(kl_T.detach(), mask_T).to(scores_T.dtype)", "kl_T.detach().to(scores_T.dtype)"),
    ("token_rewards.py", "coef * keep(kl_T.detach(), mask_T)", "coef * keep(kl_T, mask_T)"),
    (
        "token_rewards.py",
        "scores_B - coef * rows.sum(keep(kl_T.detach(), mask_T))",
        "scores_B - coef * rows.mean(kl_T.detach(), mask_T)",
    ),
    ("token_rewards.py", "(lengths_B - (max_tokens - buffer_tokens))", "(lengths_B - max_tokens)"),
    ("token_rewards.py", "into_buffer_B.clamp(0.0, 1.0)", "into_buffer_B.clamp(min=0.0)"),
    ("token_rewards.py", "/ buffer_tokens\n", "/ max_tokens\n"),
    # advantages
    (
        "advantages.py",
        "delta_T = rewards_T + settings.gamma * written.next_token(values_T) - values_T",
        "delta_T = rewards_T + written.next_token(values_T) - values_T",
    ),
    (
        "advantages.py",
        "delta_T = rewards_T + settings.gamma * written.next_token(values_T) - values_T",
        "delta_T = rewards_T + settings.gamma * values_T - values_T",
    ),
    ("advantages.py", "settings.gamma * settings.lam)", "settings.lam)"),
    ("advantages.py", "settings.gamma * settings.lam)", "settings.gamma)"),
    ("advantages.py", "returns_T = _unpack(written_T + values_T, mask_T)", "returns_T = _unpack(written_T, mask_T)"),
    (
        "advantages.py",
        "    returns_T = _unpack(written_T + values_T, mask_T)\n    if settings.whiten:\n        advantages_T = whiten(advantages_T, mask_T, inputs.sum_over_ranks)\n",
        "    if settings.whiten:\n        advantages_T = whiten(advantages_T, mask_T, inputs.sum_over_ranks)\n    returns_T = _unpack(advantages_T[mask_T] + values_T, mask_T)\n",
    ),
    (
        "advantages.py",
        "written = Rows.of(inputs.rows.count(mask_T))\n    delta_T",
        "written = Rows.of([int(mask_T.sum())])\n    delta_T",
    ),
    (
        "advantages.py",
        "advantages_T = whiten(advantages_T, mask_T, inputs.sum_over_ranks)",
        "advantages_T = whiten(advantages_T, mask_T)",
    ),
    (
        "advantages.py",
        "Advantages(whiten(returns_T, inputs.mask_T, inputs.sum_over_ranks), returns_T)",
        "Advantages(returns_T, returns_T)",
    ),
    ("advantages.py", "returns_T = _returns_to_go(inputs, settings.gamma)", "returns_T = _returns_to_go(inputs, 1.0)"),
    ("advantages.py", "returns_T = _returns_to_go(inputs, 1.0)", "returns_T = _returns_to_go(inputs, settings.gamma)"),
    ("advantages.py", "keep(returns_T - baseline_T, inputs.mask_T)", "returns_T - baseline_T"),
    ("advantages.py", "keep(returns_T - baseline_T, inputs.mask_T)", "keep(returns_T + baseline_T, inputs.mask_T)"),
    (
        "advantages.py",
        "advantage_B = advantage_B[inputs.position_B]",
        "advantage_B = advantage_B[: inputs.rows.num_rows]",
    ),
    (
        "advantages.py",
        "variance_G = groups.sum(centred_B.square()) / (groups.sizes_G - 1).clamp(min=1)",
        "variance_G = groups.sum(centred_B.square()) / groups.sizes_G",
    ),
    ("advantages.py", "(groups.sizes_G - 1).clamp(min=1)", "(groups.sizes_G - 1)"),
    ("advantages.py", "variance_G.sqrt()[groups.group_B]", "variance_G[groups.group_B]"),
    ("advantages.py", "[groups.group_B] + settings.std_floor)", "[groups.group_B])"),
    (
        "advantages.py",
        "* groups.sizes_B / (groups.sizes_B - 1).clamp(min=1)",
        "* (groups.sizes_B - 1) / groups.sizes_B",
    ),
    ("advantages.py", "groups.centred(scores_B, batch.num_tokens_B)", "groups.centred(scores_B)"),
    ("advantages.py", "scores_B.numel() / num_varied", "scores_B.numel() / groups.vary(scores_B).sum().clamp(min=1)"),
    (
        "advantages.py",
        "num_varied = groups.vary(scores_B)[groups.group_B].sum().clamp(min=1)",
        "num_varied = (scores_B != 0).sum().clamp(min=1)",
    ),
    (
        "advantages.py",
        "return Advantages(whiten(centred_T, inputs.mask_T, inputs.sum_over_ranks))",
        "return Advantages(whiten(centred_T, inputs.mask_T))",
    ),
    # KL
    (
        "kl.py",
        "difference_T = keep(log_probs_T, mask_T) - keep(ref_log_probs_T, mask_T)",
        "difference_T = keep(ref_log_probs_T, mask_T) - keep(log_probs_T, mask_T)",
    ),
    ("kl.py", "return 0.5 * d.square()", "return d.square()"),
    ("kl.py", "(torch.exp(-d) + d - 1)", "(torch.exp(d) - d - 1)"),
    ("kl.py", "K3_VALUE_BOUND = 10.0", "K3_VALUE_BOUND = 1e9"),
    ("kl.py", "estimator(d).detach() + backward - backward.detach()", "estimator(d) + backward - backward.detach()"),
    ("kl.py", "(count_B > 0).sum().double()", "(count_B >= 0).sum().double()"),
    ("kl.py", "min(max(kl / self.target - 1.0, -0.2), 0.2)", "min(max(1.0 - kl / self.target, -0.2), 0.2)"),
    ("kl.py", "error * num_rows / self.horizon_rows", "error / self.horizon_rows"),
    ("kl.py", '        self.coef = float(state["coef"])\n', ""),
    # policy losses
    ("policy_losses.py", "keep(self.old_log_probs_T, self.mask_T).detach()", "keep(self.old_log_probs_T, self.mask_T)"),
    (
        "policy_losses.py",
        "ratio_T.clamp(1 - self.clip_low, 1 + self.clip_high)",
        "ratio_T.clamp(1 - self.clip_high, 1 + self.clip_low)",
    ),
    (
        "policy_losses.py",
        "ratio_T.clamp(1 - self.clip_low, 1 + self.clip_high)",
        "ratio_T.clamp(max=1 + self.clip_high)",
    ),
    (
        "policy_losses.py",
        "loss_T = torch.maximum(unclipped_T, clipped_T)\n    beyond_T",
        "loss_T = torch.minimum(unclipped_T, clipped_T)\n    beyond_T",
    ),
    ("policy_losses.py", "beyond_T = (advantage_T < 0) & (loss_T > bound_T)", "beyond_T = loss_T > bound_T"),
    (
        "policy_losses.py",
        "bound_T = -advantage_T * settings.dual_clip",
        "bound_T = -advantage_T * (1 + settings.dual_clip)",
    ),
    (
        "policy_losses.py",
        "tokens.rows.mean(log_ratio_T.detach(), tokens.mask_T)",
        "tokens.rows.sum(log_ratio_T.detach())",
    ),
    (
        "policy_losses.py",
        "tokens.rows.mean(log_ratio_T.detach(), tokens.mask_T)",
        "tokens.rows.mean(log_ratio_T, tokens.mask_T)",
    ),
    ("policy_losses.py", "ratio_T = log_ratio_T.detach().exp()", "ratio_T = log_ratio_T.exp()"),
    (
        "policy_losses.py",
        "within_T = log_ratio_T.clamp(-settings.clip_low, settings.clip_high)",
        "within_T = log_ratio_T.clamp(-settings.clip_high, settings.clip_low)",
    ),
    (
        "policy_losses.py",
        "bounded_T = sign_T * torch.minimum(sign_T * log_ratio_T, sign_T * within_T)",
        "bounded_T = torch.minimum(log_ratio_T, within_T)",
    ),
    ("policy_losses.py", "loss_B = -rows.mean(advantage_T, mask_T)", "loss_B = -rows.sum(advantage_T)"),
    ("policy_losses.py", '"ppo_kl": -log_ratio_T', '"ppo_kl": log_ratio_T'),
    # value loss
    ("value_loss.py", "torch.maximum(error_T, (values_T", "torch.minimum(error_T, (values_T"),
    (
        "value_loss.py",
        "values_T.clamp(old_T - clip, old_T + clip)",
        "values_T.clamp(returns_T - clip, returns_T + clip)",
    ),
    ("value_loss.py", "TokenLosses(0.5 * worst_T", "TokenLosses(worst_T"),
    ("value_loss.py", "keep(tokens.returns_T, tokens.mask_T).detach()", "keep(tokens.returns_T, tokens.mask_T)"),
    # rollout correction
    (
        "rollout_correction.py",
        "return trained_T - at_least_float32(keep(self.rollout_log_probs_T.detach(), self.mask_T))",
        "return at_least_float32(keep(self.rollout_log_probs_T.detach(), self.mask_T)) - trained_T",
    ),
    (
        "rollout_correction.py",
        "torch.where(ratio_T == held_T, held_T, 0.0)",
        "torch.where(ratio_T == held_T, 1.0, 0.0)",
    ),
    (
        "rollout_correction.py",
        "pair.rows.expand(pair.rows.sum(pair.log_ratio_T))",
        "pair.rows.expand(pair.rows.mean(pair.log_ratio_T, pair.mask_T))",
    ),
    ("rollout_correction.py", "return keep(held_T, pair.mask_T)", "return held_T"),
    ("rollout_correction.py", "total**2 / (count * squares)", "total**2 / squares"),
    (
        "rollout_correction.py",
        "keep(ratio_T > settings.upper, pair.mask_T)",
        "keep(weights_T > settings.upper, pair.mask_T)",
    ),
    ("rollout_correction.py", '"kl": -x_T', '"kl": x_T'),
    ("rollout_correction.py", "written_B = rows.count(mask_T) > 0", "written_B = rows.count(mask_T) >= 0"),
    # dynamic sampling, objectives
    ("dynamic_sampling.py", "(self.keep_G.cumsum(0) <= num_groups)", "(self.keep_G.cumsum(0) < num_groups)"),
    (
        "dynamic_sampling.py",
        "chosen_G = self.keep_G & (self.keep_G.cumsum(0) <= num_groups)",
        "chosen_G = self.keep_G.cumsum(0) <= num_groups",
    ),
    ("dynamic_sampling.py", "keep_G = groups.vary(outcomes.scores_B)", "keep_G = groups.sum(outcomes.scores_B) > 0"),
    ("objectives.py", "loss = loss - settings.entropy_coef", "loss = loss + settings.entropy_coef"),
    ("objectives.py", "loss = loss + settings.kl_coef", "loss = loss - settings.kl_coef"),
    (
        "objectives.py",
        "loss_T * keep(extra.rollout_weights_T, mask_T).detach()",
        "loss_T * keep(extra.rollout_weights_T, mask_T)",
    ),
    ("objectives.py", "ref_log_probs_T.detach(), mask_T)", "ref_log_probs_T, mask_T)"),
    (
        "objectives.py",
        "keep(value_T, mask_T).sum() / num_tokens",
        "keep(value_T, mask_T).sum() / max(int(mask_T.sum()), 1)",
    ),
)
