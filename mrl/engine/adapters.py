"""Low-rank adapters on Megatron's linear layers: y = W x becomes y = W x + scale * B A x, with W frozen.

`adapter_product.py` computes the addition.
"""

from __future__ import annotations

import mrl.engine.with_megatron  # noqa: F401

# isort: split
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mrl.config.lora import LoraConfig
from mrl.engine.adapter_product import AdapterProduct, rows_of_outputs
from mrl.engine.base_digest import is_first_copy
from mrl.engine.first_adapters import ReadBox
from mrl.engine.merging import Key, MergedWeights
from mrl.engine.model import TokenModel
from mrl.engine.parallel import ParallelGroups
from mrl.engine.separate_norms import check_separate_norms
from mrl.engine.weights import rank_place
from mrl.models.adapters import AdapterPair, adapter_pairs, adapter_tensors
from mrl.models.regions import Region, Shape, slices
from mrl.models.spec import ModelSpec
from mrl.models.table import Head, Shard

_OF_EXPERT = re.compile(r"(.*\.mlp\.experts)\.local_experts\.(\d+)\.(linear_fc[12])")


class Adapters:
    """The adapters of a role on this rank. Creating them freezes everything else in the model, except a score head."""

    def __init__(
        self, chunks: Sequence[TokenModel], spec: ModelSpec, lora: LoraConfig, groups: ParallelGroups, head: Head
    ) -> None:
        self.lora, self._spec = lora, spec
        self.is_on = True
        self.is_selected = True
        """Whether this role is at work, if several roles have adapters on the same frozen model."""
        self._held: list[tuple[AdapterPair, torch.nn.Parameter, torch.nn.Parameter]] = []
        self._together: dict[int, list[AdapterProduct]] = {}
        """Products of experts that one layer multiplies together, in the order of the experts."""
        for chunk in chunks:
            chunk.requires_grad_(False)
            if chunk.pre_process:
                chunk.embedding.register_forward_hook(_with_gradient)
            if chunk.post_process and head == "score":
                chunk.score.requires_grad_(True)
        for pair in adapter_pairs(spec, lora, groups.parallel, rank_place(groups)):
            self._attach(chunks[pair.weight.chunk], pair, groups)
        for chunk in chunks:
            check_separate_norms(chunk)

    def _attach(self, chunk: TokenModel, pair: AdapterPair, groups: ParallelGroups) -> None:
        module, weight, expert = _linear_layer(chunk, pair.weight.name)
        assert tuple(getattr(module, weight).shape) == pair.weight.shape, f"{pair.weight.name} is not the table's"
        made: list[Any] = []
        prefix = "critic_" if hasattr(module, "lora_a") else expert  # the first adapters are the actor's
        for name, shard in (("lora_a", pair.a), ("lora_b", pair.b)):
            parameter: Any = torch.nn.Parameter(
                torch.empty(shard.shape, dtype=chunk.config.params_dtype, device=groups.device)
            )
            parameter.tensor_model_parallel = shard.split or shard.expert  # Megatron's mark for the gradient norm
            parameter.shared = shard.expert and not shard.split and groups.at.etp > 0  # the norm leaves copies out
            parameter.sequence_parallel = chunk.config.sequence_parallel and not (shard.split or shard.expert)
            if shard.expert:  # otherwise Megatron would reduce it over all data-parallel ranks
                parameter.allreduce = groups.parallel.ep == 1 and groups.parallel.etp == groups.parallel.tp
            module.register_parameter(prefix + name, parameter)
            made.append(parameter)
        self._held.append((pair, made[0], made[1]))
        rows, config = rows_of_outputs(pair), chunk.config
        product = AdapterProduct(
            *self._held[-1],
            self.lora.scale,
            config.sequence_parallel,
            None if rows is None else rows.to(groups.device),
            groups.etp if pair.weight.expert and groups.parallel.etp > 1 else None,
        )
        if not expert:
            module.register_forward_hook(partial(self._add, product))
            return
        if id(module) not in self._together:
            self._together[id(module)] = []
            module.register_forward_hook(partial(self._add_together, self._together[id(module)]))
        self._together[id(module)].append(product)

    @property
    def _applies(self) -> bool:
        return self.is_on and self.is_selected

    def _add(
        self, product: AdapterProduct, module: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor | None]
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output of a linear layer with the addition of its adapters."""
        if not self._applies:
            return output
        return product.add_to(output[0], inputs[0]), output[1]

    def _add_together(
        self,
        products: Sequence[AdapterProduct],
        module: Any,
        inputs: tuple[Tensor, list[int]],
        output: tuple[Tensor, Tensor | None],
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output of experts that are multiplied together: their tokens lie one expert after another."""
        if not self._applies:
            return output
        tokens, counts = inputs
        parts = zip(products, torch.split(output[0], counts), torch.split(tokens, counts), strict=True)
        return torch.cat([product.add_to(value, x) for product, value, x in parts]), output[1]

    @contextmanager
    def off(self) -> Iterator[None]:
        """Compute with the frozen model alone, for the block. Only forward passes are possible."""
        self.is_on = False
        try:
            yield
        finally:
            self.is_on = True

    @property
    def tensors(self) -> dict[str, Shape]:
        """Return the names and shapes of all adapters of the model."""
        return adapter_tensors(self._spec, self.lora)

    def held(self) -> Iterator[tuple[Shard, torch.nn.Parameter]]:
        """Yield each shard of the table of adapters with its parameter."""
        for pair, a, b in self._held:
            yield from ((pair.a, a), (pair.b, b))

    def gathered(self, groups: ParallelGroups) -> dict[str, Tensor]:
        """Return all adapters by PEFT's names, on the host of the first rank; nothing on the others. Call this on all
        ranks."""
        boxes: list[tuple[str, Region, Tensor]] = []
        at = groups.at
        for shard, parameter in self.held():
            is_first = at.edp == 0 if shard.expert else at.dp == at.cp == 0
            if is_first and is_first_copy(shard, at.etp if shard.expert else at.tp):
                boxes += [(x.hf, x.source, parameter.detach()[slices(x.target)].cpu()) for x in shard.pieces]
        is_first = groups.at.rank == 0
        everything: list[Any] | None = [None] * torch.distributed.get_world_size() if is_first else None
        torch.distributed.gather_object(boxes, everything)
        dtype = self._held[0][1].dtype
        tensors = {name: torch.empty(shape, dtype=dtype) for name, shape in self.tensors.items()} if is_first else {}
        for name, box, values in (part for parts in everything or () for part in parts):
            tensors[name][slices(box)] = values
        return tensors

    def merged(self, base: Mapping[Key, Tensor], engine_dtype: torch.dtype) -> MergedWeights:
        """Return the weights of this rank with the adapters added, for engines of that dtype."""
        return MergedWeights(base, self._held, self.lora.scale, engine_dtype)

    @torch.no_grad()
    def fill(self, read: ReadBox) -> None:
        for shard, parameter in self.held():
            for piece in shard.pieces:
                parameter[slices(piece.target)] = read(piece.hf, piece.source).to(parameter)


def _linear_layer(chunk: TokenModel, weight: str) -> tuple[Any, str, str]:
    """Return the layer of a weight, the weight's name in it, and the beginning of its adapters' names if the layer
    multiplies several experts together."""
    name = weight.removesuffix(".weight")
    if (expert := _OF_EXPERT.fullmatch(name)) and not hasattr(chunk.get_submodule(expert[1]), "local_experts"):
        return chunk.get_submodule(f"{expert[1]}.{expert[3]}"), f"weight{expert[2]}", f"expert{expert[2]}_"
    return chunk.get_submodule(name), "weight", ""


def _with_gradient(module: Any, inputs: Any, output: Tensor) -> Tensor:
    """Make the first layer's input need a gradient: recomputation skips layers whose inputs need none."""
    return output.requires_grad_() if torch.is_grad_enabled() else output
