"""Comparison of two records of a step, phase by phase, in the order in which the step computes them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mrl.observe.print_diff import PrintDifference, RoundingLimits, print_differences
from mrl.protocol import DataProto
from mrl.protocol.columns import Jagged
from mrl.protocol.step_record import AFTER, BEFORE, Moment, StepRecord

_COLUMNS = {
    "rollout": ("prompts", "responses", "response_mask", "rollout_log_probs", "staleness", "sampling_mask", "routes"),
    "reward": ("scores", "baseline_scores"),
    "log-probs": ("old_log_probs", "ref_log_probs", "teacher_log_probs", "teacher_top_log_probs", "teacher_hidden"),
    "values": ("values",),
    "advantage": ("advantages", "returns"),
}
_FIGURES = ("loss", "grad_norm", "lr")


@dataclass(frozen=True)
class StepDifference:
    """The largest difference of a column, a figure or the tensors of a kind, or the first that is too large."""

    phase: str
    subject: str
    place: str
    """Row and token, or tensor and ranks."""
    values: tuple[str, str]
    size: float
    limit: float
    note: str = ""

    @property
    def is_too_large(self) -> bool:
        return not self.size <= self.limit


def step_differences(one: StepRecord, other: StepRecord, *, exact: bool) -> Iterator[StepDifference]:
    """Yield a difference for everything that both records have, in causal order, also if it is 0."""
    limits = RoundingLimits.of(one, other, exact=exact)
    for role in common_roles(one, other):
        yield from _of_prints(one, other, role, BEFORE, limits)
    if (rows := _rows(one.batch, other.batch)) is not None:
        yield rows
        return
    columns = one.batch.columns().keys() & other.batch.columns().keys()
    for phase, names in _COLUMNS.items():
        for name in (name for name in names if name in columns):
            yield _of_column(phase, name, one.batch, other.batch, limits.scores)
    for role in common_roles(one, other):
        yield from _of_updates(one, other, role, limits)
        yield from _of_prints(one, other, role, AFTER, limits)


def common_roles(one: StepRecord, other: StepRecord) -> list[str]:
    return [role for role in one.facts["updates"] if role in other.facts["updates"]]


def _rows(one: DataProto, other: DataProto) -> StepDifference | None:
    ids = one.row_ids.tolist(), other.row_ids.tolist()
    if ids[0] == ids[1]:
        return None
    at = next((n for n, pair in enumerate(zip(*ids, strict=False)) if pair[0] != pair[1]), min(map(len, ids)))
    values = [f"row id {rows[at]}" if at < len(rows) else f"only {len(rows)} rows" for rows in ids]
    return StepDifference("rollout", "row ids", f"row {at}", (values[0], values[1]), math.inf, 0.0)


Numbers = npt.NDArray[np.float64]


def _of_column(phase: str, name: str, one: DataProto, other: DataProto, limit: float) -> StepDifference:
    """Compare a column: whole numbers exactly, others relative to their size if that is above 1."""
    columns = one[name], other[name]
    if isinstance(columns[0], Jagged) and (columns[0].lengths != columns[1].lengths).any():
        row = int((columns[0].lengths != columns[1].lengths).argmax())
        tokens = _first_token(*(column.rows()[row] for column in columns))
        place = f"row {row} (id {one.row_ids[row]}), {tokens}"
        values = tuple(f"{column.lengths[row]} tokens" for column in columns)
        return StepDifference(phase, f"column {name}", place, (values[0], values[1]), math.inf, 0.0)
    tensors = [column.values if isinstance(column, Jagged) else column for column in columns]
    a, b = (tensor.double().numpy().reshape(len(tensor), -1) for tensor in tensors)
    sizes = _relative(a, b)
    allowed = limit if tensors[0].is_floating_point() else 0.0
    too_large = ~(sizes <= allowed)
    at = int(too_large.argmax() if too_large.any() else sizes.argmax()) if sizes.size else 0
    if not sizes.size:
        return StepDifference(phase, f"column {name}", "no values", ("", ""), 0.0, allowed)
    place, (line, column) = _place(columns[0], one, at // a.shape[1]), divmod(at, a.shape[1])
    values = f"{a[line, column]:.9g}", f"{b[line, column]:.9g}"
    note = f"{int(too_large.sum())} of {sizes.size} values" if too_large.any() else ""
    return StepDifference(phase, f"column {name}", place, values, float(sizes.flat[at]), allowed, note)


def _relative(a: Numbers, b: Numbers) -> Numbers:
    with np.errstate(invalid="ignore"):
        sizes: Numbers = np.abs(a - b) / np.maximum(1.0, np.abs(a))
    sizes[(a == b) | (np.isnan(a) & np.isnan(b))] = 0.0
    return sizes


def _first_token(one: torch.Tensor, other: torch.Tensor) -> str:
    size = min(len(one), len(other))
    different = (one[:size] != other[:size]).flatten()
    if not bool(different.any()):
        return f"token {size}"
    at = int(different.int().argmax())
    return f"token {at} is {one.flatten()[at]:g} and {other.flatten()[at]:g}"


def _place(column: Any, batch: DataProto, at: int) -> str:
    if not isinstance(column, Jagged):
        return f"row {at} (id {batch.row_ids[at]})"
    ends = np.cumsum(column.lengths)
    row = int(np.searchsorted(ends, at, side="right"))
    return f"row {row} (id {batch.row_ids[row]}), token {at - (int(ends[row - 1]) if row else 0)}"


def _of_updates(one: StepRecord, other: StepRecord, role: str, limits: RoundingLimits) -> Iterator[StepDifference]:
    updates = one.facts["updates"][role], other.facts["updates"][role]
    if len(updates[0]) != len(updates[1]):
        values = tuple(f"{len(listed)} updates" for listed in updates)
        yield StepDifference(f"update of the {role}", "number of updates", "", (values[0], values[1]), math.inf, 0.0)
        return
    scale = max(1.0, _largest_advantage(one.batch)) if role == "actor" else 1.0
    for number, pair in enumerate(zip(*updates, strict=True)):
        phase = f"update {number + 1} of the {role}"
        if pair[0]["rows"] != pair[1]["rows"]:
            at = next(n for n, rows in enumerate(zip(*(u["rows"] for u in pair), strict=True)) if rows[0] != rows[1])
            ids = [f"row id {update['rows'][at]}" for update in pair]
            yield StepDifference(phase, "order of the rows", f"place {at}", (ids[0], ids[1]), math.inf, 0.0)
            return
        yield from _of_prints(one, other, role, Moment(1, number), limits)
        for name in _FIGURES:
            yield _of_figure(phase, name, pair[0]["figures"], pair[1]["figures"], limits, scale)


def _of_figure(
    phase: str, name: str, one: Mapping[str, Any], other: Mapping[str, Any], limits: RoundingLimits, scale: float
) -> StepDifference:
    a, b = float(one[name]), float(other[name])
    limit = {"loss": limits.loss, "grad_norm": limits.norm}.get(name, 0.0)
    size = max(scale, abs(a)) if name == "loss" else max(abs(a), abs(b), 1e-30)
    difference = 0.0 if a == b or (math.isnan(a) and math.isnan(b)) else abs(a - b) / size
    return StepDifference(phase, name, "", (f"{a:.9g}", f"{b:.9g}"), difference, limit)


def _largest_advantage(batch: DataProto) -> float:
    if "advantages" not in batch.columns():
        return 1.0
    values = batch.values("advantages")
    return float(values.abs().max()) if values.numel() else 1.0


def _of_prints(
    one: StepRecord, other: StepRecord, role: str, moment: Moment, limits: RoundingLimits
) -> Iterator[StepDifference]:
    phase = f"update {moment.update + 1} of the {role}" if moment.order == 1 else f"{moment} of the {role}"
    for found in print_differences(one, other, role, moment, limits):
        yield StepDifference(phase, found.kind, _tensor(found), found.values, found.size, found.limit, found.note)


def _tensor(found: PrintDifference) -> str:
    return f"{found.name} on {found.ranks}" if found.ranks else found.name
