"""Results of each paper's formula, in plain float64 loops, on the cases of `algorithms.py`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.algorithm_cases import Function, Packed
from benchmarks.algorithm_functions import (
    CLIP_COV,
    KL_COV,
    advantage,
    after,
    aggregated,
    importance,
    keys,
    kl,
    policy,
)
from mrl.algos.aggregate import AGGREGATIONS
from tests.algos import oracles

Answers = dict[str, NDArray[np.float64]]
Formula = Callable[[dict[str, Any]], Answers]
M2 = 0.1
MODES = dict.fromkeys(("gspo", "gmpo", "sapo"), "seq-mean-token-mean") | {"topr": "seq-mean-token-sum"}
"""Aggregations other than token-mean."""
OLD = dict.fromkeys(("dppo_tv", "dppo_kl"), "old_below") | dict.fromkeys(
    ("topr", "vespo", "clip_cov", "kl_cov", "m2po"), "old_near"
)
"""Columns of old log-probs other than `old`: of probabilities below 1, or without extreme ratios."""
GROUPED = ("grpo", "dr_grpo", "rloo", "opo", "gpg", "grpo_passk")


def written(case: dict[str, Any], name: str) -> list[oracles.Row]:
    """Return the values of a column on the tokens that the model wrote, row by row."""
    return [row[mask > 0].tolist() for row, mask in zip(case[name], case["mask"], strict=True)]


def columns_of(case: dict[str, Any], *names: str) -> list[list[oracles.Row]]:
    return [written(case, name) for name in names]


def unwritten(case: dict[str, Any], rows: list[oracles.Row]) -> NDArray[np.float64]:
    """Return the rows in the padded shape, with 0 for other tokens."""
    values = np.zeros(case["mask"].shape)
    values[case["mask"] > 0] = oracles.flat(rows)
    return values


def by_row(case: dict[str, Any], advantages: list[float]) -> list[oracles.Row]:
    return [[value] * int(mask.sum()) for value, mask in zip(advantages, case["mask"], strict=True)]


def token_losses(name: str, case: dict[str, Any]) -> list[list[tuple[float, float]]]:
    """Return loss and slope of each token."""
    low, high, dual = case["clip_low"], case["clip_high"], case["dual_clip"]
    columns = columns_of(case, "log_probs", OLD.get(name, "old"), "advantages")
    of_row: Callable[..., list[oracles.Token]] | None = oracles.POLICY_LOSSES.get(name)
    if of_row is not None:
        return [[token[:2] for token in of_row(*row, low, high, dual)] for row in zip(*columns, strict=True)]
    tokens = list(zip(*map(oracles.flat, columns), strict=True))
    log_probs, advantages = oracles.flat(columns[0]), oracles.flat(columns[2])
    formula: Any
    settings: tuple[float, ...] = ()
    if name == "m2po":
        formula = oracles.m2po
        chosen = oracles.too_far(log_probs, oracles.flat(written(case, "rollout")), M2)
    elif name == "clip_cov":
        formula, settings, places = oracles.clip_cov, (low, high), [(0, 0)] * len(tokens)
        chosen = oracles.chosen_by_covariance(name, log_probs, advantages, places, 1.0, (0.1, 5.0))
    else:
        formula, settings = oracles.kl_cov, (0.5,)
        chosen = oracles.chosen_by_covariance(name, log_probs, advantages, [], 0.3, (0.0, 0.0))
    found = [formula(*token, is_chosen, *settings) for token, is_chosen in zip(tokens, chosen, strict=True)]
    remaining = iter(found)
    return [[next(remaining) for _ in row] for row in columns[0]]


def loss(name: str) -> Formula:
    """Return a function for a policy loss and its gradient. Aggregation is linear: a token's share is that of a 1."""
    mode = MODES.get(name, "token-mean")

    def run(case: dict[str, Any]) -> Answers:
        rows = token_losses(name, case)
        places = [(row, token) for row, tokens in enumerate(rows) for token in range(len(tokens))]
        zeros = [[0.0] * len(row) for row in rows]
        slopes = [[slope for _, slope in row] for row in rows]
        for row, token in places:
            one = [list(values) for values in zeros]
            one[row][token] = 1.0
            slopes[row][token] *= oracles.aggregate(one, mode, case["horizon"])
        whole = oracles.aggregate([[value for value, _ in row] for row in rows], mode, case["horizon"])
        return {"loss": np.asarray(whole), "gradient": unwritten(case, slopes)}

    return run


def kl_of(name: str) -> Formula:
    """Return a function for a KL estimator's values and slopes."""

    def run(case: dict[str, Any]) -> Answers:
        pairs = [
            [oracles.kl(name, *token) for token in zip(*row, strict=True)]
            for row in zip(*columns_of(case, "log_probs", "ref"), strict=True)
        ]
        parts = [[[token[part] for token in row] for row in pairs] for part in (0, 1)]
        return {"value": unwritten(case, parts[0]), "gradient": unwritten(case, parts[1])}

    return run


