"""A recording against the reference: for each quantity of each step, the largest difference."""

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
"""What only a clock or a wire decides, and validation's figures, which are recomputed from its own samples."""
COUNTED = ("perf/total_num_tokens",)
SUMS = (" loss", "/loss", "/pg_loss", "/kl_loss", "/vf_loss", "/entropy", "/distill_loss")
"""What adds up tokens, weighted."""
BY_ADVANTAGE = ("actor loss", "actor/loss", "actor/pg_loss")
"""What adds up advantages: as exact as the largest of them, which whitening makes large."""
TOLERANCE, NORM_TOLERANCE = 1e-5, 5e-5
"""What float32 may differ by. A norm has the rounding of all gradients in it, and of the updates behind them."""
Differences = dict[str, float]


def hold(config: dict[str, Any], recorded: Mapping[str, Any], function: str) -> Differences:
    """Quantity -> largest difference over all steps, as a share of its size where that is above 1."""
    torch.set_num_threads(1)
    reference, found = Reference(config), defaultdict[str, float](float)
    lines = [line for line in recorded["metrics"] if line["step"] > 0]  # before the first there is only a validation
    for number, step in enumerate(recorded["steps"], 1):
        assert step["step"] == number, f"step {step['step']} came as number {number}"
        expected = reference.step(number, rounds_of(step["calls"], function))
        differences = _of_step(step, expected) | _of_metrics(lines[number - 1], expected["metrics"], number)
        for role, directory in step["weights"].items():
            differences[f"{role} weights"] = _of_weights(directory, getattr(reference, role))
        advantage = max(
            (abs(value) for row in expected["columns"]["advantages"].values() for value in row), default=0.0
        )
        for name, value in differences.items():
            size = _weight(config) if name.endswith(SUMS) else 1.0
            size *= max(1.0, advantage) if name.endswith(BY_ADVANTAGE) else 1.0
            found[name] = max(found[name], value / size)
    return dict(found)


def too_large(differences: Differences) -> dict[str, str]:
    """Those that are more than rounding."""
    limits = {name: NORM_TOLERANCE if name.endswith("grad_norm") else TOLERANCE for name in differences}
    return {name: f"{value:.1e}" for name, value in differences.items() if not value <= limits[name]}


def _weight(config: dict[str, Any]) -> float:
    """What all tokens of an update weigh together at most; a sum is as exact as its terms are many."""
    longest, samples = config["rollout"]["max_response_tokens"], config["batch"]["samples_per_update"]
    weights = {"token-sum": samples * longest, "seq-mean-token-sum": longest}
    return float(weights.get(config["algorithm"]["loss"]["aggregation"], 1))


def rounds_of(calls: Sequence[Mapping[str, Any]], function: str) -> list[Round]:
    """What was generated for a step, as the reference reads it."""
    rounds: list[Round] = []
    for call in calls:
        rows = [row_of(each) for each in call["rows"]]
        if call["kind"] == "greedy":
            rounds[-1]["greedy"] = rows
        else:
            rounds.append({"sampled": rows, "figures": reward_figures(call, function)})
    return rounds


def row_of(each: Mapping[str, Any]) -> Row:
    written = [bool(value) for value in each.get("response_mask", [True] * len(each["responses"]))]
    return Row(
        row_id=each["row_id"],
        uid=each["uid"],
        source=each["data_source"],
        prompt=each["prompts"],
        response=each["responses"],
        rollout=torch.tensor(each["rollout_log_probs"], dtype=torch.float64),
        score=each["scores"][0],
        written=torch.tensor(written, dtype=torch.bool),
    )


def reward_figures(call: Mapping[str, Any], function: str) -> dict[str, float]:
    """The reward's figures of one call, for all of it and per source; `function` is the only one, with weight 1."""
    figures: dict[str, float] = {}
    prefixes = {"reward": call["rows"]}
    for each in call["rows"]:
        prefixes.setdefault(f"reward/{each['data_source']}", []).append(each)
    num_asked = len(call["requests"])
    for prefix, rows in prefixes.items():
        scores = [each["scores"][0] for each in rows]
        figures |= {f"{prefix}/num_samples": num_asked, f"{prefix}/failed_share": 1 - len(rows) / num_asked}
        for name in ("score", function):
            figures |= {f"{prefix}/{name}/mean": float(np.mean(scores))}
            figures |= {f"{prefix}/{name}/min": min(scores), f"{prefix}/{name}/max": max(scores)}
    kinds = {f"reward/failed/{kind}": 0.0 for kind in ("timeout", "crashed", "raised", "bad_result", "memory")}
    return figures | kinds | {"reward/failed/raised": num_asked - len(call["rows"])}


