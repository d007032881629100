"""Writes weights into the modules of a vLLM model, and says what they hold afterwards.

Kernels read some parameters as they are. Others vLLM packs into another form after loading, and on a CPU it empties
the parameter then: such a parameter is made anew from what arrives, and its module is packed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform

from mrl.dtypes import dtype_name
from mrl.errors import RolloutError, did_you_mean
from mrl.weight_sync.digest import Digests

_PLAIN = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
_PLAIN_MOE_BACKENDS = (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON)


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter as it was before vLLM packed it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    in_place: bool
    """Whether it is still that, so that it can be written as it stands."""

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)} {list(self.shape)}"


@dataclass
class ModuleParameters:
    """A module with parameters of its own."""

    module: Module
    slots: dict[str, ParameterSpec]
    sharers: list[Module] = field(default_factory=list)
    """Modules that have the same parameter (tied embeddings): they pack it for themselves."""
    fresh: dict[str, Tensor] = field(default_factory=dict)
    num_written: int = 0


def full_tensor_reason(model: Module) -> str:
    """Return why a model's modules cannot be written directly; empty where they can."""
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is None or type(method) in _PLAIN:
            continue
        if not isinstance(method, UnquantizedFusedMoEMethod):
            return f"{name} is kept by {type(method).__name__}"
        if not current_platform.is_cpu() and method.unquantized_backend not in _PLAIN_MOE_BACKENDS:
            return f"the {method.unquantized_backend.value} backend rearranges the experts of {name}"
    return ""


class ParameterWriter:
    """One round of writing fused and sharded tensors: every parameter of the model exactly once."""

    def __init__(self, model: Module) -> None:
        self._missing = {
            f"{prefix}.{name}": (owner, name) for prefix, owner in _owners(model).items() for name in owner.slots
        }
        self._digests = Digests()

    @torch.no_grad()
    def write(self, name: str, tensor: Tensor) -> None:
        """Take in one tensor; the caller may overwrite it as soon as this returns."""
        if name in self._digests:
            raise RolloutError("this parameter was sent twice", where=name)
        if name not in self._missing:
            raise RolloutError("the model has no such parameter", where=name, fix=did_you_mean(name, self._missing))
        owner, attribute = self._missing.pop(name)
        slot = owner.slots[attribute]
        if (sent := ParameterSpec(tensor.dtype, tuple(tensor.shape), slot.in_place)) != slot:
            raise RolloutError(f"sent as {sent}, but held as {slot}", where=name)
        held = getattr(owner.module, attribute).data
        if slot.in_place:
            held.copy_(tensor)
            held = held.to(tensor.dtype)  # kernels may want a bias with more digits than it was sent with
        else:
            held = owner.fresh[attribute] = tensor.to(held.device, copy=True)
        self._digests.add(name, held)
        owner.num_written += 1
        if owner.num_written == len(owner.slots):
            _pack(owner)

    def finish(self) -> dict[str, str]:
        """Return the digest of what each parameter holds, once all are written."""
        if self._missing:
            some = ", ".join(sorted(self._missing)[:5])
            raise RolloutError(f"{len(self._missing)} of the model's parameters were not sent: {some}")
        return self._digests.read()


def load_full_tensors(model: Module, model_config: Any, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Have vLLM cut, fuse and convert whole Hugging Face tensors; the digest of each as it was handed to vLLM."""
    digests = Digests()

    def own(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            kept = tensor.clone()  # vLLM holds on to tensors until it has all of a module's
            digests.add(name, kept)
            yield name, kept

    owners = _owners(model)
    _forget_kernels(model)
    initialize_layerwise_reload(model)
    try:
        model.load_weights(own(tensors))  # type: ignore[operator]
        incomplete = [prefix for prefix, owner in owners.items() if not _is_complete(owner.module)]
    finally:
        finalize_layerwise_reload(model, model_config)  # also after a failure: the next version finds modules again
    if incomplete:
        raise RolloutError(f"{len(incomplete)} of the model's modules were not sent whole: {', '.join(incomplete[:5])}")
    for owner in owners.values():
        for module in owner.sharers if current_platform.is_cpu() else ():
            module.quant_method.process_weights_after_loading(module)  # type: ignore[operator, union-attr]
    return digests.read()


def _is_complete(module: Module) -> bool:
    """Whether vLLM's loaders have filled a module: one that is full is packed at once, and then counted no more."""
    info = get_layerwise_info(module)
    wanted = info.load_numel_total
    if wanted is not None and isinstance(module, VocabParallelEmbedding):
        wanted = module.shard_indices.num_org_elements * module.embedding_dim  # its padding is in no file
    return wanted is None or info.load_numel >= wanted


def _owners(model: Module) -> dict[str, ModuleParameters]:
    owners: dict[str, ModuleParameters] = {}
    first: dict[Parameter, ModuleParameters] = {}
    for prefix, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        shared = [first[parameter] for parameter in own.values() if parameter in first]
        for owner in shared:
            owner.sharers.append(module)
        if own and not shared:
            before = get_layerwise_info(module).restore_metadata[0]
            slots = {name: _slot(module, held, before.get(name)) for name, held in own.items()}
            owners[prefix] = ModuleParameters(module, slots)
            first.update(dict.fromkeys(own.values(), owners[prefix]))
    return owners


def _slot(module: Module, held: Parameter, before: Tensor | None) -> ParameterSpec:
    if before is None:  # vLLM keeps no record of biases, and leaves them as they are
        return ParameterSpec(getattr(module, "params_dtype", held.dtype), tuple(held.shape), in_place=True)
    packed = held.shape != before.shape or (current_platform.is_cpu() and _is_moe(module))
    return ParameterSpec(before.dtype, tuple(before.shape), not packed)


def _is_moe(module: Module) -> bool:
    return isinstance(getattr(module, "quant_method", None), UnquantizedFusedMoEMethod)


@torch.no_grad()
def _pack(owner: ModuleParameters) -> None:
    """Have the form that kernels read made from what has arrived."""
    for attribute, tensor in owner.fresh.items():
        setattr(owner.module, attribute, Parameter(tensor, requires_grad=False))
    owner.fresh.clear()
    if not current_platform.is_cpu():
        return  # there, what can be written directly is what kernels read
    _forget_kernels(owner.module)
    for module in (owner.module, *owner.sharers):
        if (method := getattr(module, "quant_method", None)) is not None:
            method.process_weights_after_loading(module)


def _forget_kernels(model: Module) -> None:
    """Let vLLM pack experts as if for the first time.

    With a kernel in place it takes this for an update and, on a CPU, leaves out the packing: the experts of the
    weights before would go on computing.
    """
    for module in model.modules() if current_platform.is_cpu() else ():
        if _is_moe(module):
            module.quant_method.moe_kernel = None  # type: ignore[union-attr]
