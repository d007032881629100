"""The algorithms of a step, one row at a time, as their papers write them: float64, loops, no packing.

mrl is compared with this second implementation, which imports nothing from mrl. Rows come without the tokens that the
model did not write, and results are put back at their positions.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor


@dataclass
class Row:
    """One sample: the engine's output and the columns that the step computes."""

    row_id: int
    uid: str
    source: str
    prompt: list[int]
    response: list[int]
    rollout: Tensor  # log-probs by the engine
    score: float
    written: Tensor  # which response tokens the model wrote
    baseline: float = math.nan
    columns: dict[str, Tensor] = field(default_factory=dict)  # one value per written token
    rewards: Sequence[tuple[float, float]] = ()  # weight and score of each reward function
    text: str = ""  # the prompt, as the policy reads it
    said: str = ""  # the response without its end
    success: str | None = ""  # a response that the teacher reads; None if there is no teacher
    truth: str = ""
    drawn_from: list[list[int]] = field(default_factory=list)  # for each response token; -1 is no token
    selected: Tensor | None = None  # written tokens that clip_cov or kl_cov treats differently

    @property
    def num_written(self) -> int:
        return int(self.written.sum())

    def spread(self, name: str) -> list[float]:
        """Return a column with 0 on tokens that the model did not write."""
        whole = torch.zeros(len(self.response), dtype=torch.float64)
        whole[self.written] = self.columns[name].detach()
        values: list[float] = whole.tolist()
        return values


def kl_estimate(name: str, log_probs: Tensor, reference: Tensor) -> Tensor:
    """Schulman's estimators of KL(pi || ref) from samples of pi, with r = ref / pi.

    k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r, at most 10. With a plus sign, the gradient is that of k2.
    """
    log_r = reference - log_probs
    name = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}.get(name, name)
    values = {"k1": -log_r, "abs": log_r.abs(), "k2": log_r**2 / 2, "k3": (log_r.exp() - 1 - log_r).clamp(max=10)}
    value = values[name.removesuffix("+")]
    return value.detach() + values["k2"] - values["k2"].detach() if name.endswith("+") else value


