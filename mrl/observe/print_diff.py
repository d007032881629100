"""Comparison of the prints of tensors in two records, rank by rank in equal layouts, otherwise for whole tensors.

The size of a difference is estimated from sketches: the root of the mean square of their differences. It is within a
factor of about two of the norm of the tensors' difference.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mrl.protocol.step_record import AFTER, BEFORE, Moment, StepRecord, TensorPrint

_EPSILON = {"float32": 2.0**-23, "bfloat16": 2.0**-8}
_FLOOR = 0.01
"""Share of the norm of all tensors of a kind that is added to a tensor's own: some gradients are only rounding."""
_LAYER = re.compile(r"layers\.(\d+)")
_FORWARD, _MODULUS, _MOST_RANKS = ("input", "output"), 1 << 64, 8


@dataclass(frozen=True)
class RoundingLimits:
    """Largest differences that rounding explains, all relative; see docs/inside.md for their origin."""

    scores: float
    loss: float
    norm: float
    tensor: float
    """Of a tensor of gradients or moments, relative to its norm."""
    update: float
    """Of weights, relative to the norm of their update: Adam's step is not a continuous function of the gradient."""
    exact: bool

    @classmethod
    def of(cls, one: StepRecord, other: StepRecord, *, exact: bool) -> RoundingLimits:
        """Return the limits for the wider rounding of both records. Errors grow with the root of the layers."""
        if exact:
            return cls(0.0, 0.0, 0.0, 0.0, 0.0, True)
        dtype = "float32" if {r.facts["config"]["actor"]["dtype"] for r in (one, other)} == {"float32"} else "bfloat16"
        layers = [int(number[1]) for *_, part in one.prints if (number := _LAYER.search(part.name))]
        rounding = _EPSILON[dtype] * math.sqrt(1 + max(layers, default=0))
        scores, loss, tensor = (100, 100, 400) if dtype == "float32" else (6, 1, 10)
        tensor_limit = tensor * rounding
        return cls(scores * rounding, loss * rounding, tensor_limit, tensor_limit, math.sqrt(tensor_limit), False)


@dataclass(frozen=True)
class PrintDifference:
    kind: str
    name: str
    ranks: str
    values: tuple[str, str]
    size: float
    limit: float
    note: str = ""


@dataclass(frozen=True)
class _Whole:
    """A tensor, or its part on one rank."""

    digest: int
    squares: float
    sketch: Sequence[float]

    @property
    def norm(self) -> float:
        return math.sqrt(max(self.squares, 0.0))

    def distance(self, other: _Whole) -> float:
        pairs = zip(self.sketch, other.sketch, strict=True)
        return math.sqrt(sum((a - b) ** 2 for a, b in pairs) / len(self.sketch))


Key = tuple[int, str]
"""Rank, or -1 for all of them, and name."""
Parts = Mapping[Key, _Whole]


def print_differences(
    one: StepRecord, other: StepRecord, role: str, moment: Moment, limits: RoundingLimits
) -> Iterator[PrintDifference]:
    """Yield one difference for each kind of tensor. In equal layouts, the first activation that differs is named."""
    places = _places(one, role)
    by_rank = (places, _strategy(one, role)) == (_places(other, role), _strategy(other, role))
    sides = _by_kind(one, role, moment, by_rank), _by_kind(other, role, moment, by_rank)
    if by_rank and (found := _first_activation(sides, places, limits)) is not None:
        yield found
    before = _by_kind(one, role, BEFORE, by_rank) if moment == AFTER else {}
    for kind in sides[0]:
        if kind in sides[1] and kind not in _FORWARD:
            yield _of_kind(kind, (sides[0][kind], sides[1][kind]), before.get(kind, {}), places, limits)


def _places(record: StepRecord, role: str) -> list[dict[str, int]]:
    return [{axis: at for axis, at in rank.items() if axis != "host"} for rank in record.facts["ranks"][role]]


def _strategy(record: StepRecord, role: str) -> str:
    return str(record.facts["config"][role].get("strategy", "megatron"))


def _by_kind(record: StepRecord, role: str, moment: Moment, by_rank: bool) -> dict[str, dict[Key, _Whole]]:
    kinds: dict[str, dict[Key, _Whole]] = defaultdict(dict)
    for whose, when, rank, part in record.prints:
        if whose == role and when == moment and (by_rank or (part.is_first_copy and part.kind not in _FORWARD)):
            key = (rank if by_rank else -1, part.name)
            kinds[part.kind][key] = _sum(kinds[part.kind].get(key), part)
    return kinds


def _sum(known: _Whole | None, part: TensorPrint) -> _Whole:
    if known is None:
        return _Whole(part.digest % _MODULUS, part.squares, part.sketch)
    sketch = [a + b for a, b in zip(known.sketch, part.sketch, strict=True)]
    return _Whole((known.digest + part.digest) % _MODULUS, known.squares + part.squares, sketch)


