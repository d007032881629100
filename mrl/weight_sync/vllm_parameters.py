"""Writing weights into the modules of a vLLM model, with digests of the result.

Some parameters are used by kernels directly. vLLM packs others into another form after loading, and on a CPU it then
empties the parameter: such a parameter is recreated from the received weights, and its module is packed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
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

from mrl.dtypes import dtype_name, torch_dtype
from mrl.errors import RolloutError, did_you_mean
from mrl.models.fp8_scales import FP8, SCALE, scale_shape
from mrl.weight_sync.digest import Digests
from mrl.weight_sync.vllm_fp8 import is_quantized_on_arrival, load, padding_reason, takes_fp8

_FP8 = torch_dtype(FP8)
_PLAIN = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
_BIAS = "bias"
"""Parameter that vLLM never quantizes or moves while it loads."""
_WRAPPED = ".base_layer"
"""End of the name of a layer inside a layer that adds an adapter."""
_PLAIN_MOE_BACKENDS = (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON)


@dataclass(frozen=True)
class ParameterSpec:
    """Form of a parameter before vLLM packed it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    in_place: bool
    """Whether the parameter still has this form, so that it can be overwritten."""

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)} {list(self.shape)}"


@dataclass
class ModuleParameters:
    """A module that is the first with some parameters, which it owns."""

    module: Module
    slots: dict[str, ParameterSpec]
    sharers: list[Module] = field(default_factory=list)
    """Modules that have only parameters of this owner (tied embeddings). They pack them separately."""
    fresh: dict[str, Tensor] = field(default_factory=dict)
    num_written: int = 0


def full_tensor_reason(model: Module) -> str:
    """Return why a model's modules cannot be written directly; empty if they can."""
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is None or type(method) in _PLAIN:
            continue
        if is_quantized_on_arrival(module):
            if reason := padding_reason(name, module):
                return reason
            continue
        if not isinstance(method, UnquantizedFusedMoEMethod):
            return f"{name} is stored by {type(method).__name__}"
        if not current_platform.is_cpu() and method.unquantized_backend not in _PLAIN_MOE_BACKENDS:
            return f"the {method.unquantized_backend.value} backend rearranges the experts of {name}"
    return ""


class ParameterWriter:
    """One update of fused and sharded tensors: every parameter of the model is written exactly once."""

    def __init__(self, model: Module) -> None:
        self._model = model
        self._missing = {
            f"{prefix.removesuffix(_WRAPPED)}.{name}": (owner, name)
            for prefix, owner in _owners(model).items()
            for name in owner.slots
        }
        self._unused_scales: set[str] = set()
        self._digests = Digests()

    @torch.no_grad()
    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor. The caller may overwrite it as soon as this returns."""
        if name in self._digests:
            raise RolloutError("this parameter was sent twice", where=name)
        if name.endswith(SCALE) and name not in self._missing:
            self._keep_scales(name, tensor)
            return
        if name not in self._missing:
            raise RolloutError(
                "the model has no parameter of this name", where=name, fix=did_you_mean(name, self._missing)
            )
        owner, attribute = self._missing.pop(name)
        slot = owner.slots[attribute]
        if tensor.dtype == _FP8 and f"{name}{SCALE}" in self._unused_scales:
            slot = replace(slot, dtype=_FP8)
            self._unused_scales.remove(f"{name}{SCALE}")
        if (sent := ParameterSpec(tensor.dtype, tuple(tensor.shape), slot.in_place)) != slot:
            raise RolloutError(f"the trainer sends {sent}, but the model has {slot}", where=name)
        parameter = getattr(owner.module, attribute).data
        if slot.in_place:
            parameter.copy_(tensor)
            parameter = parameter.to(tensor.dtype)  # kernels may keep a bias in a wider dtype
        else:
            parameter = owner.fresh[attribute] = tensor.to(parameter.device, copy=True)
        self._digests.add(name, parameter)
        owner.num_written += 1
        if owner.num_written == len(owner.slots):
            _pack(owner)

    def _keep_scales(self, name: str, tensor: Tensor) -> None:
        """Keep the scales of a weight that will arrive in FP8."""
        weight = name.removesuffix(SCALE)
        owner, attribute = self._missing.get(weight, (None, ""))
        if owner is None or (form := takes_fp8(owner.module)) is None:
            raise RolloutError("the model has no weight that takes scales at this time", where=name)
        wanted = ParameterSpec(torch.float32, scale_shape(owner.slots[attribute].shape, form), in_place=False)
        if (sent := ParameterSpec(tensor.dtype, tuple(tensor.shape), in_place=False)) != wanted:
            raise RolloutError(f"the trainer sends scales {sent}, but the model needs {wanted}", where=name)
        device = getattr(owner.module, attribute).device
        owner.fresh[f"{attribute}{SCALE}"] = kept = tensor.to(device, copy=True)
        self._digests.add(name, kept)
        self._unused_scales.add(name)

    def finish(self) -> dict[str, str]:
        """Return the digest of each parameter's content, after all have been written."""
        if self._unused_scales:
            listed = ", ".join(sorted(self._unused_scales)[:5])
            raise RolloutError(f"{len(self._unused_scales)} scales came without weights in FP8: {listed}")
        if self._missing:
            listed = ", ".join(sorted(self._missing)[:5])
            raise RolloutError(f"{len(self._missing)} of the model's parameters were not sent: {listed}")
        _check_latents(self._model)
        return self._digests.read()


