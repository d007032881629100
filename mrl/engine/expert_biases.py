"""Experts with biases in Megatron: their activation, and a view that their bias must not be added to."""

from __future__ import annotations

import mrl.engine.with_megatron  # noqa: F401

# isort: split
from typing import Any

from megatron.core.fusions.fused_bias_geglu import quick_gelu
from torch import Tensor
from torch.nn import Module

from mrl.models.spec import ModelSpec


def activation(spec: ModelSpec) -> dict[str, Any]:
    """Return Megatron's argument for the activation, if the experts have biases."""
    return {"activation_func": quick_gelu} if spec.moe and spec.moe.clamp is not None else {}


def separate_outputs(decoder: Module) -> None:
    """Make the second product of each expert return a separate tensor.

    Megatron adds the bias in place. With one tensor rank the product is a view, which autograd does not let it change.
    """
    for module in decoder.modules():
        for expert in getattr(module, "local_experts", ()):
            if expert.linear_fc2.bias is not None:
                expert.linear_fc2.register_forward_hook(_copied)


def _copied(module: Module, inputs: Any, outputs: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    product, bias = outputs
    return product.clone(), bias
