"""Prints of what a rank holds and computes: weights, optimizer state, gradients, and activations of an update.

A print is in the coordinates of Hugging Face's tensors, so the prints of two layouts can be compared: digests and
sketches of parts add up to those of the whole tensor. A sketch is a sum with a random sign for each place. So the
mean square of the difference of two sketches estimates the squared norm of the difference of two tensors, without
either of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mrl.engine.checkpoint_files import flat_shard_regions
from mrl.models.regions import Region, extent, slices
from mrl.protocol.step_record import TensorPrint

if TYPE_CHECKING:
    from mrl.engine.engine import MegatronEngine

SKETCHES = 16
_FIRST_SIGN_BIT = 24
_FACTORS = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9)
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ELEMENTS_AT_ONCE = 1 << 22
_KINDS = {"param": "main_weight"}
_LAYER = re.compile(r"(?:.*\.)?layers\.\d+$")


@dataclass
class _Sums:
    """Sums over the parts of a tensor."""

    is_first_copy: bool
    count: int
    digest: Tensor
    squares: Tensor
    sketch: Tensor

    def add(self, other: _Sums) -> None:
        self.count += other.count
        self.digest, self.squares, self.sketch = (
            self.digest + other.digest,
            self.squares + other.squares,
            self.sketch + other.sketch,
        )


@dataclass
class Prints:
    """Prints by kind and name, in the order in which they were added."""

    _sums: dict[tuple[str, str], _Sums] = field(default_factory=dict)

    def __contains__(self, key: tuple[str, str]) -> bool:
        return key in self._sums

    def add(self, kind: str, name: str, values: Tensor, box: Region, *, is_first_copy: bool = True) -> None:
        """Add the values of a box of a tensor."""
        sums = _measured(values.detach().reshape(extent(box)), box, is_first_copy)
        if (known := self._sums.get((kind, name))) is None:
            self._sums[kind, name] = sums
        else:
            known.add(sums)

    def read(self) -> list[TensorPrint]:
        return [
            TensorPrint(
                kind,
                name,
                sums.count,
                int(sums.digest),
                float(sums.squares),
                tuple(sums.sketch.tolist()),
                sums.is_first_copy,
            )
            for (kind, name), sums in self._sums.items()
        ]


@torch.no_grad()
def _measured(values: Tensor, box: Region, is_first_copy: bool) -> _Sums:
    """Return the sums of a box. Its last axis is a column, and all others together are its row."""
    *outer, inner = box if len(box) > 1 else (*box, (0, 1))
    columns = _numbers(*inner, 0, values.device)
    rows = torch.zeros(1, dtype=torch.int64, device=values.device)
    for axis, (start, stop) in enumerate(outer, 1):
        rows = (rows[:, None] ^ _numbers(start, stop, axis, values.device)).flatten()
    matrix, column_signs = values.reshape(len(rows), len(columns)), _signs(columns)
    digest = torch.zeros((), dtype=torch.int64, device=values.device)
    squares, sketch = digest.double(), torch.zeros(SKETCHES, dtype=torch.float64, device=values.device)
    num_rows = max(1, _ELEMENTS_AT_ONCE // len(columns))
    for at in range(0, len(rows), num_rows):
        part, numbers = matrix[at : at + num_rows].contiguous(), rows[at : at + num_rows]
        bits, wide = part.view(_WORDS[part.element_size()]).to(torch.int64), part.double()
        digest += ((bits * (columns | 1)).sum(1) * (numbers | 1)).sum()
        squares += wide.square().sum()
        sketch += ((_signs(numbers) @ wide) * column_signs).sum(1)
    return _Sums(is_first_copy, values.numel(), digest, squares, sketch)


def _numbers(start: int, stop: int, axis: int, device: torch.device) -> Tensor:
    """Return a pseudo-random number for each place on an axis."""
    mixed = 8 * torch.arange(start + 1, stop + 1, dtype=torch.int64, device=device) + axis
    for factor in _FACTORS:
        mixed = mixed * factor
        mixed = mixed ^ (mixed >> 31)
    return mixed


def _signs(numbers: Tensor) -> Tensor:
    """Return a sign for each sketch and number [sketches, numbers]."""
    bits = torch.arange(_FIRST_SIGN_BIT, _FIRST_SIGN_BIT + SKETCHES, device=numbers.device)
    return 1.0 - 2.0 * ((numbers >> bits[:, None]) & 1).double()


@torch.no_grad()
def state_prints(engine: MegatronEngine) -> list[TensorPrint]:
    """Return prints of the weights, and of the optimizer state that this rank owns."""
    engine.memory.need("parameters", "optimizer")
    prints, state = Prints(), engine.training_state
    for shard, tensor in state.shards():
        is_first = state.writes(shard)
        for piece in shard.pieces:
            values = tensor.detach()[slices(piece.target)]
            prints.add("weight", piece.hf, values, piece.source, is_first_copy=state.counts(shard))
        owned = state.owned(shard, tensor) if shard.trained else None
        if owned is not None:
            for name, box, views in flat_shard_regions(shard, owned.start, owned.state):
                for kind, view in views.items():
                    prints.add(_KINDS.get(kind, kind), name, view, box, is_first_copy=is_first)
    return prints.read()


class UpdateWatch:
    """Prints of each update: of its gradients, and of the activations of its first micro-batch."""

    def __init__(self, *, gradients: bool, activations: bool) -> None:
        self._gradients, self._activations = gradients, activations
        self.updates: list[list[TensorPrint]] = []

    @contextmanager
    def watching(self, engine: MegatronEngine) -> Iterator[None]:
        """Watch the forward and backward passes of an update in this block."""
        prints = Prints()
        with ExitStack() as stack:
            for module, note in self._hooks(engine.models, prints):
                handle = module.register_forward_hook(note, with_kwargs=True)
                stack.callback(handle.remove)
            yield
        if self._gradients:
            _add_gradients(engine, prints)
        self.updates.append(prints.read())

    def _hooks(self, models: Sequence[Any], prints: Prints) -> Iterator[tuple[Any, Any]]:
        for model in models if self._activations else ():
            found = {name: m for name, m in model.named_modules() if _LAYER.match(name)}
            # Megatron counts the layers of a stage from 0, and has their numbers in the model.
            layers = {n: f"layers.{m.layer_number - 1}" if hasattr(m, "layer_number") else n for n, m in found.items()}
            for name, module in model.named_modules():
                is_leaf = not any(True for _ in module.children()) and "Identity" not in type(module).__name__
                if is_leaf or name in layers:
                    layer = next((prefix for prefix in layers if f"{name}.".startswith(f"{prefix}.")), None)
                    shown = name if layer is None else layers[layer] + name.removeprefix(layer)
                    yield module, partial(_note, prints, shown)


def _note(prints: Prints, name: str, module: Any, inputs: Any, options: dict[str, Any], output: Any) -> None:
    """Add the input and the output of a module, unless they are known from an earlier micro-batch."""
    for kind, values in (("input", (*inputs, *options.values())), ("output", _listed(output))):
        tensor = next((value for value in values if isinstance(value, Tensor) and value.is_floating_point()), None)
        if tensor is not None and tensor.numel() and (kind, name) not in prints:
            matrix = tensor.detach().reshape(-1, tensor.shape[-1])
            prints.add(kind, name, matrix, tuple((0, size) for size in matrix.shape))


def _listed(output: Any) -> tuple[Any, ...]:
    return output if isinstance(output, tuple) else (output,)


def _add_gradients(engine: MegatronEngine, prints: Prints) -> None:
    """Add the gradients that this rank's optimizer applies, after they were summed over ranks."""
    state = engine.training_state
    for shard, tensor in state.shards():
        owned = state.owned(shard, tensor) if shard.trained else None
        if owned is None:
            continue
        flat = state.gradient(shard, tensor).flatten()[owned.start : owned.start + len(owned.state["param"])]
        for name, box, views in flat_shard_regions(shard, owned.start, {"gradient": flat}):
            prints.add("gradient", name, views["gradient"], box, is_first_copy=state.writes(shard))
