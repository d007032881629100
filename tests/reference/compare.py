"""Compare a recording with the reference: the largest difference of each quantity over all steps."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from tests.reference.formulas import Row
from tests.reference.step import Reference, Round

CLOCK = ("timing_s/", "perf/", "sync/", "reward/seconds", "step", "val/")
"""Metrics without a reference: times, transfers, and validation, which the judge recomputes from its samples."""
COUNTED = ("perf/total_num_tokens",)
SUMS = (" loss", "/loss", "/pg_loss", "/kl_loss", "/vf_loss", "/entropy", "/distill_loss")
"""Weighted sums over tokens."""
BY_ADVANTAGE = ("actor loss", "actor/loss", "actor/pg_loss")
"""Sums of advantages. Their error grows with the largest advantage, which whitening makes large."""
BY_SEQUENCE = ("chi2_seq",)
"""Means of exp(2 sum_t x_t). Their relative error is twice the sum of the errors of all tokens of a sequence."""
TOLERANCE, NORM_TOLERANCE = 1e-5, 5e-5
"""Allowed differences in float32. A norm accumulates the rounding of all gradients and of earlier updates."""
Differences = dict[str, float]


def hold(config: dict[str, Any], recorded: Mapping[str, Any], function: str) -> Differences:
    """Return the largest difference of each quantity over all steps, relative to its size if that is above 1."""
    torch.set_num_threads(1)
    reference, largest = Reference(config), defaultdict[str, float](float)
    lines = [
        line for line in recorded["metrics"] if line["step"] > 0
    ]  # before the first step there is only a validation
    for number, step in enumerate(recorded["steps"], 1):
        assert step["step"] == number, f"step {step['step']} was recorded as number {number}"
        expected = reference.step(number, rounds_of(step["calls"], function))
        if config["reward_model"]:
            expected["metrics"]["groups/uniform_share"] = _uniform_share(step)
        differences = _of_step(step, expected) | _of_metrics(lines[number - 1], expected["metrics"], number)
        for role, directory in step["weights"].items():
            differences[f"{role} weights"] = _of_weights(directory, getattr(reference, role))
        advantage = max(
            (abs(value) for row in expected["columns"]["advantages"].values() for value in row), default=0.0
        )
        for name, value in differences.items():
            size = _weight(config) if name.endswith(SUMS) else 1.0
            size *= max(1.0, advantage) if name.endswith(BY_ADVANTAGE) else 1.0
            size *= 2 * config["rollout"]["max_response_tokens"] if name.endswith(BY_SEQUENCE) else 1.0
            largest[name] = max(largest[name], value / size)
    return dict(largest)


def too_large(differences: Differences) -> dict[str, str]:
    """Return the differences that are larger than rounding."""
    limits = {name: NORM_TOLERANCE if name.endswith("grad_norm") else TOLERANCE for name in differences}
    return {name: f"{value:.1e}" for name, value in differences.items() if not value <= limits[name]}


def _weight(config: dict[str, Any]) -> float:
    """Return the largest total weight of an update's tokens. The error of a sum grows with its number of terms."""
    longest, samples = config["rollout"]["max_response_tokens"], config["batch"]["samples_per_update"]
    weights = {"token-sum": samples * longest, "seq-mean-token-sum": longest}
    return float(weights.get(config["algorithm"]["loss"]["aggregation"], 1))


def rounds_of(calls: Sequence[Mapping[str, Any]], function: str) -> list[Round]:
    """Return the generated samples of a step in the form that the reference reads."""
    rounds: list[Round] = []
    for call in calls:
        rows = [row_of(row) for row in call["rows"]]
        if call["kind"] == "greedy":
            rounds[-1]["greedy"] = rows
        else:
            rounds.append({"sampled": rows, "figures": reward_figures(call, function)})
    return rounds


def row_of(record: Mapping[str, Any]) -> Row:
    written = [bool(value) for value in record.get("response_mask", [True] * len(record["responses"]))]
    return Row(
        row_id=record["row_id"],
        uid=record["uid"],
        source=record["data_source"],
        prompt=record["prompts"],
        response=record["responses"],
        rollout=torch.tensor(record["rollout_log_probs"], dtype=torch.float64),
        score=record["scores"][0],
        written=torch.tensor(written, dtype=torch.bool),
        text=record["prompt_text"],
        said=record["response_text"],
        truth=record["ground_truth"],
        drawn_from=record.get("sampling_mask", []),
        rewards=[(1.0, record["scores"][0])],  # of the only reward function
    )


def reward_figures(call: Mapping[str, Any], function: str) -> dict[str, float]:
    """Return the reward metrics of one call, in total and per source. `function` is the only one, with weight 1."""
    figures: dict[str, float] = {}
    prefixes = {"reward": call["rows"]}
    for row in call["rows"]:
        prefixes.setdefault(f"reward/{row['data_source']}", []).append(row)
    num_asked = len(call["requests"])
    for prefix, rows in prefixes.items():
        scores = [row["scores"][0] for row in rows]
        figures |= {f"{prefix}/num_samples": num_asked, f"{prefix}/failed_share": 1 - len(rows) / num_asked}
        for name in ("score", function):
            figures |= {f"{prefix}/{name}/mean": float(np.mean(scores))}
            figures |= {f"{prefix}/{name}/min": min(scores), f"{prefix}/{name}/max": max(scores)}
    kinds = {f"reward/failed/{kind}": 0.0 for kind in ("timeout", "crashed", "raised", "bad_result", "memory")}
    return figures | kinds | {"reward/failed/raised": num_asked - len(call["rows"])}


