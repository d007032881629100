"""Rows of a step, and the expected results of the workers: loops over written tokens only, in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mrl.config.algorithm import AlgorithmConfig, CorrectionConfig, LossConfig

Reports = dict[str, float]


@dataclass
class Row:
    """One sample. `columns` have a value per response token, masked ones included."""

    uid: str
    prompt: list[int]
    response: list[int]
    mask: list[bool]
    score: float
    baseline: float
    columns: dict[str, Tensor] = field(default_factory=dict)

    @property
    def num_written(self) -> int:
        return sum(self.mask)

    def written(self, name: str) -> Tensor:
        """Return a column without the tokens that the model did not write."""
        return self.columns[name][torch.tensor(self.mask, dtype=torch.bool)]

    def whole(self, values: Sequence[float]) -> list[float]:
        """Return values of the written tokens, and 0 on the others."""
        left = iter(values)
        return [next(left) if is_written else 0.0 for is_written in self.mask]


def kl_of(name: str, log_probs: Tensor, reference: Tensor) -> Tensor:
    """Estimate KL(pi || ref) by the named estimator. Names with a plus have the gradient of k2."""
    d = log_probs - reference
    k2 = d * d / 2
    value = {
        "k1": d,
        "kl": d,
        "abs": d.abs(),
        "k2": k2,
        "mse": k2,
        "k3": torch.exp(-d) - 1 + d,
        "low_var_kl": torch.exp(-d) - 1 + d,
    }[name.removesuffix("+")]
    return value.detach() + k2 - k2.detach() if name.endswith("+") else value


# --- advantages -----------------------------------------------------------------------------------------------------


def advantages_of(
    rows: Sequence[Row], config: AlgorithmConfig, kl_coef: float
) -> tuple[list[list[float]], list[list[float]] | None, float]:
    """Return advantages and returns of the written tokens of each row, and the mean KL."""
    rewards, scores, row_kls = [], [], []
    for row in rows:
        of_row, score = [0.0] * row.num_written, row.score
        if config.kl.where in ("reward", "both"):
            kl = kl_of(config.kl.in_reward, row.written("old_log_probs"), row.written("ref_log_probs")).tolist()
            of_row = [-kl_coef * value for value in kl]
            score -= kl_coef * sum(kl)
            row_kls += [sum(kl) / len(kl)] if kl else []
        if of_row:
            of_row[-1] += row.score
        rewards.append(of_row)
        scores.append(score)
    mean_kl = sum(row_kls) / len(row_kls) if row_kls else 0.0
    name, returns = config.advantage, None
    if name == "gae":
        found, returns = [], []
        for row, of_row in zip(rows, rewards, strict=True):
            values = [*row.written("values").tolist(), 0.0]
            deltas = [r + config.gamma * values[t + 1] - values[t] for t, r in enumerate(of_row)]
            found.append(backwards(deltas, config.gamma * config.lam))
            returns.append([a + v for a, v in zip(found[-1], values, strict=False)])
        return (whitened(found) if config.whiten else found), returns, mean_kl
    if name == "reinforce_plus_plus":
        returns = [backwards(of_row, config.gamma) for of_row in rewards]
        return whitened(returns), returns, mean_kl
    if name == "remax":
        returns = [backwards(of_row, 1.0) for of_row in rewards]
        return [[g - row.baseline for g in of_row] for row, of_row in zip(rows, returns, strict=True)], returns, mean_kl
    compared = [_compared(name, rows, scores, at) for at in range(len(rows))]
    found = [[value] * row.num_written for row, value in zip(rows, compared, strict=True)]
    return (whitened(found) if name == "reinforce_plus_plus_baseline" else found), None, mean_kl


def _compared(name: str, rows: Sequence[Row], scores: Sequence[float], at: int) -> float:
    """Return a row's score relative to those of its prompt."""
    group = [j for j in range(len(rows)) if rows[j].uid == rows[at].uid]
    if len(group) == 1:
        return 0.0
    mine, of_group = scores[at], [scores[j] for j in group]
    centered = mine - sum(of_group) / len(group)
    if name == "grpo":
        mean = sum(of_group) / len(group)
        return centered / (math.sqrt(sum((s - mean) ** 2 for s in of_group) / (len(group) - 1)) + 1e-6)
    if name == "rloo":
        return mine - sum(scores[j] for j in group if j != at) / (len(group) - 1)
    if name == "opo":
        tokens = sum(rows[j].num_written for j in group)
        return mine - sum(scores[j] * rows[j].num_written for j in group) / tokens
    if name == "gpg":
        varied = [
            i for i in range(len(rows)) if len({scores[j] for j in range(len(rows)) if rows[j].uid == rows[i].uid}) > 1
        ]
        return centered * len(rows) / len(varied)
    assert name in ("dr_grpo", "reinforce_plus_plus_baseline"), name
    return centered


