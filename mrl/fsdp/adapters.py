"""Low-rank adapters on the linear layers of a model that torch shards: y = W x becomes y = W x + scale * B A x.

`attach` adds A and B to the layers before the model is sharded, so torch gathers them and reduces their gradients
together with the weights of their layer. A rank holds rows of each A, and the rows of each B that belong to its rows of
the weight. A model that is frozen has its own weights in the dtype of the computation, and its adapters in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear

from mrl.config.lora import LoraConfig
from mrl.engine.first_adapters import ReadBox
from mrl.engine.groups import ParallelGroups
from mrl.engine.merging import Key, MergedWeights
from mrl.errors import ModelError
from mrl.fsdp.model import OTHER, RowModel
from mrl.fsdp.weights import HeldRows, ParameterPlace, ShardedWeights, places_of
from mrl.models.adapters import AdapterPair, adapter_names, adapter_tensors, check_sharded_targets
from mrl.models.regions import whole
from mrl.models.row_shards import box_of, rows_of_rank
from mrl.models.spec import ModelSpec
from mrl.models.table import Head, Shard, hf_tensors


def attach(spec: ModelSpec, lora: LoraConfig, head: Head, model: RowModel) -> None:
    """Add adapters to a model without weights, and freeze everything else except a score head."""
    check_sharded_targets(spec, lora)
    model.requires_grad_(False)
    if head == "score":
        model.score_head.weight.data = model.score_head.weight.data.float()
        model.score_head.requires_grad_(True)
    places, tensors = places_of(model, hf_tensors(spec, head)), adapter_tensors(spec, lora)
    for hf, place in places.items():
        if adapter_names(hf)[0] in tensors:
            module = _linear_layer(model, hf, place)
            for name, adapter in zip(("lora_a", "lora_b"), adapter_names(hf), strict=True):
                values = torch.empty(tensors[adapter], dtype=torch.float32, device="meta")
                module.register_parameter(name, torch.nn.Parameter(values))
            module.register_forward_hook(partial(_add, model, lora.scale))


def _linear_layer(model: RowModel, hf: str, place: ParameterPlace) -> torch.nn.Module:
    """Return the layer of a weight. Refuse layers that compute something else, and modules with other names in peft."""
    name, kind = place.name.removesuffix(".weight"), model.causal.config.model_type
    module: torch.nn.Module = model.causal.get_submodule(name)
    if type(module) is not torch.nn.Linear:
        what = f"{name} of {kind} is a {type(module).__name__}, not a plain linear layer: it cannot have adapters"
        raise ModelError(what, fix=f"remove {name.rpartition('.')[2]} from lora.targets, or {OTHER}")
    if place.name != hf:
        what = f"{hf} of the files is {place.name} in transformers, so peft would not find its adapters"
        raise ModelError(what, fix=OTHER)
    return module


def _add(model: RowModel, scale: float, module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """Return the output of a linear layer with the product of its adapters added; without gradients, in place."""
    if not model.applies_adapters:
        return output
    low = linear(inputs[0], cast(Tensor, module.lora_a)) * scale
    added = linear(low, cast(Tensor, module.lora_b))
    return output + added if torch.is_grad_enabled() else output.add_(added)


class ShardedAdapters:
    """The adapters of a role on this rank."""

    def __init__(
        self, weights: ShardedWeights, spec: ModelSpec, lora: LoraConfig, group: dist.ProcessGroup, compute: torch.dtype
    ) -> None:
        self.lora, self.tensors = lora, adapter_tensors(spec, lora)
        self._model, self._compute = weights.model, compute
        self.parameters: dict[str, DTensor] = {}
        """The adapters by their names in the model."""
        self._names: dict[str, str] = {}
        """Their names in the model, by PEFT's."""
        self.held_rows: list[HeldRows] = []
        self._pairs: list[tuple[AdapterPair, str, HeldRows]] = []
        """The adapters of the weights of which the rank holds rows: PEFT's name of A, and the rows of B."""
        own = {held.shard.name: held.shard for held in weights.held}
        for hf, place in weights.places.items():
            if adapter_names(hf)[0] not in self.tensors:
                continue
            module = place.name.removesuffix(".weight")
            for adapter, name in zip(adapter_names(hf), (f"{module}.lora_a", f"{module}.lora_b"), strict=True):
                self.parameters[name] = cast(DTensor, weights.model.causal.get_parameter(name))
                self._names[adapter] = name
                self.held_rows += self._rows(adapter, name, group)
            if hf in own:
                b = self.held_rows[-1]
                (rows, _), pair = b.shard.shape, (own[hf], b.shard)
                assert own[hf].pieces[0].source[0] == b.shard.pieces[0].source[0], f"B of {hf} has other rows"
                outputs = ((0, rows),)
                self._pairs.append((AdapterPair(*pair, b.shard, (rows,), outputs, None), adapter_names(hf)[0], b))
        self.rows_of = {held.shard.name: held for held in self.held_rows}
        """The rank's parts of adapters, by PEFT's names."""

    def _rows(self, adapter: str, name: str, group: dist.ProcessGroup) -> Iterator[HeldRows]:
        shape = self.tensors[adapter]
        first, stop = rows_of_rank(shape[0], group.rank(), group.size())
        if first < stop:
            shard = box_of(adapter, shape, ((first, stop), *whole(shape[1:])))
            yield HeldRows(shard, ParameterPlace(name), first)

    @property
    def is_on(self) -> bool:
        return self._model.applies_adapters

    @contextmanager
    def off(self) -> Iterator[None]:
        """Compute with the frozen model alone, for the block. Only forward passes are possible."""
        self._model.applies_adapters = False
        try:
            yield
        finally:
            self._model.applies_adapters = True

    def held(self) -> Iterator[tuple[Shard, Tensor]]:
        """Yield each part of an adapter that the rank holds."""
        for held in self.held_rows:
            yield held.shard, held.of(self._local(held))

    def _local(self, held: HeldRows) -> Tensor:
        return cast(DTensor, self.parameters[held.place.name].detach()).to_local()

    def multiplied(self, held: HeldRows) -> Tensor:
        """Return the rank's rows of an adapter as they are multiplied."""
        return held.of(self._local(held)).to(self._compute)

    @torch.no_grad()
    def fill(self, read: ReadBox) -> None:
        for shard, local in self.held():
            (piece,) = shard.pieces
            local.copy_(read(piece.hf, piece.source))

    def whole(self, adapter: str) -> Tensor:
        """Return an adapter as it is multiplied. Call this on all ranks that share a copy."""
        sharded = cast(DTensor, self.parameters[self._names[adapter]].detach())
        return sharded.full_tensor().to(self._compute)

    def gathered(self, groups: ParallelGroups) -> dict[str, Tensor]:
        """Return all adapters by PEFT's names, on the host of the first rank; nothing on the others. Call this on all
        ranks."""
        tensors = {}
        for adapter in self.tensors:
            values = self.whole(adapter)
            if groups.at.rank == 0:
                tensors[adapter] = values.to("cpu", copy=True)
        return tensors

    def merged(self, base: Mapping[Key, Tensor], engine_dtype: torch.dtype) -> MergedWeights:
        """Return the weights of this rank with the adapters added, for engines of that dtype."""
        return _MergedRows(base, self, self._pairs, engine_dtype)


class _MergedRows(MergedWeights):
    """A rank's rows of the weights. Each A is gathered before the weights are sent."""

    def __init__(
        self,
        base: Mapping[Key, Tensor],
        adapters: ShardedAdapters,
        pairs: Sequence[tuple[AdapterPair, str, HeldRows]],
        engine_dtype: torch.dtype,
    ) -> None:
        super().__init__(base, (), adapters.lora.scale, engine_dtype)
        self._all = adapters
        self._pairs = {(pair.weight.chunk, pair.weight.name): (pair, a, b) for pair, a, b in pairs}
        self._adapted = self._pairs.keys()
        self._firsts: dict[str, Tensor] = {}

    def begin(self) -> None:
        super().begin()
        self._firsts = {name: self._all.whole(name) for name in self._all.tensors if name.endswith(".lora_A.weight")}

    def forget(self) -> None:
        super().forget()
        self._firsts.clear()

    def _factors(self, key: Key) -> tuple[AdapterPair, Tensor, Tensor]:
        assert self._firsts, "each A was gathered by `begin`"
        pair, a, b = self._pairs[key]
        return pair, self._firsts[a], self._all.multiplied(b)