def load_full_tensors(model: Module, model_config: Any, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Make vLLM cut, fuse and convert full Hugging Face tensors. Return the digest of each tensor given to vLLM."""
    digests = Digests()

    def copied(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            copy = tensor.clone()  # vLLM keeps tensors until a module is complete
            digests.add(name, copy)
            yield name, copy

    owners = _owners(model)
    _forget_kernels(model)
    initialize_layerwise_reload(model)
    try:
        model.load_weights(copied(tensors))  # type: ignore[operator]
        incomplete = [prefix for prefix, owner in owners.items() if not _is_complete(owner.module)]
    finally:
        finalize_layerwise_reload(model, model_config)  # also after a failure, so that the next version can be loaded
    if incomplete:
        raise RolloutError(f"{len(incomplete)} of the model's modules are incomplete: {', '.join(incomplete[:5])}")
    _check_latents(model)
    for owner in owners.values():
        for module in owner.sharers if current_platform.is_cpu() else ():
            module.quant_method.process_weights_after_loading(module)  # type: ignore[operator, union-attr]
    return digests.read()


def _is_complete(module: Module) -> bool:
    """Return whether vLLM's loaders have filled a module. A full module is packed at once and no longer counted."""
    info = get_layerwise_info(module)
    expected = info.load_numel_total
    if expected is not None and isinstance(module, VocabParallelEmbedding):
        expected = module.shard_indices.num_org_elements * module.embedding_dim  # files have no padding
    return expected is None or info.load_numel >= expected


def _owners(model: Module) -> dict[str, ModuleParameters]:
    owners: dict[str, ModuleParameters] = {}
    first: dict[Parameter, ModuleParameters] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, MLAAttention):
            continue  # its parameters are views of another module's
        parameters = dict(module.named_parameters(recurse=False))
        own = {name: parameter for name, parameter in parameters.items() if parameter not in first}
        if own:
            before = get_layerwise_info(module).restore_metadata[0]
            if is_quantized_on_arrival(module):  # its scales are not sent
                own = {name: parameter for name, parameter in own.items() if name in before or name == _BIAS}
            slots = {name: _slot(module, parameter, before.get(name)) for name, parameter in own.items()}
            owners[prefix] = ModuleParameters(module, slots)
            first.update(dict.fromkeys(own.values(), owners[prefix]))
            continue
        for parameter in parameters.values():
            first[parameter].sharers.append(module)
    return owners


@torch.no_grad()
def _check_latents(model: Module) -> None:
    """Raise an error if multi-latent attention decodes with other weights than those of `kv_b_proj`.

    vLLM keeps two views of that weight. A kernel that keeps copies would use old ones.
    """
    for prefix, module in model.named_modules():
        if not isinstance(module, MLAAttention):
            continue
        by_head = module.kv_b_proj.weight.view(module.num_heads, -1, module.kv_lora_rank)
        keys, values = by_head.split([module.qk_nope_head_dim, module.v_head_dim], dim=1)
        if not (torch.equal(module.W_UK_T, keys) and torch.equal(module.W_UV, values.transpose(1, 2))):
            raise RolloutError("attention decodes with weights that differ from those of kv_b_proj", where=prefix)


def _slot(module: Module, parameter: Parameter, before: Tensor | None) -> ParameterSpec:
    if before is None:  # vLLM keeps no record of biases, and does not change them
        return ParameterSpec(getattr(module, "params_dtype", parameter.dtype), tuple(parameter.shape), in_place=True)
    packed = parameter.shape != before.shape or (current_platform.is_cpu() and _is_moe(module))
    packed = packed or is_quantized_on_arrival(module)
    return ParameterSpec(before.dtype, tuple(before.shape), not packed)


def _is_moe(module: Module) -> bool:
    return isinstance(getattr(module, "quant_method", None), UnquantizedFusedMoEMethod)


@torch.no_grad()
def _pack(owner: ModuleParameters) -> None:
    """Pack the received tensors into the form that kernels read."""
    if is_quantized_on_arrival(owner.module):
        load(owner.module, owner.fresh)
        owner.fresh.clear()
        return
    for attribute, tensor in owner.fresh.items():
        setattr(owner.module, attribute, Parameter(tensor, requires_grad=False))
    owner.fresh.clear()
    if not current_platform.is_cpu():
        return  # on GPUs, kernels read directly writable parameters
    _forget_kernels(owner.module)
    for module in (owner.module, *owner.sharers):
        if (method := getattr(module, "quant_method", None)) is not None:
            method.process_weights_after_loading(module)


def _forget_kernels(model: Module) -> None:
    """Make vLLM pack experts as on the first load.

    If a kernel exists, vLLM takes this for an update and, on a CPU, skips the packing: the old weights would stay in
    use.
    """
    for module in model.modules() if current_platform.is_cpu() else ():
        if _is_moe(module):
            module.quant_method.moe_kernel = None  # type: ignore[union-attr]
