"""Weights between the tensors of Hugging Face's files and the shards of a rank.

A rank holds rows of most tensors. Where transformers stacks the matrices of experts in one parameter, it holds whole
experts, whose own matrices are views of the stack.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mrl.errors import ModelError, problem_list
from mrl.fsdp.model import RowModel
from mrl.models.adapters import ADAPTER_SUFFIXES
from mrl.models.hf_reader import HfReader
from mrl.models.regions import Shape, whole
from mrl.models.row_shards import box_of, row_shards, rows_of_rank
from mrl.models.table import SCORE, Shard

_OPERATIONS = (["MergeModulelist"], ["MergeModulelist", "Concatenate"])
"""Conversions of experts that are supported: matrices of a layer stacked, and gates above ups."""


@dataclass(frozen=True)
class ParameterPlace:
    """Where the model has a tensor of the files: a parameter or buffer, and for an expert its part of the stack."""

    name: str
    expert: int | None = None
    rows: tuple[int, int] | None = None


@dataclass(frozen=True)
class HeldRows:
    """A rank's part of one tensor of the files."""

    shard: Shard
    place: ParameterPlace
    first: int
    """First row, or first expert, of the parameter on this rank."""

    def of(self, local: Tensor) -> Tensor:
        """Return the part of a tensor that has the shape of the rank's share of the parameter."""
        if self.place.expert is None:
            return local[: self.shard.shape[0]] if self.shard.shape else local
        assert self.place.rows is not None, "an expert has rows"
        return local[self.place.expert - self.first, slice(*self.place.rows)]


class ShardedWeights:
    """The parts of all tensors of the files on this rank."""

    def __init__(self, model: RowModel, tensors: Mapping[str, Shape], rank: int, size: int) -> None:
        self.model, self.tensors = model, tensors
        self.parameters = {
            _own_name(name): parameter
            for name, parameter in model.named_parameters()
            if not name.endswith(ADAPTER_SUFFIXES)  # they are not in the files
        }
        self.buffers = {_own_name(name): buffer for name, buffer in model.named_buffers()}
        self.places = places_of(model, tensors)
        self._rank, self._size = rank, size
        self._check()
        self.held = list(self._held(rank, size))
        self.rows_of = {held.shard.name: held for held in self.held}

    def local(self, name: str) -> Tensor:
        """Return this rank's share of a parameter, or a buffer."""
        if name in self.buffers:
            return self.buffers[name]
        return cast(DTensor, self.parameters[name].data).to_local()

    def shards(self) -> Iterator[tuple[Shard, Tensor]]:
        for held in self.held:
            yield held.shard, held.of(self.local(held.place.name))

    def decayed(self) -> set[str]:
        """Return the parameters that weight decay applies to: matrices."""
        matrices = {place.name for name, place in self.places.items() if len(self.tensors[name]) > 1}
        return {name for name in matrices if not name.endswith(".bias")}

    @torch.no_grad()
    def load(self, reader: HfReader) -> None:
        """Fill the shards of this rank from the files. Only the rank's parts are read."""
        sums = []
        for shard, tensor in self.shards():
            (piece,) = shard.pieces
            if shard.name == SCORE and SCORE not in reader:
                tensor.zero_()  # the caller made sure that a new head is expected
                continue
            tensor.copy_(reader.read(piece.hf, piece.source))
            sums.append((shard, tensor, tensor.sum(dtype=torch.float32)))
        if sums and not torch.stack([total for *_, total in sums]).isfinite().all():
            for shard, tensor, _ in sums:
                if num := int((~tensor.isfinite()).sum()):
                    fix = "download the file again, or use another checkpoint"
                    raise ModelError(
                        f"{num} numbers of {shard.name} are NaN or infinite", where=str(reader.path), fix=fix
                    )

    def check_table(self, untrained: Collection[str]) -> None:
        """Raise an error if the rank holds other parts than the transfer to engines expects."""
        expected = {shard.name: shard for shard in row_shards(self.tensors, untrained, self._rank, self._size)}
        held = {held.shard.name: held.shard for held in self.held}
        if different := sorted(name for name in expected.keys() | held.keys() if expected.get(name) != held.get(name)):
            raise ModelError(f"{different[0]} is sharded in another way than the table says", fix="report this model")

    def _held(self, rank: int, size: int) -> Iterator[HeldRows]:
        for name, place in self.places.items():
            shape = self.tensors[name]
            if place.name in self.buffers:
                yield HeldRows(box_of(name, shape, whole(shape), trained=False), place, 0)
                continue
            first, stop = rows_of_rank(self.parameters[place.name].shape[0], rank, size)
            if place.expert is not None:
                if first <= place.expert < stop:
                    yield HeldRows(box_of(name, shape, whole(shape)), place, first)
            elif first < stop:
                yield HeldRows(box_of(name, shape, ((first, stop), *whole(shape[1:]))), place, first)

    def _check(self) -> None:
        """Raise an error if the files and the model do not have the same numbers."""
        problems = []
        counts = dict.fromkeys(self.parameters, 0)
        for name, place in self.places.items():
            tensor = self.parameters.get(place.name, self.buffers.get(place.name))
            if tensor is None:
                problems.append(f"{name} of the files has no place in the model")
                continue
            shape = tuple(tensor.shape)
            if place.expert is not None and place.rows is not None:
                shape = (place.rows[1] - place.rows[0], *shape[2:])
            if shape != self.tensors[name]:
                problems.append(f"{name} is {list(self.tensors[name])} in the files and {list(shape)} in the model")
            if place.name in counts:
                counts[place.name] += torch.Size(shape).numel()
        for name, count in counts.items():
            if (whole_count := self.parameters[name].numel()) != count:
                problems.append(f"{name} of the model has {whole_count} numbers, of which the files have {count}")
        if problems:
            fix = "check that config.json and the weights belong together, and that the head is right"
            raise ModelError(f"{len(problems)} tensors do not fit:{problem_list(problems)}", fix=fix)


