"""Stand-ins for kernels of GPUs: they make the tensors that the kernel makes, and keep for backward what it keeps.

The sources of these kernels say what they keep: Transformer Engine's norms, attention, rotary embedding and grouped
products, and Megatron's fused activation, which torch's compiler fuses on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mrl.rehearse.flops import counted


class _Norm(torch.autograd.Function):
    """Keeps its input and one float32 number per token; mrl's own norm keeps its input in float32 as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x.contiguous(), weight, torch.empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def norm(module: Any, x: Tensor) -> Tensor:
    normalized: Tensor = _Norm.apply(x, module.weight)  # type: ignore[no-untyped-call]
    return normalized


class NormedColumnParallelLinear(ColumnParallelLinear):  # type: ignore[misc]  # Megatron's class has no types here
    """Transformer Engine's first layer of a dense MLP contains the norm before it: recomputing the MLP drops both."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor, *rest: Any, **options: Any) -> Any:
        return super().forward(_Norm.apply(x, self.layer_norm_weight), *rest, **options)  # type: ignore[no-untyped-call]


def layer_of(local_layer: Callable[..., ModuleSpec]) -> Callable[..., ModuleSpec]:
    """Return mrl's function for the modules of a layer, with this first layer of a dense MLP."""

    def made(config: TransformerConfig, routed: bool) -> ModuleSpec:
        layer = local_layer(config, routed)
        if not routed:
            layer.submodules.pre_mlp_layernorm = IdentityOp
            mlp = layer.submodules.mlp  # a function with arguments since Megatron 0.19
            parts = mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules
            parts.linear_fc1 = NormedColumnParallelLinear
        return layer

    return made


class _Attention(torch.autograd.Function):
    """Keeps its inputs, its output, and one float32 number per head and token.

    Values are copied out of the product that they share with queries and keys, and padded to the width of keys, as
    Megatron 0.19 does. With context parallelism, ranks exchange keys while they compute, and keep only their own.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        output = torch.empty_like(query)
        ctx.sinks = sinks
        ctx.save_for_backward(query, key, value, output, torch.empty(query.shape[:2], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *_ = ctx.saved_tensors
        sinks = None if ctx.sinks is None else torch.empty_like(ctx.sinks)
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), sinks


def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    width = value.shape[-1]
    value = torch.nn.functional.pad(value, (0, key.shape[-1] - width))
    output = attended(query, key, value, module.softmax_offset)
    return output[..., :width].reshape(query.shape[0], -1)


def attended(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the output of a kernel for packed rows [tokens, heads, dim]."""
    output: Tensor = _Attention.apply(query, key, value, sinks)  # type: ignore[no-untyped-call]
    return output


class _ReadInOrder(torch.autograd.Function):
    """mrl's loop over the chunks of the gated delta rule, which takes minutes on fake tensors.

    For backward, each chunk keeps its matrix and its corrections. Backward frees them on its way, and then joins the
    gradients of all chunks.
    """

    @staticmethod
    def forward(ctx: Any, num_rows: tuple[int, ...], *parts: Tensor) -> Tensor:
        fresh, old = parts[:2]
        learns = any(ctx.needs_input_grad)
        matrices = fresh.new_empty(
            len(fresh) if learns else num_rows[0], fresh.shape[1], old.shape[-1], fresh.shape[-1]
        )
        outputs = torch.empty_like(fresh)
        if learns:
            ctx.kept = [*parts, matrices, torch.empty_like(fresh)]
            ctx.like = [part.new_empty(1).expand(part.shape) for part in parts]
        _count_products(parts)
        return outputs.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        for _ in ("inputs", "matrices"):
            _count_products(ctx.like)
        ctx.kept.clear()
        by_chunk = [torch.empty(like.shape, dtype=like.dtype) for like in ctx.like]
        joined = []
        while by_chunk:
            joined.append(torch.empty_like(by_chunk[0]))
            del by_chunk[0]
        return None, *joined


def _count_products(parts: Sequence[Tensor]) -> None:
    fresh, old, q_before, seen, _, k_after = parts
    for operand in (old, q_before, seen, k_after):
        counted.product(operand, fresh.shape[-1])


def read_in_order(parts: Sequence[Tensor], num_rows: tuple[int, ...]) -> Tensor:
    outputs: Tensor = _ReadInOrder.apply(num_rows, *parts)  # type: ignore[no-untyped-call]
    return outputs


class _Rotation(torch.autograd.Function):
    """Keeps the angles only: the gradient is the rotation by the negative angle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, angles: Tensor) -> Tensor:
        ctx.save_for_backward(angles)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return torch.empty_like(grads[0]), None


def rotate(x: Tensor, ends: Tensor, angles: Tensor, **_: Any) -> Tensor:
    rotated: Tensor = _Rotation.apply(x, angles)  # type: ignore[no-untyped-call]
    return rotated


def swiglu(gate_and_up: Tensor) -> Tensor:
    return gate_and_up.new_empty(*gate_and_up.shape[:-1], gate_and_up.shape[-1] // 2)


def swiglu_back(grad: Tensor, gate_and_up: Tensor) -> Tensor:
    return torch.empty_like(gate_and_up)


class AddToBuffer:
    """The gradient of a weight is added to its buffer; nothing else is made."""

    @staticmethod
    def wgrad_gemm_accum_fp32(x: Tensor, grad: Tensor, _buffer: Tensor) -> None:
        counted.product(x, grad.shape[-1])

    wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32


class _GroupedProduct(torch.autograd.Function):
    """The products of all experts of a rank in one call. Keeps its input, and adds the weights' gradients in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, num_columns: int, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        counted.product(x, num_columns)
        return x.new_empty(x.shape[0], num_columns)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        for weight in weights:
            weight.grad_added_to_main_grad = True
        for _ in ("input", "weights"):
            counted.product(x, grads[0].shape[-1])
        # An expanded number has the shape of a gradient and no memory.
        return torch.empty_like(x), None, *(weight.new_empty(1).expand(weight.shape) for weight in weights)


class _WeightedSwiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_and_up: Tensor, probs: Tensor) -> Tensor:
        ctx.save_for_backward(gate_and_up, probs)
        return swiglu(gate_and_up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate_and_up, probs = ctx.saved_tensors
        return torch.empty_like(gate_and_up), torch.empty_like(probs)


class _Biases(torch.autograd.Function):
    """Biases that a grouped product adds by itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *biases: Tensor) -> Tensor:
        ctx.biases = biases
        return x.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads[0], *map(torch.empty_like, ctx.biases)


def _product(module: Any, x: Tensor, name: str) -> Tensor:
    layers = [getattr(expert, name) for expert in module.local_experts]
    weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers if layer.bias is not None]
    product: Tensor = _GroupedProduct.apply(x, weights[0].shape[0], *weights)  # type: ignore[no-untyped-call]
    return _Biases.apply(product, *biases) if biases else product  # type: ignore[no-untyped-call]


def experts(module: Any, tokens: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
    """Run all experts of a rank as Transformer Engine's grouped layers do."""
    activated = _WeightedSwiglu.apply(_product(module, tokens, "linear_fc1"), probs)  # type: ignore[no-untyped-call]
    return _product(module, activated, "linear_fc2"), None