def backwards(values: Sequence[float], decay: float) -> list[float]:
    """Compute y_t = x_t + decay * y_(t+1)."""
    found, later = [], 0.0
    for value in reversed(values):
        later = value + decay * later
        found.append(later)
    return found[::-1]


def whitened(of_rows: Sequence[Sequence[float]]) -> list[list[float]]:
    """Normalize to mean 0 and variance 1 over all tokens of all rows."""
    tokens = [value for of_row in of_rows for value in of_row]
    mean = sum(tokens) / len(tokens)
    variance = sum((value - mean) ** 2 for value in tokens) / (len(tokens) - 1)
    return [[(value - mean) / math.sqrt(variance + 1e-8) for value in of_row] for of_row in of_rows]


# --- losses ---------------------------------------------------------------------------------------------------------


def weight_of(aggregation: str, row: Row, rows: Sequence[Row], horizon_tokens: int) -> float:
    """Return the weight of each written token of a row in the loss of an update of all these rows."""
    num_tokens, num_rows = sum(each.num_written for each in rows), sum(each.num_written > 0 for each in rows)
    return {
        "token-mean": 1 / num_tokens,
        "token-sum": 1.0,
        "seq-mean-token-sum": 1 / num_rows,
        "seq-mean-token-mean": 1 / (num_rows * row.num_written),
        "seq-mean-token-sum-norm": 1 / (num_rows * horizon_tokens),
    }[aggregation]