def _own_name(name: str) -> str:
    return name.removeprefix("causal.") if name.startswith("causal.") else name.replace("score_head.", "score.")


def places_of(model: RowModel, tensors: Iterable[str]) -> dict[str, ParameterPlace]:
    """Return the place of each tensor of the files, by the renamings and conversions of transformers."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    causal = model.causal
    transforms = get_model_conversion_mapping(causal, add_legacy=False)
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    renamings = [transform for transform in transforms if not isinstance(transform, WeightConverter)]
    entries = causal.state_dict()
    places = {}
    for name in tensors:
        if name == SCORE:
            places[name] = ParameterPlace(SCORE)
            continue
        target, pattern = rename_source_key(name, renamings, converters, causal.base_model_prefix, entries)
        places[name] = (
            ParameterPlace(target) if pattern is None else _in_stack(name, target, pattern, converters, entries)
        )
    return places


def _in_stack(
    name: str, target: str, pattern: str, converters: list[Any], entries: Mapping[str, Tensor]
) -> ParameterPlace:
    """Return the place of an expert's matrix in the stack of its layer."""
    (converter,) = (transform for transform in converters if pattern in transform.source_patterns)
    operations = [type(operation).__name__ for operation in converter.operations]
    axes = [operation.dim for operation in converter.operations if hasattr(operation, "dim")]
    number = re.search(r"\.experts\.(\d+)\.", name)
    if operations not in _OPERATIONS or axes != [0, 1][: len(axes)] or number is None or target not in entries:
        raise ModelError(f"transformers converts {name} by {' and '.join(operations)}, which mrl does not yet support")
    parts = len(converter.source_patterns)
    size, part = entries[target].shape[1] // parts, converter.source_patterns.index(pattern)
    return ParameterPlace(target, int(number[1]), (part * size, (part + 1) * size))