def tokens_of(name: str) -> Callable[[dict[str, Any]], list[oracles.Row]]:
    """Return a function for an estimator's advantages."""

    def grouped(of: str, case: dict[str, Any], scores: NDArray[np.float64]) -> list[oracles.Row]:
        num_tokens = [len(row) for row in written(case, "mask")]
        return by_row(case, oracles.group_advantage(of, scores.tolist(), case["uids"], num_tokens))

    def weighted(case: dict[str, Any]) -> list[oracles.Row]:
        parts = [grouped("grpo", case, case[column]) for column in ("scores", "more_scores")]
        return [[0.75 * a - 0.25 * b for a, b in zip(*rows, strict=True)] for rows in zip(*parts, strict=True)]

    def above_baseline(case: dict[str, Any]) -> list[oracles.Row]:
        returns = oracles.returns_to_go(written(case, "rewards"), 1.0)
        return [[x - b for x in row] for row, b in zip(returns, case["baselines"], strict=True)]

    def above_token_baseline(case: dict[str, Any]) -> list[oracles.Row]:
        norms = {"norms": 1 - 2 * np.exp(case["drawn"]) + case["sum_squared"]}
        return oracles.token_baseline(written(case, "rewards"), written(case | norms, "norms"), case["uids"])

    of_name: dict[str, Callable[[dict[str, Any]], list[oracles.Row]]] = {
        "gae": lambda case: oracles.whiten(
            oracles.gae(written(case, "rewards"), written(case, "values"), case["gamma"], case["lam"])[0]
        ),
        "reinforce_plus_plus": lambda case: oracles.whiten(
            oracles.returns_to_go(written(case, "rewards"), case["gamma"])
        ),
        "reinforce_plus_plus_baseline": lambda case: oracles.whiten(grouped("dr_grpo", case, case["scores"])),
        "remax": above_baseline,
        "rae": above_baseline,
        "maxrl": lambda case: grouped("maxrl", case, np.abs(case["scores"])),
        "gdpo": lambda case: oracles.whiten(weighted(case)),
        "optimal_token_baseline": above_token_baseline,
    }
    return of_name.get(name, lambda case: grouped(name, case, case["scores"]))


def estimate(name: str) -> Formula:
    rows_of = tokens_of(name)
    return lambda case: {"advantages": unwritten(case, rows_of(case))}


def aggregate_of(mode: str) -> Formula:
    return lambda case: {"loss": np.asarray(oracles.aggregate(written(case, "values"), mode, case["horizon"]))}


def weights_of(level: str) -> Formula:
    """Return a function for truncated importance weights."""

    def run(case: dict[str, Any]) -> Answers:
        trained, sampled = columns_of(case, "log_probs", "rollout")
        return {"weights": unwritten(case, oracles.correction(trained, sampled, level, "truncate", 0.0, 2.0))}

    return run


ESTIMATORS = (
    *GROUPED,
    *("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "rae", "maxrl", "gdpo"),
    "optimal_token_baseline",
)
CHOSEN = ("clip_cov", "kl_cov", "m2po")
ESTIMATES = ("k1", "abs", "k2", "k3", "k1+", "abs+", "k3+")
LEVELS = ("token", "sequence", "geometric")


def with_positive_scores(function: Function) -> Function:
    return lambda case: function(Packed(case.case | {"scores": np.abs(case.case["scores"])}))


def ours(name: str) -> Function:
    """Return mrl's function for a policy loss, with the settings of its formula."""
    terms = {"clip_cov": CLIP_COV, "kl_cov": KL_COV, "m2po": keys(m2_threshold=M2)}
    function = policy(name, MODES.get(name, "token-mean"), terms=terms.get(name))
    return after(OLD[name], function) if name in OLD else function


FORMULAS: dict[str, Formula] = {
    **{f"policy {name}": loss(name) for name in (*oracles.POLICY_LOSSES, *CHOSEN)},
    **{f"kl {name}": kl_of(name) for name in ESTIMATES},
    **{f"advantage {name}": estimate(name) for name in ESTIMATORS},
    **{f"aggregate {mode}": aggregate_of(mode) for mode in AGGREGATIONS},
    **{f"importance {level}": weights_of(level) for level in LEVELS},
}
OF_MRL: dict[str, Function] = {
    **{f"policy {name}": ours(name) for name in (*oracles.POLICY_LOSSES, *CHOSEN)},
    **{f"kl {name}": kl(name) for name in ESTIMATES},
    **{f"advantage {name}": advantage(name) for name in ESTIMATORS},
    "advantage maxrl": with_positive_scores(advantage("maxrl")),
    **{f"aggregate {mode}": aggregated(mode) for mode in AGGREGATIONS},
    **{f"importance {level}": importance(level, "truncate", 2.0) for level in LEVELS},
}


def write_answers(cases: list[dict[str, Any]], path: Path) -> None:
    """Write the formulas' results in the format of a peer's."""
    answers: dict[str, Any] = {
        f"{number}/{name}/{output}": value
        for number, case in enumerate(cases)
        for name, formula in FORMULAS.items()
        for output, value in formula(case).items()
    }
    np.savez(path, **answers)
