"""Every formula once more, in float64, row by row in plain loops. Nothing here comes from mrl.

A row is the list of the tokens that the model wrote: masked ones are already gone.
"""

from __future__ import annotations

import math
from collections.abc import Callable

Row = list[float]


def clamp(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def flat(rows: list[Row]) -> Row:
    return [x for row in rows for x in row]


# ---- aggregation


def aggregate(losses: list[Row], mode: str, horizon: int) -> float:
    rows = [row for row in losses if row]
    if not rows:
        return 0.0
    sums = [math.fsum(row) for row in rows]
    return {
        "token-sum": math.fsum(sums),
        "token-mean": math.fsum(sums) / sum(len(row) for row in rows),
        "seq-mean-token-sum": mean(sums),
        "seq-mean-token-mean": mean([mean(row) for row in rows]),
        "seq-mean-token-sum-norm": mean(sums) / horizon,
    }[mode]


# ---- advantages


def whiten(rows: list[Row]) -> list[Row]:
    values = flat(rows)
    centre = mean(values)
    variance = math.fsum((x - centre) ** 2 for x in values) / (len(values) - 1) if len(values) > 1 else 0.0
    return [[(x - centre) / math.sqrt(variance + 1e-8) for x in row] for row in rows]


def token_baseline(rewards: list[Row], norms: list[Row], uids: list[str]) -> list[Row]:
    """G_t - sum_j W_jt G_jt / sum_j W_jt over the rows j of a prompt that have a token t, or over the plain mean if no
    W is above 0."""
    returns, advantages = returns_to_go(rewards, 1.0), []
    weights = [[math.fsum(row[: t + 1]) for t in range(len(row))] for row in norms]
    for own, uid in zip(returns, uids, strict=True):
        row = []
        for t, value in enumerate(own):
            alive = [j for j, other in enumerate(uids) if other == uid and len(returns[j]) > t]
            shares = [weights[j][t] for j in alive]
            shares = shares if any(shares) else [1.0] * len(alive)
            weighted = math.fsum(share * returns[j][t] for share, j in zip(shares, alive, strict=True))
            row.append(value - weighted / math.fsum(shares))
        advantages.append(row)
    return advantages


def gae(rewards: list[Row], values: list[Row], gamma: float, lam: float) -> tuple[list[Row], list[Row]]:
    advantages, returns = [], []
    for reward_row, value_row in zip(rewards, values, strict=True):
        row: Row = []
        next_value = next_advantage = 0.0
        for reward, value in zip(reversed(reward_row), reversed(value_row), strict=True):
            next_advantage = reward + gamma * next_value - value + gamma * lam * next_advantage
            next_value = value
            row.insert(0, next_advantage)
        advantages.append(row)
        returns.append([a + v for a, v in zip(row, value_row, strict=True)])
    return advantages, returns


def returns_to_go(rewards: list[Row], gamma: float) -> list[Row]:
    result = []
    for rewards_row in rewards:
        row: Row = []
        running = 0.0
        for reward in reversed(rewards_row):
            running = reward + gamma * running
            row.insert(0, running)
        result.append(row)
    return result


def groups(uids: list[str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for index, uid in enumerate(uids):
        found.setdefault(uid, []).append(index)
    return found


def group_advantage(name: str, scores: list[float], uids: list[str], num_tokens: list[int]) -> list[float]:
    result = [0.0] * len(scores)
    num_uniform = 0
    for members in groups(uids).values():
        own = [scores[i] for i in members]
        if len(set(own)) == 1:
            num_uniform += len(own)
            continue
        centre = mean(own)
        deviation = math.sqrt(math.fsum((s - centre) ** 2 for s in own) / (len(own) - 1))
        for i in members:
            others = [scores[j] for j in members if j != i]
            weighed = sum(num_tokens[j] for j in members)
            result[i] = {
                "dr_grpo": scores[i] - centre,
                "grpo": (scores[i] - centre) / (deviation + 1e-6),
                "rloo": scores[i] - mean(others),
                "gpg": scores[i] - centre,
                "grpo_passk": (max(own) - max(others)) / (deviation + 1e-6),
                "maxrl": (scores[i] - centre) / centre if centre else 0.0,
                "opo": scores[i] - math.fsum(scores[j] * num_tokens[j] for j in members) / (weighed or 1),
            }[name]
    if name == "gpg":
        result = [a * len(scores) / max(1, len(scores) - num_uniform) for a in result]
    return result


# ---- KL


def kl(name: str, log_prob: float, ref: float) -> tuple[float, float]:
    """Value and derivative with respect to the log-prob."""
    base = name.rstrip("+")
    d = log_prob - ref
    if base == "k1":
        value, slope = d, 1.0
    elif base == "abs":
        value, slope = abs(d), math.copysign(1.0, d) if d else 0.0
    elif base == "k2":
        value, slope = d * d / 2, d
    else:
        bounded = clamp(d, -20, 20)
        exact = math.exp(-bounded) - 1 + bounded
        value, slope = min(exact, 10.0), 1 - math.exp(-bounded) if exact < 10 and bounded == d else 0.0
    return value, d if name.endswith("+") else slope


# ---- policy losses: loss and derivative per token, clipped, clipped below


Token = tuple[float, float, bool, bool]


def ppo(log_probs: Row, old: Row, advantages: Row, low: float, high: float, dual: float | None) -> list[Token]:
    result = []
    for lp, ol, a in zip(log_probs, old, advantages, strict=True):
        ratio = math.exp(clamp(lp - ol, -20, 20))
        free, held = -a * ratio, -a * clamp(ratio, 1 - low, 1 + high)
        loss, slope = (held, 0.0) if held > free else (free, -a * ratio)
        bounded = dual is not None and a < 0 and loss > -a * dual
        result.append((-a * dual, 0.0, held > free, True) if bounded and dual else (loss, slope, held > free, False))
    return result


def gspo(log_probs: Row, old: Row, advantages: Row, low: float, high: float, dual: float | None) -> list[Token]:
    log_ratio = mean([lp - ol for lp, ol in zip(log_probs, old, strict=True)])
    ratio = math.exp(min(log_ratio, 10.0))
    result = []
    for a in advantages:
        free, held = -a * ratio, -a * clamp(ratio, 1 - low, 1 + high)
        result.append((held, 0.0, True, False) if held > free else (free, -a * ratio, False, False))
    return result


def cispo(log_probs: Row, old: Row, advantages: Row, low: float, high: float, dual: float | None) -> list[Token]:
    result = []
    for lp, ol, a in zip(log_probs, old, advantages, strict=True):
        ratio = math.exp(clamp(lp - ol, -20, 20))
        weight = clamp(ratio, 1 - low, 1 + high)
        result.append((-weight * a * lp, -weight * a, weight != ratio, False))
    return result


def gmpo(log_probs: Row, old: Row, advantages: Row, low: float, high: float, dual: float | None) -> list[Token]:
    bounded, free, clipped = [], [], []
    for lp, ol, a in zip(log_probs, old, advantages, strict=True):
        x = clamp(lp - ol, -20, 20)
        held = clamp(x, -low, high)
        pessimistic = min(x, held) if a > 0 else max(x, held) if a < 0 else 0.0
        bounded.append(pessimistic)
        free.append(a != 0 and pessimistic == x)
        clipped.append((held != x and a > 0, held != x and a < 0))
    ratio, advantage = math.exp(mean(bounded)), mean(advantages)
    # One loss for the whole row, which each of its n tokens carries: token t moves it by 1/n, n times.
    slopes = [-advantage * ratio if is_free else 0.0 for is_free in free]
    return [(-advantage * ratio, slope, *both) for slope, both in zip(slopes, clipped, strict=True)]


def gpg(log_probs: Row, old: Row, advantages: Row, low: float, high: float, dual: float | None) -> list[Token]:
    return [(-a * lp, -a, False, False) for lp, a in zip(log_probs, advantages, strict=True)]


def sapo(log_probs: Row, old: Row, advantages: Row, low: float, high: float, dual: float | None) -> list[Token]:
    result = []
    for lp, ol, a in zip(log_probs, old, advantages, strict=True):
        tau, ratio = 1.0 if a > 0 else 1.05, math.exp(clamp(lp - ol, -20, 20))
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        result.append((-a * gate * 4 / tau, -a * 4 * gate * (1 - gate) * ratio, False, False))
    return result


def _dppo(log_probs: Row, old: Row, advantages: Row, outside: Callable[[float, float, bool], bool]) -> list[Token]:
    result = []
    for lp, ol, a in zip(log_probs, old, advantages, strict=True):
        p, q = min(math.exp(lp), 1 - 1e-6), min(math.exp(ol), 1 - 1e-6)
        dropped = outside(p, q, a > 0)
        weight = 0.0 if dropped else min(math.exp(clamp(lp - ol, -20, 20)), 20.0)
        result.append((-weight * a * lp, -weight * a, dropped, False))
    return result


def dppo_tv(log_probs: Row, old: Row, advantages: Row, low: float, high: float, dual: float | None) -> list[Token]:
    return _dppo(log_probs, old, advantages, lambda p, q, up: p - q > high if up else q - p > low)


def dppo_kl(log_probs: Row, old: Row, advantages: Row, low: float, high: float, dual: float | None) -> list[Token]:
    def outside(p: float, q: float, up: bool) -> bool:
        kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        return kl > high and p > q if up else kl > low and p < q

    return _dppo(log_probs, old, advantages, outside)


def topr(log_probs: Row, old: Row, advantages: Row, low: float, high: float, dual: float | None) -> list[Token]:
    log_ratio = math.fsum(lp - ol for lp, ol in zip(log_probs, old, strict=True))
    weights = [math.exp(clamp(log_ratio, -20, 0)) if a < 0 else 1.0 for a in advantages]
    return [
        (-w * a * lp, -w * a, a < 0 and log_ratio > 1e-3, False)
        for w, a, lp in zip(weights, advantages, log_probs, strict=True)
    ]


def dro(log_probs: Row, old: Row, advantages: Row, low: float, high: float, dual: float | None) -> list[Token]:
    pairs = [(lp, clamp(lp - ol, -20, 20)) for lp, ol in zip(log_probs, old, strict=True)]
    return [(0.025 * x * x - a * lp, 0.05 * x - a, False, False) for (lp, x), a in zip(pairs, advantages, strict=True)]


def vespo(log_probs: Row, old: Row, advantages: Row, low: float, high: float, dual: float | None) -> list[Token]:
    ratio = math.exp(clamp(math.fsum(lp - ol for lp, ol in zip(log_probs, old, strict=True)), -20, 20))
    kernels = [(3.0, 2.0) if a < 0 else (2.0, 3.0) for a in advantages]
    weights = [ratio**k * math.exp(rate - rate * ratio) for k, rate in kernels]
    return [(-w * a * lp, -w * a, False, False) for w, a, lp in zip(weights, advantages, log_probs, strict=True)]


def opsm(log_probs: Row, old: Row, advantages: Row, delta: float) -> list[bool]:
    """Whether each token of a row is masked."""
    fallen = mean([ol - lp for lp, ol in zip(log_probs, old, strict=True)]) > delta
    return [fallen and a < 0 for a in advantages]


def covariances(old: Row, advantages: Row) -> Row:
    centres = mean(old), mean(advantages)
    return [(o - centres[0]) * (a - centres[1]) for o, a in zip(old, advantages, strict=True)]


def chosen_by_covariance(
    name: str, old: Row, advantages: Row, places: list[tuple[int, int]], share: float, bounds: tuple[float, float]
) -> list[bool]:
    """Whether each token of an update is dropped (clip_cov) or penalized (kl_cov)."""
    covariance = covariances(old, advantages)
    keys: list[float] = list(covariance)
    candidates = list(range(len(old)))
    if name == "clip_cov":
        keys = [split_mix(split_mix(row) ^ t) >> 1 for row, t in places]
        candidates = [i for i in candidates if bounds[0] < covariance[i] < bounds[1]]
    best = sorted((keys[i] for i in candidates), reverse=True)[: max(1, int(share * len(old)))]
    return [i in set(candidates) and keys[i] >= best[-1] for i in range(len(old))]


def split_mix(state: int) -> int:
    z = (state + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def clip_cov(lp: float, old: float, a: float, dropped: bool, low: float, high: float) -> tuple[float, float]:
    loss, slope, *_ = ppo([lp], [old], [a], low, high, None)[0]
    return (0.0, 0.0) if dropped else (loss, slope)


def kl_cov(lp: float, old: float, a: float, penalized: bool, coef: float) -> tuple[float, float]:
    x = clamp(lp - old, -20, 20)
    loss, coef = -a * math.exp(x), coef if penalized else 0.0
    return loss + coef * abs(x), loss + coef * ((x > 0) - (x < 0))


def too_far(old: Row, rollout: Row, threshold: float) -> list[bool]:
    """Whether M2PO drops each token of an update."""
    squares = [(a - b) ** 2 for a, b in zip(old, rollout, strict=True)]
    kept = sorted(squares)
    while kept and math.fsum(kept) > threshold * len(kept):
        kept = [x for x in kept if x < kept[-1]]
    return [x > kept[-1] if kept else True for x in squares]


def m2po(lp: float, old: float, a: float, dropped: bool) -> tuple[float, float]:
    loss = 0.0 if dropped else -a * math.exp(clamp(lp - old, -20, 20))
    return loss, loss


POLICY_LOSSES = {
    "ppo": ppo,
    "gspo": gspo,
    "cispo": cispo,
    "gmpo": gmpo,
    "gpg": gpg,
    "sapo": sapo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "topr": topr,
    "dro": dro,
    "vespo": vespo,
}


def value_loss(value: float, old: float, target: float, clip: float | None) -> tuple[float, float, bool]:
    free = (value - target) ** 2
    if clip is None:
        return free / 2, value - target, False
    held = (clamp(value, old - clip, old + clip) - target) ** 2
    return (held / 2, 0.0, True) if held > free else (free / 2, value - target, False)


# ---- rollout correction


def correction(log_probs: list[Row], rollout: list[Row], level: str, beyond: str, low: float, high: float) -> list[Row]:
    result = []
    for trained, sampled in zip(log_probs, rollout, strict=True):
        x = [a - b for a, b in zip(trained, sampled, strict=True)]
        if level == "sequence":
            x = [math.fsum(x)] * len(x)
        elif level == "geometric":
            x = [mean(x)] * len(x)
        elif level == "none":
            x = [0.0] * len(x)
        ratios = [math.exp(clamp(value, -20, 20)) for value in x]
        if beyond == "truncate":
            result.append([clamp(ratio, low, high) for ratio in ratios])
        else:
            result.append([ratio if low <= ratio <= high else 0.0 for ratio in ratios])
    return result


def rejects(log_probs: Row, rollout: Row, statistic: str, low: float, high: float) -> list[bool]:
    """Whether a row's tokens are beyond the bounds."""
    x = [clamp(a - b, -20, 20) for a, b in zip(log_probs, rollout, strict=True)]
    unit, estimator = statistic.rsplit("_", 1)
    formulas: dict[str, Callable[[float], float]] = {
        "k1": lambda v: v,
        "k2": lambda v: v * v / 2,
        "k3": lambda v: math.exp(v) - 1 - v,
    }
    formula = formulas[estimator]
    values = [formula(v) for v in x]
    of_row = {"seq_sum": math.fsum(values), "seq_mean": mean(values), "seq_max": max(values, default=0.0)}.get(unit)
    values = values if of_row is None else [of_row] * len(values)
    if estimator == "k1":
        return [not low <= math.exp(v) <= high for v in values]
    return [v > high for v in values]


def mismatch(log_probs: list[Row], rollout: list[Row]) -> dict[str, float]:
    pairs = [(a, b) for a, b in zip(log_probs, rollout, strict=True) if a]
    x = [p - q for a, b in pairs for p, q in zip(a, b, strict=True)]
    trained, sampled = [mean(a) for a, _ in pairs], [mean(b) for _, b in pairs]
    gap = [b - a for a, b in zip(trained, sampled, strict=True)]
    whole = [math.fsum(a) - math.fsum(b) for a, b in pairs]
    return {
        "kl": mean([-v for v in x]),
        "k3_kl": mean([math.exp(clamp(v, -20, 20)) - v - 1 for v in x]),
        "chi2_token": mean([math.exp(2 * clamp(v, -20, 20)) - 1 for v in x]),
        "log_prob_abs_diff_mean": mean([abs(v) for v in x]),
        "log_prob_abs_diff_max": max([abs(v) for v in x], default=0.0),
        "training_ppl": mean([math.exp(-m) for m in trained]),
        "rollout_ppl": mean([math.exp(-m) for m in sampled]),
        "log_ppl_diff": mean(gap),
        "log_ppl_abs_diff": mean([abs(g) for g in gap]),
        "ppl_ratio": mean([math.exp(g) for g in gap]),
        "chi2_seq": mean([math.exp(2 * clamp(w, -20, 20)) - 1 for w in whole]),
    }