def _of_step(step: Mapping[str, Any], expected: Mapping[str, Any]) -> Differences:
    assert step["row_ids"] == expected["row_ids"], "other rows are learnt from, or in another order"
    found = {"scores": difference(_by_row(step["scores"]), expected["scores"])}
    columns = dict(step["columns"])
    for name in ("rm_scores", "teacher_top_ids", "teacher_top_log_probs", "teacher_hidden"):  # seen in what follows
        columns.pop(name, None)
    mine = {name for name in expected["columns"] if name != "rollout"}
    assert set(columns) == mine, f"columns {sorted(columns)}, but the reference has {sorted(mine)}"
    sampled = [each for call in step["calls"] if call["kind"] == "training" for each in call["rows"]]
    masks = {each["row_id"]: each.get("response_mask") for each in sampled}
    for name, column in columns.items():
        by_row = _by_row(column)
        if name not in ("advantages", "returns"):  # of these the tokens that the model did not write are 0 as well
            by_row = {row_id: _written(values, masks[row_id]) for row_id, values in by_row.items()}
        found[name] = difference(by_row, expected["columns"][name])
    assert set(step["updates"]) == set(expected["updates"]), f"{sorted(step['updates'])} were updated"
    for role, updates in expected["updates"].items():
        theirs = step["updates"][role]
        assert [each["row_ids"] for each in theirs] == [each["row_ids"] for each in updates], f"{role}: other rows"
        for name in ("loss", "grad_norm", "lr"):
            pairs = [([a[name]], [b[name]]) for a, b in zip(theirs, updates, strict=True)]
            found[f"{role} {name}"] = max(_largest(a, b) for a, b in pairs)
    found["kl_coef"] = _largest([step["kl_coef"]], [expected["kl_coef"]])
    return found


def _by_row(column: Mapping[Any, list[float]]) -> dict[int, list[float]]:
    return {int(row_id): values for row_id, values in column.items()}


def _written(values: list[float], mask: list[bool] | None) -> list[float]:
    return values if mask is None else [value if there else 0.0 for value, there in zip(values, mask, strict=True)]


def _of_weights(directory: str, model: torch.nn.Module) -> float:
    expected = dict(model.named_parameters())
    files = [load_file(path) for path in sorted(Path(directory).glob("*.safetensors"))]
    saved = {name: tensor for file in files for name, tensor in file.items()}
    assert set(saved) == set(expected), f"weights of other names: {sorted(set(saved) ^ set(expected))[:5]}"
    return max(float((saved[name].double() - tensor).abs().max()) for name, tensor in expected.items())


def _of_metrics(line: Mapping[str, float], expected: Mapping[str, float], step: int) -> Differences:
    assert line["step"] == step, f"the figures of step {line['step']} stand where step {step} is"
    seen = {name: value for name, value in line.items() if name in COUNTED or not name.startswith(CLOCK)}
    odd = sorted(set(seen) ^ set(expected))
    assert not odd, f"figures that only one side has: {odd}"
    return {f"metric {name}": _largest([value], [expected[name]]) for name, value in seen.items()}


def difference(column: Mapping[int, list[float]], expected: Mapping[int, list[float]]) -> float:
    """The largest difference of two columns, whose rows must be the same."""
    assert set(column) == set(expected), f"other rows: {sorted(set(column) ^ set(expected))[:5]}"
    return max((_largest(column[row_id], expected[row_id]) for row_id in expected), default=0.0)


def _largest(values: Sequence[float], expected: Sequence[float]) -> float:
    assert len(values) == len(expected), f"{len(values)} values, not {len(expected)}"
    pairs = zip(values, expected, strict=True)
    return max((0.0 if a == b else _share(a, b) for a, b in pairs), default=0.0)


def _share(value: float, expected: float) -> float:
    share = abs(value - expected) / max(1.0, abs(expected))
    return math.inf if math.isnan(share) else share