def _of_step(step: Mapping[str, Any], expected: Mapping[str, Any]) -> Differences:
    assert step["row_ids"] == expected["row_ids"], "the rows of the step, or their order, differ"
    differences = {"scores": difference(_by_row(step["scores"]), expected["scores"])}
    columns = dict(step["columns"])
    for name in (
        "rm_scores",
        "teacher_top_ids",
        "teacher_top_log_probs",
        "teacher_hidden",
    ):  # compared through later columns
        columns.pop(name, None)
    names = {name for name in expected["columns"] if name != "rollout"}
    assert set(columns) == names, f"columns {sorted(columns)}, but the reference has {sorted(names)}"
    sampled = [entry for call in step["calls"] if call["kind"] == "training" for entry in call["rows"]]
    masks = {entry["row_id"]: entry.get("response_mask") for entry in sampled}
    for name, column in columns.items():
        by_row = _by_row(column)
        if name not in ("advantages", "returns"):  # these are also 0 on tokens that the model did not write
            by_row = {row_id: _written(values, masks[row_id]) for row_id, values in by_row.items()}
        differences[name] = difference(by_row, expected["columns"][name])
    assert set(step["updates"]) == set(expected["updates"]), f"updated roles: {sorted(step['updates'])}"
    for role, updates in expected["updates"].items():
        recorded = step["updates"][role]
        assert [entry["row_ids"] for entry in recorded] == [entry["row_ids"] for entry in updates], (
            f"{role}: the rows differ"
        )
        for name in ("loss", "grad_norm", "lr"):
            pairs = [([a[name]], [b[name]]) for a, b in zip(recorded, updates, strict=True)]
            differences[f"{role} {name}"] = max(_largest(a, b) for a, b in pairs)
    differences["kl_coef"] = _largest([step["kl_coef"]], [expected["kl_coef"]])
    return differences


def _uniform_share(step: Mapping[str, Any]) -> float:
    """Return the share of prompts with equal recorded scores. Two sums with a model's rounding are equal by chance."""
    sampled = [entry for call in step["calls"] if call["kind"] == "training" for entry in call["rows"]]
    uids = {entry["row_id"]: entry["uid"] for entry in sampled}
    scores = defaultdict[str, set[float]](set)
    for row_id, (score,) in _by_row(step["scores"]).items():
        scores[uids[row_id]].add(score)
    return sum(len(of_prompt) == 1 for of_prompt in scores.values()) / len(scores)


def _by_row(column: Mapping[Any, list[float]]) -> dict[int, list[float]]:
    return {int(row_id): values for row_id, values in column.items()}


def _written(values: list[float], mask: list[bool] | None) -> list[float]:
    return (
        values
        if mask is None or not values  # a row without a teacher has none
        else [value if is_written else 0.0 for value, is_written in zip(values, mask, strict=True)]
    )


def _of_weights(directory: str, model: torch.nn.Module) -> float:
    expected = dict(model.named_parameters())
    files = [load_file(path) for path in sorted(Path(directory).glob("*.safetensors"))]
    saved = {name: tensor for file in files for name, tensor in file.items()}
    assert set(saved) == set(expected), f"names of weights differ: {sorted(set(saved) ^ set(expected))[:5]}"
    return max(float((saved[name].double() - tensor).abs().max()) for name, tensor in expected.items())


def _of_metrics(line: Mapping[str, float], expected: Mapping[str, float], step: int) -> Differences:
    assert line["step"] == step, f"metrics of step {line['step']}, expected step {step}"
    seen = {name: value for name, value in line.items() if name in COUNTED or not name.startswith(CLOCK)}
    odd = sorted(set(seen) ^ set(expected))
    assert not odd, f"metrics of only one side: {odd}"
    return {f"metric {name}": _largest([value], [expected[name]]) for name, value in seen.items()}


def difference(column: Mapping[int, list[float]], expected: Mapping[int, list[float]]) -> float:
    """Return the largest difference of two columns, which must have the same rows."""
    assert set(column) == set(expected), f"the rows differ: {sorted(set(column) ^ set(expected))[:5]}"
    return max((_largest(column[row_id], expected[row_id]) for row_id in expected), default=0.0)


def _largest(values: Sequence[float], expected: Sequence[float]) -> float:
    assert len(values) == len(expected), f"{len(values)} values, not {len(expected)}"
    pairs = zip(values, expected, strict=True)
    return max((0.0 if a == b else _share(a, b) for a, b in pairs), default=0.0)


def _share(value: float, expected: float) -> float:
    share = abs(value - expected) / max(1.0, abs(expected))
    return math.inf if math.isnan(share) else share