def policy_tokens(
    loss: LossConfig, log_probs: Tensor, old: Tensor, advantage: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of each written token of a row, and its reports."""
    low, high, log_ratio = loss.clip_low, loss.clip_high, log_probs - old
    ratio, figures = log_ratio.exp(), {"ppo_kl": -log_ratio.detach()}
    if loss.policy in ("ppo", "vanilla", "gspo"):
        if loss.policy == "gspo":
            ratio = (log_ratio.detach().mean() + log_probs - log_probs.detach()).exp()
        free, held = -advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high)
        worst, figures["pg_clipfrac"] = torch.max(free, held), (held > free).double()
        if loss.policy != "gspo":
            figures["pg_clipfrac_lower"] = torch.zeros_like(old)
            if loss.dual_clip is not None:
                beyond = (advantage < 0) & (worst > -advantage * loss.dual_clip)
                worst = torch.where(beyond, -advantage * loss.dual_clip, worst)
                figures["pg_clipfrac_lower"] = beyond.double()
        return worst, figures
    if loss.policy == "cispo":
        held = ratio.detach().clamp(1 - low, 1 + high)
        return -held * advantage * log_probs, figures | {"pg_clipfrac": (held != ratio).double()}
    if loss.policy == "gpg":
        return -advantage * log_probs, figures | {"pg_clipfrac": torch.zeros_like(old)}
    assert loss.policy in ("gmpo", "geo_mean"), loss.policy
    held = log_ratio.clamp(-low, high)
    cautious = torch.where(advantage > 0, torch.min(log_ratio, held), torch.max(log_ratio, held))
    cautious = torch.where(advantage == 0, 0.0, cautious)
    figures["pg_clipfrac"] = ((held != log_ratio) & (advantage > 0)).double()
    figures["pg_clipfrac_lower"] = ((held != log_ratio) & (advantage < 0)).double()
    return (-advantage.mean() * cautious.mean().exp()).expand(len(old)), figures


def importance_ratios(level: str, old: Tensor, rollout: Tensor) -> Tensor:
    """Return the ratio of each written token of a row, before any bound."""
    x = old - rollout
    x = {"token": x, "sequence": x.sum().expand(len(x)), "geometric": x.mean().expand(len(x))}[level]
    return x.exp()


def correction_of(settings: CorrectionConfig, old: Tensor, rollout: Tensor) -> Tensor:
    """Return the importance weight of each written token of a row."""
    found = []
    for ratio in importance_ratios(settings.level, old, rollout).tolist():
        if settings.lower <= ratio <= settings.upper:
            found.append(ratio)
        else:
            found.append(0.0 if settings.beyond == "mask" else min(max(ratio, settings.lower), settings.upper))
    return torch.tensor(found, dtype=torch.float64)


def actor_loss(
    rows: Sequence[Row], config: AlgorithmConfig, horizon_tokens: int, given: Mapping[str, list[Tensor]]
) -> tuple[Tensor, Reports]:
    """Return the loss of an update of these rows, and its reports.

    `given` are the model's outputs for each row's tokens.
    """
    loss, num_tokens = config.loss, sum(row.num_written for row in rows)
    total, terms, reports = torch.zeros((), dtype=torch.float64), dict[str, Tensor](), Reports()
    for number, row in enumerate(rows):
        if not row.num_written:
            continue
        at, mask = weight_of(loss.aggregation, row, rows, horizon_tokens), torch.tensor(row.mask)
        log_probs, entropy = given["log_probs"][number][mask], given["entropy"][number][mask]
        old = row.written("old_log_probs") if "old_log_probs" in row.columns else log_probs.detach()
        tokens, figures = policy_tokens(loss, log_probs, old, row.written("advantages"))
        weights = torch.ones_like(tokens)
        if config.correction is not None:
            weights = correction_of(config.correction, old, row.written("rollout_log_probs"))
        summed = {"pg_loss": at * (weights * tokens).sum()}
        if config.kl.where in ("loss", "both"):
            estimate = kl_of(config.kl.in_loss, log_probs, row.written("ref_log_probs"))
            summed["kl_loss"] = at * (weights * estimate).sum()
        if loss.entropy_coef:
            summed["entropy"] = at * entropy.sum()
        for name, value in summed.items():
            terms[name] = terms.get(name, 0.0) + value
        figures["entropy_mean"] = entropy.detach()
        if "rollout_log_probs" in row.columns:
            figures["rollout_diff"] = (log_probs.detach() - row.written("rollout_log_probs")).abs()
        for name, values in figures.items():
            reports[name] = reports.get(name, 0.0) + float(values.sum()) / num_tokens
    coefficients = {"pg_loss": 1.0, "kl_loss": config.kl.coef, "entropy": -loss.entropy_coef}
    for name, term in terms.items():
        total = total + coefficients[name] * term
        reports[name] = float(term)
    return total, reports | {"loss": float(total), "tokens": float(num_tokens)}


def critic_loss(
    rows: Sequence[Row], loss: LossConfig, horizon_tokens: int, given: Sequence[Tensor]
) -> tuple[Tensor, Reports]:
    """Compute 1/2 (V - R)^2, or the larger of it and the same with V clipped near its old value."""
    total, num_tokens = torch.zeros((), dtype=torch.float64), sum(row.num_written for row in rows)
    clipped, mean = 0.0, 0.0
    for row, of_row in zip(rows, given, strict=True):
        if not row.num_written:
            continue
        values, old, target = of_row[torch.tensor(row.mask)], row.written("values"), row.written("returns")
        error = held = (values - target) ** 2
        if loss.value_clip is not None:
            held = (torch.min(torch.max(values, old - loss.value_clip), old + loss.value_clip) - target) ** 2
        total = total + weight_of(loss.aggregation, row, rows, horizon_tokens) * (torch.max(error, held) / 2).sum()
        clipped += float((held > error).sum()) / num_tokens
        mean += float(values.sum()) / num_tokens
    return total, {"loss": float(total), "vf_loss": float(total), "vf_clipfrac": clipped, "vpred_mean": mean}


def correction_reports(rows: Sequence[Row], log_probs: Sequence[Tensor], config: CorrectionConfig) -> Reports:
    """Return figures of the correction over the written tokens of all rows."""
    weights: list[float] = []
    ratios: list[float] = []
    for row, of_row in zip(rows, log_probs, strict=True):
        pair = of_row[torch.tensor(row.mask)].double(), row.written("rollout_log_probs")
        ratios += importance_ratios(config.level, *pair).tolist()
        weights += correction_of(config, *pair).tolist()
    return {
        "rollout_is_mean": sum(weights) / len(weights),
        "rollout_is_eff_sample_size": sum(weights) ** 2 / (len(weights) * sum(weight**2 for weight in weights)),
        "rollout_is_ratio_fraction_high": sum(ratio > config.upper for ratio in ratios) / len(ratios),
        "rollout_is_ratio_fraction_low": sum(ratio < config.lower for ratio in ratios) / len(ratios),
    }


def mismatch_of(rows: Sequence[Row], log_probs: Sequence[Tensor]) -> Reports:
    """Return how much engine and trainer differ: means over written tokens, or over rows that have any."""
    tokens: dict[str, list[float]] = {}
    per_row: dict[str, list[float]] = {}
    for row, of_row in zip(rows, log_probs, strict=True):
        if not row.num_written:
            continue
        ours, theirs = of_row[torch.tensor(row.mask)].double(), row.written("rollout_log_probs")
        x, gap = ours - theirs, float(theirs.mean() - ours.mean())
        by_token = {
            "kl": -x,
            "k3_kl": x.exp() - x - 1,
            "chi2_token": (2 * x).exp() - 1,
            "log_prob_abs_diff_mean": x.abs(),
        }
        by_row = {
            "training_ppl": math.exp(-float(ours.mean())),
            "rollout_ppl": math.exp(-float(theirs.mean())),
            "log_ppl_diff": gap,
            "log_ppl_abs_diff": abs(gap),
            "ppl_ratio": math.exp(gap),
            "chi2_seq": math.exp(2 * float(x.sum())) - 1,
        }
        for name, values in by_token.items():
            tokens.setdefault(name, []).extend(values.tolist())
        for name, value in by_row.items():
            per_row.setdefault(name, []).append(value)
    means = {name: sum(values) / len(values) for name, values in (tokens | per_row).items()}
    return means | {"log_prob_abs_diff_max": max(tokens["log_prob_abs_diff_mean"])}