def _size(a: _Whole, b: _Whole, scale: float, limits: RoundingLimits) -> float:
    """Return the relative difference: 0 for equal bits, and never 0 for other bits if the comparison is exact."""
    if a.digest == b.digest:
        return 0.0
    distance = a.distance(b)
    if not math.isfinite(distance):
        return math.inf
    size = distance / scale if scale else (math.inf if distance else 0.0)
    return max(size, 1e-300) if limits.exact else size


def _of_kind(
    kind: str,
    sides: tuple[Parts, Parts],
    before: Parts,
    places: Sequence[Mapping[str, int]],
    limits: RoundingLimits,
) -> PrintDifference:
    """Return the largest difference of a kind, and the number of tensors whose difference is too large."""
    limit = limits.update if kind == "main_weight" and before else limits.tensor
    if only := sides[0].keys() ^ sides[1].keys():
        key = min(only)
        sided = ("present", "missing") if key in sides[0] else ("missing", "present")
        return PrintDifference(kind, key[1], _described([key[0]], places), sided, math.inf, limit)
    keys = [*sides[0]]
    own = {key: _scale(kind, sides[0][key], before.get(key), limits) for key in keys}
    floor = _FLOOR * math.sqrt(sum(norm**2 for norm in own.values()))
    sizes = {key: _size(sides[0][key], sides[1][key], own[key] + floor, limits) for key in keys}
    key = max(keys, key=lambda key: sizes[key])
    too_large = [key for key in keys if not sizes[key] <= limit]
    ranks = sorted({rank for rank, _ in too_large} or {key[0]})
    note = f"{len({name for _, name in too_large})} of {len({name for _, name in keys})} tensors" if too_large else ""
    norms = f"norm {sides[0][key].norm:.9g}", f"norm {sides[1][key].norm:.9g}"
    return PrintDifference(kind, key[1], _described(ranks, places), norms, sizes[key], limit, note)


def _scale(kind: str, after: _Whole, before: _Whole | None, limits: RoundingLimits) -> float:
    """Return what a difference is relative to: the norm of a tensor, or of the update of main weights.

    Weights are rounded main weights, so both apply to them.
    """
    if before is None or not kind.endswith("weight"):
        return after.norm
    update = after.distance(before)
    return update if kind == "main_weight" or limits.exact else after.norm + update * limits.update / limits.tensor


def _first_activation(
    sides: tuple[Mapping[str, Parts], Mapping[str, Parts]], places: Sequence[Mapping[str, int]], limits: RoundingLimits
) -> PrintDifference | None:
    """Return the first activation that differs too much, or otherwise the largest difference.

    Layers come one after another. The ranks that have a layer call the same modules in the same order.
    """
    found: dict[tuple[float, int], list[tuple[float, int, str, str]]] = defaultdict(list)
    positions: Counter[int] = Counter()
    for rank, (kind, name) in _calls(sides[0]):
        a, b = sides[0][kind][rank, name], sides[1].get(kind, {}).get((rank, name))
        order = _depth(name), positions[rank]
        positions[rank] += 1
        if b is not None:
            found[order].append((_size(a, b, a.norm, limits), rank, kind, name))
    if not found:
        return None
    first = next((order for order in sorted(found) if max(found[order])[0] > limits.tensor), None)
    order = max(found, key=lambda order: max(found[order])) if first is None else first
    size, rank, kind, name = max(found[order])
    ranks = sorted(other for measured, other, *_ in found[order] if measured > limits.tensor or other == rank)
    norms = f"norm {sides[0][kind][rank, name].norm:.9g}", f"norm {sides[1][kind][rank, name].norm:.9g}"
    return PrintDifference(f"activation ({kind})", name, _described(ranks, places), norms, size, limits.tensor)


def _depth(name: str) -> float:
    """Return the layer of a module, -1 for the embedding, and infinity after all layers."""
    layer = _LAYER.match(name)
    return int(layer[1]) if layer else -1 if name.startswith(("embedding", "rotary")) else math.inf


def _calls(side: Mapping[str, Parts]) -> list[tuple[int, tuple[str, str]]]:
    """Return the inputs and outputs of modules in the order of the calls: the input of each, then its output."""
    calls = ((rank, kind, name) for rank, name in side.get("output", {}) for kind in _FORWARD)
    return [(rank, (kind, name)) for rank, kind, name in calls if (rank, name) in side.get(kind, {})]


def _described(ranks: Sequence[int], places: Sequence[Mapping[str, int]]) -> str:
    """Return ranks with their coordinates on the axes that the layout uses; nothing for whole tensors."""
    if not ranks or ranks[0] < 0:
        return ""
    used = [axis for axis in ("tp", "cp", "dp", "pp", "ep") if len({place[axis] for place in places}) > 1]
    named = [f"{rank} ({' '.join(f'{axis} {places[rank][axis]}' for axis in used)})" for rank in ranks[:_MOST_RANKS]]
    more = f" and {len(ranks) - _MOST_RANKS} more" if len(ranks) > _MOST_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(named)}{more}".replace(" ()", "")
