"""Collect what benchmarks found out about each algorithm, for `mrl/config/proofs.json`."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

from mrl.config.catalog import Algorithm, algorithms
from mrl.config.proofs import key_of
from tests.docs.blocks import ROOT

OF_TRL = {
    "sigmoid": r"dpo sigmoid\w*( \+ sft)?|cpo sigmoid( \+ nll)?",
    "conservative": r"cpo sigmoid, smoothed|dpo aot\w*, a pair at a time",
    "robust": "dpo robust",
    "hinge": "(dpo|cpo) hinge",
    "ipo_sum": "cpo ipo of sums",
    "ipo_mean": r"dpo ipo( \+ sft)?|cpo ipo",
    "simpo": "cpo simpo(, smoothed)?",
    "orpo": "orpo",
    "kto": "kto.*",
}
"""Preference loss -> functions of TRL in benchmarks/preferences.py."""
FUNCTIONS = {
    "advantage": "advantage",
    "policy loss": "policy",
    "aggregation": "aggregate",
    "KL estimator": "kl",
    "correction": "importance",
}
"""Kind -> first word of its functions in benchmarks/algorithms.py."""
OPTIONS = {
    "advantage": ("advantage",),
    "policy loss": ("policy",),
    "aggregation": ("aggregation",),
    "KL estimator": ("in_reward", "in_loss"),
    "correction": ("correction",),
}
"""Kind -> options of the runs in benchmarks/reference.py."""
LEARNED = {
    ("advantage", "gae"): "ppo",
    ("correction", "token"): "correction by token",
    ("correction", "sequence"): "correction by sequence",
}
"""Entries of benchmarks/learning.py with another name than the algorithm."""
PEERS = {"formula": "formula", "verl": "verl", "trl": "TRL"}


def algorithm_proofs() -> str:
    """Return the proofs of all algorithms as JSON, one in a line."""
    proofs = {key_of(algorithm): _proof(algorithm) for algorithm in algorithms()}
    lines = [f"{json.dumps(key)}: {json.dumps(proof)}" for key, proof in proofs.items() if any(proof.values())]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _proof(algorithm: Algorithm) -> dict[str, Any]:
    if algorithm.kind == "preference loss":
        functions = OF_TRL[algorithm.names[0]]
        found = [row["max_difference"] for row in _rows("preferences") if re.fullmatch(functions, row["function"])]
        return {"differences": {"TRL": _rounded(max(found))}, "num_runs": 0, "step_difference": None, "scores": []}
    names = "|".join(map(re.escape, algorithm.names))
    function = re.compile(rf"{FUNCTIONS[algorithm.kind]} ({names})(?![\w+-]).*")
    differences: dict[str, float] = {}
    for row in _rows("algorithms"):
        if function.fullmatch(row["function"]):
            peer = PEERS[row["peer"]]
            differences[peer] = max(differences.get(peer, 0.0), _rounded(row["max_difference"]))
    level = re.compile(rf"\('({names})', .*|({names})")
    runs = [
        row for row in _rows("reference") if row["option"] in OPTIONS[algorithm.kind] and level.fullmatch(row["level"])
    ]
    found = [_rounded(value) for row in runs for value in row.values() if isinstance(value, float)]
    return {
        "differences": differences,
        "num_runs": sum(row["runs"] for row in runs),
        "step_difference": max(found, default=None),
        "scores": _scores(algorithm),
    }


def _rounded(difference: float) -> float:
    return float(f"{difference:.3g}")


def _scores(algorithm: Algorithm) -> list[float]:
    """Return the accuracies by seed. A run that failed counts as 0, as in the benchmark's mean."""
    if algorithm.kind not in ("advantage", "policy loss", "correction"):
        return []
    entries = {LEARNED.get((algorithm.kind, name), name) for name in algorithm.names}
    rows = [row for row in _rows("learning") if row["algorithm"] in entries and row["seed"] != "mean"]
    return [row.get("after", 0.0) for row in sorted(rows, key=lambda row: int(row["seed"]))]


@cache
def _rows(benchmark: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((ROOT / f"benchmarks/results/{benchmark}.json").read_text())["rows"]
    return rows