def divergence(settings: dict[str, Any], policy: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Return the divergence at each position, and the policy's probability of the teacher's likeliest tokens.

    It is computed on log-probs of the whole vocabulary, or of the likeliest tokens plus one outcome for all others.
    """
    beta, mass = settings["beta"], torch.ones(len(policy), dtype=torch.float64)
    if settings["form"] == "top_k":
        ids = teacher.topk(settings["top_k"], dim=-1).indices
        mass = policy.gather(1, ids).exp().sum(-1).detach()
        policy, teacher = (
            torch.cat([log_probs.gather(1, ids), log_probs.scatter(1, ids, -math.inf).logsumexp(1, keepdim=True)], 1)
            for log_probs in (policy, teacher)
        )
    p, q = policy.exp(), teacher.exp()
    if beta in (0, 1):
        return ((q * (teacher - policy)) if beta == 0 else p * (policy - teacher)).sum(-1), mass
    m = beta * q + (1 - beta) * p
    return (beta * q * (q / m).log() + (1 - beta) * p * (p / m).log()).sum(-1), mass


def discounted(values: Sequence[float], decay: float) -> list[float]:
    """y_t = x_t + decay y_(t+1)."""
    backwards = accumulate(reversed(values), lambda after, value: value + decay * after)
    return list(backwards)[::-1]


def whitened(rows: Sequence[Row], of: list[list[float]]) -> list[list[float]]:
    """Scale to mean 0 and variance 1 over all tokens of all rows, with the unbiased variance plus 1e-8."""
    everything = [value for values in of for value in values]
    mean = sum(everything) / max(len(everything), 1)
    variance = sum((value - mean) ** 2 for value in everything) / max(len(everything) - 1, 1)
    return [[(value - mean) / math.sqrt(variance + 1e-8) for value in values] for values in of]


def row_advantages(name: str, rows: Sequence[Row], scores: Sequence[float]) -> list[float]:
    """Return one advantage per row, which compares its score with the scores of the same prompt."""
    advantages = [0.0] * len(rows)
    groups = [[index for index, row in enumerate(rows) if row.uid == uid] for uid in {row.uid for row in rows}]
    varied = sum(len(group) for group in groups if len({scores[index] for index in group}) > 1)
    for group in groups:
        n, mean = len(group), sum(scores[index] for index in group) / len(group)
        tokens = sum(rows[index].num_written for index in group)
        weighted = sum(scores[index] * rows[index].num_written for index in group) / max(tokens, 1)
        spread = math.sqrt(sum((scores[index] - mean) ** 2 for index in group) / max(n - 1, 1))
        for index in group:
            others = (n * mean - scores[index]) / max(n - 1, 1)
            of_group = [scores[other] for other in group]
            rest = [scores[other] for other in group if other != index]
            advantages[index] = {
                "grpo": (scores[index] - mean) / (spread + 1e-6),
                "dr_grpo": scores[index] - mean,
                "reinforce_plus_plus_baseline": scores[index] - mean,
                "rloo": scores[index] - others,
                "opo": scores[index] - weighted,
                "gpg": (scores[index] - mean) * len(rows) / max(varied, 1),
                "grpo_passk": (max(of_group) - max(rest, default=0.0)) / (spread + 1e-6),
                "maxrl": (scores[index] - mean) / (mean or 1.0),
            }[name]
            if n == 1:
                advantages[index] = 0.0  # a single sample has no comparison
    return advantages


def add_advantages(rows: Sequence[Row], algorithm: dict[str, Any], kl_coef: float) -> tuple[float, list[float]]:
    """Add the columns `advantages` and, with a critic, `returns`. Return the mean KL and the reward of each row.

    The KL counts only if it is subtracted from the reward. r_t = -kl_coef kl_t, plus the row's score on its last token.
    The KL is averaged over a row's tokens, then over rows.
    """
    name, kl = algorithm["advantage"], algorithm["kl"]
    charged = kl["where"] in ("reward", "both")
    rewards, scores, row_kls = [], [], []
    for row in rows:
        of_row = [0.0] * row.num_written
        if charged:
            estimate = kl_estimate(kl["in_reward"], row.columns["old_log_probs"], row.columns["ref_log_probs"]).tolist()
            of_row = [-kl_coef * value for value in estimate]
            row_kls += [sum(estimate) / len(estimate)] if estimate else []
        scores.append(row.score + sum(of_row))
        if of_row:
            of_row[-1] += row.score
        rewards.append(of_row)
    if name == "gae":
        advantages = _generalized(rows, rewards, algorithm)
    elif name == "reinforce_plus_plus":
        advantages = whitened(rows, [discounted(of_row, algorithm["gamma"]) for of_row in rewards])
    elif name in ("remax", "rae"):
        pairs = zip(rows, rewards, strict=True)
        advantages = [[value - row.baseline for value in discounted(of_row, 1.0)] for row, of_row in pairs]
    elif name == "optimal_token_baseline":
        advantages = _over_token_baseline(rows, rewards)
    else:
        by_name = {"gdpo": lambda: _of_each_reward(rows), "online_dpo": lambda: _of_pairs(rows, scores, algorithm)}
        per_row = by_name.get(name, lambda: row_advantages(name, rows, scores))()
        advantages = [[value] * row.num_written for row, value in zip(rows, per_row, strict=True)]
        if name in ("reinforce_plus_plus_baseline", "gdpo"):
            advantages = whitened(rows, advantages)
    for row, of_row in zip(rows, advantages, strict=True):
        row.columns["advantages"] = torch.tensor(of_row, dtype=torch.float64)
    return float(sum(row_kls) / max(len(row_kls), 1)), [sum(of_row) for of_row in rewards]


def _over_token_baseline(rows: Sequence[Row], rewards: Sequence[list[float]]) -> list[list[float]]:
    """Return G_t - sum_j W_jt G_jt / sum_j W_jt over the rows of a prompt, with W_t the sum of the norms up to t."""
    returns = [discounted(of_row, 1.0) for of_row in rewards]
    weights = [row.columns["score_norms"].cumsum(0).tolist() for row in rows]
    advantages = []
    for row, own in zip(rows, returns, strict=True):
        group = [at for at, other in enumerate(rows) if other.uid == row.uid]
        of_row = []
        for t, value in enumerate(own):
            alive = [at for at in group if rows[at].num_written > t]
            total = sum(weights[at][t] for at in alive)
            weighted = sum(weights[at][t] * returns[at][t] for at in alive)
            of_row.append(value - (weighted / total if total else statistics.fmean(returns[at][t] for at in alive)))
        advantages.append(of_row)
    return advantages


def dpo_margins(rows: Sequence[Row], scores: Sequence[float], beta: float) -> list[dict[tuple[int, int], float]]:
    """Return beta (log-ratio of a best row - log-ratio of a worst row) by these rows, for each prompt whose scores
    differ."""
    margins = []
    for uid in dict.fromkeys(row.uid for row in rows):
        group = [index for index, row in enumerate(rows) if row.uid == uid]
        ends = [end(scores[index] for index in group) for end in (max, min)]
        if ends[0] == ends[1]:
            continue
        best, worst = ([index for index in group if scores[index] == end] for end in ends)
        moved = {
            at: float((rows[at].columns["old_log_probs"] - rows[at].columns["ref_log_probs"]).sum()) for at in group
        }
        margins.append({(high, low): beta * (moved[high] - moved[low]) for high in best for low in worst})
    return margins


def _of_pairs(rows: Sequence[Row], scores: Sequence[float], algorithm: dict[str, Any]) -> list[float]:
    """Return minus the derivative of DPO's loss by each row's log-prob: -log sigmoid(margin), averaged over the pairs
    of a prompt, then over prompts."""
    beta, advantages = algorithm["dpo_beta"], [0.0] * len(rows)
    prompts = dpo_margins(rows, scores, beta)
    for margins in prompts:
        for (best, worst), margin in margins.items():
            slope = beta / (1 + math.exp(margin)) / len(margins) / len(prompts)
            advantages[best] += slope
            advantages[worst] -= slope
    return advantages


def dpo_figures(rows: Sequence[Row], scores: Sequence[float], beta: float) -> dict[str, float]:
    """Return the figures of online DPO's pairs."""
    prompts = dpo_margins(rows, scores, beta)
    in_pairs = {index for margins in prompts for pair in margins for index in pair}
    figures: dict[str, float] = {
        "pairs": sum(map(len, prompts)),
        "prompts_without_pair": len({row.uid for row in rows}) - len(prompts),
        "samples_without_pair": len(rows) - len(in_pairs),
    }
    of_pair = {
        "loss": lambda margin: math.log1p(math.exp(-margin)),
        "accuracy": lambda margin: (margin > 0) + 0.5 * (margin == 0),
        "margin": lambda margin: margin,
    }
    for name, function in of_pair.items() if prompts else ():
        figures[name] = statistics.fmean(statistics.fmean(map(function, margins.values())) for margins in prompts)
    return {f"online_dpo/{name}": float(value) for name, value in figures.items()}


def _of_each_reward(rows: Sequence[Row]) -> list[float]:
    """Return sum_k w_k A_k of each row, with GRPO's advantage A_k of the score by reward function k."""
    rewards = zip(*(row.rewards for row in rows), strict=True)
    total = [0.0] * len(rows)
    for reward in rewards:
        of_rows = row_advantages("grpo", rows, [score for _, score in reward])
        total = [before + reward[0][0] * value for before, value in zip(total, of_rows, strict=True)]
    return total


def _generalized(rows: Sequence[Row], rewards: list[list[float]], algorithm: dict[str, Any]) -> list[list[float]]:
    """GAE: delta_t = r_t + gamma V_(t+1) - V_t, A_t = delta_t + gamma lam A_(t+1), R_t = A_t + V_t.

    The critic's R_t may have a lambda next to that of A_t, and that of A_t may depend on the row's length.
    """
    gamma, lam, advantages = algorithm["gamma"], algorithm["lam"], list[list[float]]()
    lam_critic = lam if algorithm["lam_critic"] is None else algorithm["lam_critic"]
    for row, of_row in zip(rows, rewards, strict=True):
        values = [*row.columns["values"].tolist(), 0.0]
        deltas = [reward + gamma * values[t + 1] - values[t] for t, reward in enumerate(of_row)]
        if algorithm["lam_length"] is not None:
            lam = max(0.0, 1 - 1 / (algorithm["lam_length"] * max(len(deltas), 1)))
        advantages.append(discounted(deltas, gamma * lam))
        for_critic = torch.tensor(discounted(deltas, gamma * lam_critic), dtype=torch.float64)
        row.columns["returns"] = for_critic + row.columns["values"]
    return whitened(rows, advantages) if algorithm["whiten"] else advantages


def policy_loss(
    loss: dict[str, Any], taught: dict[str, Any] | None, log_probs: Tensor, row: Row
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of each token of a row, and per token whether it is clipped and how far the policy moved.

    With opsm_delta, a row whose mean log-ratio is below its negative has no loss at negative advantages.
    """
    of_token, reports = _policy_loss(loss, taught, log_probs, row)
    if loss["opsm_delta"] is None or not len(log_probs):
        return of_token, reports
    is_far = bool(reports["ppo_kl"].mean() > loss["opsm_delta"])
    masked = (_advantage(loss, taught, log_probs, row) < 0) & is_far
    return of_token * ~masked, reports | {"opsm_masked": masked.double()}


def _advantage(loss: dict[str, Any], taught: dict[str, Any] | None, log_probs: Tensor, row: Row) -> Tensor:
    advantage: Tensor = row.columns["advantages"]
    if taught:
        advantage = taught["reward_coef"] * advantage
    if taught and taught["form"] == "advantage" and row.success is not None:
        old = _old_log_probs(loss, log_probs, row)
        advantage = advantage - taught["coef"] * over_spans(row, old - row.columns["teacher_log_probs"])
    elif taught and "teacher_spans" in row.columns:  # a sample that the teacher cannot read
        advantage = advantage + taught["coef"] * row.columns["teacher_log_probs"]
    return advantage


def over_spans(row: Row, values: Tensor) -> Tensor:
    """Return for each token the sum over the span that it belongs to: itself, unless the teacher reads texts."""
    if "teacher_spans" not in row.columns:
        return values
    marks = row.columns["teacher_spans"].tolist()
    starts = [at for at, mark in enumerate(marks) if mark != 1]
    sums = [values[a:b].sum().expand(b - a) for a, b in zip(starts, [*starts[1:], len(marks)], strict=True)]
    return torch.cat(sums)


def _old_log_probs(loss: dict[str, Any], log_probs: Tensor, row: Row) -> Tensor:
    """Return the engine's log-probs, or between these and the policy's, or the trainer's from before the first update,
    or those of this only update."""
    engine, source = row.columns.get("rollout"), loss["old_log_probs"]
    if source == "engine" and engine is not None:
        return engine
    if source == "interpolated" and engine is not None:
        shares = torch.tensor(
            [1 / age if age else 0.0 for age in row.columns["staleness"].tolist()], dtype=torch.float64
        )
        return shares * engine + (1 - shares) * log_probs.detach()
    return row.columns.get("old_log_probs", log_probs.detach())


def _policy_loss(
    loss: dict[str, Any], taught: dict[str, Any] | None, log_probs: Tensor, row: Row
) -> tuple[Tensor, dict[str, Tensor]]:
    old, advantage = _old_log_probs(loss, log_probs, row), _advantage(loss, taught, log_probs, row)
    low, high, name = loss["clip_low"], loss["clip_high"], loss["policy"]
    log_ratio = log_probs - old
    ratio, zeros, reports = log_ratio.exp(), torch.zeros_like(old), {"ppo_kl": -log_ratio.detach()}
    if name in ("ppo", "vanilla", "gspo"):
        if name == "gspo" and len(old):
            ratio = (log_ratio.detach().mean() + log_probs - log_probs.detach()).exp()
        plain, clipped = -advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high)
        worst, reports["pg_clipfrac"] = torch.max(plain, clipped), (clipped > plain).double()
        if name == "gspo":
            return worst, reports
        limit = -advantage * (math.inf if loss["dual_clip"] is None else loss["dual_clip"])
        bounded = (advantage < 0) & (worst > limit)
        return torch.where(bounded, limit, worst), reports | {"pg_clipfrac_lower": bounded.double()}
    if name == "cispo":
        weight = ratio.detach().clamp(1 - low, 1 + high)
        return -weight * advantage * log_probs, reports | {"pg_clipfrac": (weight != ratio).double()}
    if name in ("gmpo", "geo_mean"):
        clipped, up = log_ratio.clamp(-low, high), advantage > 0
        pessimistic = torch.where(
            up, torch.min(log_ratio, clipped), torch.where(advantage < 0, torch.max(log_ratio, clipped), 0.0)
        )
        sequence_loss = -advantage.mean() * pessimistic.mean().exp() if len(old) else zeros.sum()
        beyond = clipped != log_ratio
        reports["pg_clipfrac_lower"] = (beyond & (advantage < 0)).double()
        return sequence_loss.expand(len(old)), reports | {"pg_clipfrac": (beyond & up).double()}
    if name == "sapo":
        tau = torch.full_like(old, loss["tau_neg"]).masked_fill(advantage > 0, loss["tau_pos"])
        return -advantage * 4 / tau / (1 + (-tau * (ratio - 1)).exp()), reports | {"pg_clipfrac": zeros}
    if name in ("dppo_tv", "dppo_kl"):
        p, q = (x.exp().clamp(max=1 - 1e-6) for x in (log_probs.detach(), old))
        divergence = (p - q).abs() if name == "dppo_tv" else q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
        leaves = torch.where(advantage > 0, (p > q) & (divergence > high), (p < q) & (divergence > low)).double()
        weight = ratio.detach().clamp(max=20) * (1 - leaves)
        return -weight * advantage * log_probs, reports | {"pg_clipfrac": leaves}
    if name == "topr":
        of_row, falls = log_ratio.detach().sum(), advantage < 0
        weight = torch.where(falls, of_row.exp().clamp(max=1), 1.0)
        return -weight * advantage * log_probs, reports | {"pg_clipfrac": (falls & (of_row > 1e-3)).double()}
    if name == "dro":
        penalty = loss["dro_beta"] / 2 * log_ratio**2
        return penalty - advantage * log_probs, reports | {"pg_clipfrac": zeros}
    if name == "vespo":
        w, falls = log_ratio.detach().sum().exp(), advantage < 0
        up, down = (
            w ** loss[f"vespo_k_{sign}"] * (loss[f"vespo_lambda_{sign}"] * (1 - w)).exp() for sign in ("pos", "neg")
        )
        weight = torch.where(falls, down, up)
        return -weight * advantage * log_probs, reports | {"pg_clipfrac": zeros}
    if name in ("clip_cov", "kl_cov"):
        assert row.selected is not None, "select_tokens runs first"
        plain, chosen = -advantage * ratio, {"cov_selected": row.selected.double(), "pg_clipfrac": zeros}
        if name == "kl_cov":
            return plain + row.selected.double() * loss["cov_kl_coef"] * log_ratio.abs(), reports | chosen
        clipped = -advantage * ratio.clamp(1 - low, 1 + high)
        chosen["pg_clipfrac"] = ((clipped > plain) & ~row.selected).double()
        return torch.max(plain, clipped) * ~row.selected, reports | chosen
    if name == "m2po":
        assert row.selected is not None, "select_tokens runs first"
        kept = 1 - row.selected.double()
        return -advantage * ratio * kept, reports | {"m2_masked": row.selected.double(), "pg_clipfrac": zeros}
    assert name == "gpg", name
    return -advantage * log_probs, reports | {"pg_clipfrac": zeros}


def select_tokens(loss: dict[str, Any], rows: Sequence[Row]) -> None:
    """Mark the tokens of an update that clip_cov or kl_cov treats differently.

    Of N tokens, n = max(1, floor(cov_share N)): for kl_cov, those with the highest Cov_t = (log pi_old_t - mean)
    (A_t - mean); for clip_cov, those with cov_low < Cov_t < cov_high whose hash of row and position is highest.
    """
    if loss["policy"] == "m2po":
        squares = [(row.columns["old_log_probs"] - row.columns["rollout"]) ** 2 for row in rows]
        kept = torch.cat(squares).sort().values
        while len(kept) and kept.mean() > loss["m2_threshold"]:
            kept = kept[kept < kept[-1]]
        for row, square in zip(rows, squares, strict=True):
            row.selected = square > kept[-1] if len(kept) else torch.ones_like(square, dtype=torch.bool)
        return
    if loss["policy"] not in ("clip_cov", "kl_cov"):
        return
    log_probs, advantages = (torch.cat([row.columns[name] for row in rows]) for name in ("old_log_probs", "advantages"))
    covariance = ((log_probs - log_probs.mean()) * (advantages - advantages.mean())).tolist()
    places = [(row, at, t) for row in rows for at, t in enumerate(row.written.nonzero().flatten().tolist())]
    keys, tokens = covariance, list(range(len(places)))
    if loss["policy"] == "clip_cov":
        keys = [mixed(mixed(row.row_id) ^ t) >> 1 for row, _, t in places]
        tokens = [token for token in tokens if loss["cov_low"] < covariance[token] < loss["cov_high"]]
    tokens = sorted(tokens, key=lambda token: -keys[token])[: max(1, int(loss["cov_share"] * len(places)))]
    chosen = {(places[token][0].row_id, places[token][1]) for token in tokens}
    for row in rows:
        is_chosen = [(row.row_id, at) in chosen for at in range(row.num_written)]
        row.selected = torch.tensor(is_chosen, dtype=torch.bool)


def mixed(state: int) -> int:
    """Return the output of SplitMix64 from this state."""
    z = (state + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def importance_ratio(level: str, row: Row) -> Tensor:
    """Return pi_train / pi_engine for each token: of the token, of the sequence, or the geometric mean."""
    log_ratio = row.columns["old_log_probs"] - row.columns["rollout"]
    if level == "sequence":
        log_ratio = log_ratio.sum().expand(len(log_ratio))
    elif level == "geometric" and len(log_ratio):
        log_ratio = log_ratio.mean().expand(len(log_ratio))
    elif level == "none":
        log_ratio = torch.zeros_like(log_ratio)
    return log_ratio.exp()


def correction(settings: dict[str, Any], row: Row) -> Tensor:
    """Return the ratio, clamped to the bounds, or 0 outside them; 0 for rejected tokens."""
    ratio = importance_ratio(settings["level"], row)
    clamped = ratio.clamp(settings["lower"], settings["upper"])
    weights = clamped if settings["beyond"] == "truncate" else torch.where(ratio == clamped, clamped, 0.0)
    return torch.where(is_rejected(settings, row), 0.0, weights)


def is_rejected(settings: dict[str, Any], row: Row) -> Tensor:
    """Return whether a rule rejects each token, or its whole row."""
    x = row.columns["old_log_probs"] - row.columns["rollout"]
    rejected = torch.zeros(len(x), dtype=torch.bool)
    for rule in settings["reject"]:
        unit, estimator = rule["statistic"].rsplit("_", 1)
        value = {"k1": x, "k2": x**2 / 2, "k3": x.exp() - 1 - x}[estimator]
        if unit != "token" and len(x):
            value = {"seq_sum": value.sum(), "seq_mean": value.mean(), "seq_max": value.max()}[unit].expand(len(x))
        lower = -math.inf if estimator != "k1" else math.log(rule["lower"] or 1 / rule["upper"])
        rejected |= (value < lower) | (value > (math.log(rule["upper"]) if estimator == "k1" else rule["upper"]))
    return rejected


def value_loss(clip: float | None, values: Tensor, row: Row) -> tuple[Tensor, dict[str, Tensor]]:
    """Return 1/2 (V - R)^2 or, with a clip, its maximum with the same term for V clamped near its old value."""
    returns, old = row.columns["returns"], row.columns["values"]
    error = (values - returns) ** 2
    clipped = error if clip is None else (torch.max(torch.min(values, old + clip), old - clip) - returns) ** 2
    worst = torch.max(error, clipped)
    return worst / 2, {"vf_clipfrac": (clipped > error).double(), "vpred_mean": values.detach()}


def token_weights(config: dict[str, Any], rows: Sequence[Row]) -> list[float]:
    """Return the weight of a token of each row in the loss of an update of these rows."""
    loss, horizon = config["algorithm"]["loss"], config["rollout"]["max_response_tokens"]
    tokens = max(sum(row.num_written for row in rows), 1)
    whole = max(sum(row.num_written > 0 for row in rows), 1)
    return [
        {
            "token-mean": 1 / tokens,
            "token-sum": 1.0,
            "seq-mean-token-sum": 1 / whole,
            "seq-mean-token-mean": 1 / (whole * max(row.num_written, 1)),
            "seq-mean-token-sum-norm": 1 / (whole * (loss["horizon_tokens"] or horizon)),
        }[loss["aggregation"]]
        for row in rows
    ]


def correction_figures(settings: dict[str, Any], rows: Sequence[Row]) -> dict[str, float]:
    """Return the mean weight, (sum w)^2 / (N sum w^2), and the share of ratios outside each bound, over all tokens."""
    weights = torch.cat([correction(settings, row) for row in rows])
    ratios = torch.cat([importance_ratio(settings["level"], row) for row in rows])
    squares = float((weights**2).sum())
    rejected = [is_rejected(settings, row) for row in rows]
    shares = {
        "mismatch/rollout_rs_masked_fraction": float(torch.cat(rejected).double().mean()),
        "mismatch/rollout_rs_seq_masked_fraction": statistics.fmean(float(row.any()) for row in rejected if len(row)),
    }
    return (shares if settings["reject"] else {}) | {
        "mismatch/rollout_is_mean": float(weights.mean()),
        "mismatch/rollout_is_eff_sample_size": float(weights.sum() ** 2) / (len(weights) * squares) if squares else 0.0,
        "mismatch/rollout_is_ratio_fraction_high": float((ratios > settings["upper"]).double().mean()),
        "mismatch/rollout_is_ratio_fraction_low": float((ratios < settings["lower"]).double().mean()),
    }


def mismatch(rows: Sequence[Row]) -> dict[str, float]:
    """Return how far the engine is from the trainer: means over tokens, and over rows that have tokens."""
    whole = [row.columns["old_log_probs"] - row.columns["rollout"] for row in rows if row.num_written]
    x = torch.cat(whole)
    ours, theirs = (
        torch.stack([row.columns[name].mean() for row in rows if row.num_written])
        for name in ("old_log_probs", "rollout")
    )
    means = {
        "kl": -x,
        "k3_kl": x.exp() - 1 - x,
        "chi2_token": x.exp() ** 2 - 1,
        "log_prob_abs_diff_mean": x.abs(),
        "training_ppl": (-ours).exp(),
        "rollout_ppl": (-theirs).exp(),
        "log_ppl_diff": theirs - ours,
        "log_ppl_abs_diff": (theirs - ours).abs(),
        "ppl_ratio": (theirs - ours).exp(),
        "chi2_seq": torch.stack([(2 * log_ratio.sum()).exp() - 1 for log_ratio in whole]),
    }
    metrics = {f"mismatch/{name}": float(values.mean()) for name, values in means.items()}
    return metrics | {"mismatch/log_prob_abs_diff_max": float(x.abs().max())}
