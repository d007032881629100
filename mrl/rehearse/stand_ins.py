"""What a rehearsal answers by hand, each with its reason. Everything else is the code of a run on GPUs.

There are three kinds: kernels of GPUs, which have no shape function on a CPU (their stand-in makes the tensors that the
kernel makes, and keeps for backward what it keeps); answers of other ranks; and branches of libraries on the values of
floats. `tests/contracts/table.yaml` has an entry for each name of a library.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.fusions import fused_bias_swiglu
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.optimizer import clip_grads
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.tensor_parallel import layers as linear_layers
from torch import Tensor

from mrl.engine import layer_spec, vocab_head
from mrl.engine.engine import MegatronEngine
from mrl.engine.offload import HostMirroredStorage
from mrl.engine.packed_rows import MicroBatch
from mrl.engine.pipeline_p2p import OrderedP2PCommunicator

_MISSING = object()


Replaced = list[tuple[Any, str, Any]]
"""An object, the name of an attribute, and its value for the time of a rehearsal."""


@contextmanager
def replaced(attributes: Replaced) -> Iterator[None]:
    """Replace attributes for the block."""
    originals = [(owner, name, vars(owner).get(name, _MISSING)) for owner, name, _ in attributes]
    for owner, name, replacement in attributes:
        setattr(owner, name, replacement)
    try:
        yield
    finally:
        for owner, name, original in originals:
            delattr(owner, name) if original is _MISSING else setattr(owner, name, original)


@contextmanager
def stand_ins(messages: StageMessages) -> Iterator[None]:
    """Replace everything that a rehearsal answers by hand, for the block."""
    attributes: Replaced = [
        # Kernels of GPUs. The attention of CPUs keeps dense blocks; GPUs run the variable-length kernel.
        (layer_spec, "_in_blocks", layer_spec._varlen),
        # The vocabulary head has smaller tiles on a CPU, and multiplies in float32 there.
        (vocab_head, "TILE_BYTES", vocab_head.TILE_BYTES | {"cpu": vocab_head.TILE_BYTES["cuda"]}),
        (vocab_head, "_operand_dtype", _operand_dtype),
        # Transformer Engine's norm keeps its input and a number per token; mrl's own keeps a float32 copy as well.
        (layer_spec.RmsNorm, "forward", _norm),
        (rope_utils, "fused_apply_rotary_pos_emb_thd", _rotate),
        # torch's compiler fuses these two on GPUs, so that they make nothing but their result.
        (fused_bias_swiglu, "swiglu", _half),
        (fused_bias_swiglu, "swiglu_back", lambda grad, y: torch.empty_like(y)),
        (clip_grads, "l2_norm_impl", _norm_of_gradients),
        (clip_grads, "multi_tensor_scale_impl", lambda *_: None),
        # Apex adds the gradient of a weight to its buffer.
        (linear_layers, "fused_weight_gradient_mlp_cuda", _AddToBuffer, ),
        (linear_layers, "_grad_accum_fusion_available", True),
        # Answers of other ranks.
        (P2PCommunicator, "_communicate_shapes", messages.shapes),
        (OrderedP2PCommunicator, "_communicate_shapes", messages.shapes),
        (torch.distributed, "all_gather_object", _gather_own),
        # Copies to the host and back have no contents. A buffer on the host is not memory of the device.
        (HostMirroredStorage, "new_host_buffer", _host_buffer),
        (HostMirroredStorage, "_contents", lambda _: []),
        (HostMirroredStorage, "_slots", lambda _, host: []),
        # A fake parameter cannot be replaced by its copy, and is on the device already.
        (torch.nn.Module, "to", lambda self, *_, **__: self),
    ]
    with replaced(attributes):
        yield


class StageMessages:
    """Shapes of the hidden states that a rank receives from its neighbors, by micro-batch."""

    def __init__(self, sequence_parts: int) -> None:
        self._sequence_parts = sequence_parts
        self._from_previous: Iterator[list[int]] = iter(())
        self._from_next: Iterator[list[int]] = iter(())

    def expect(self, batches: Sequence[MicroBatch], hidden: int) -> None:
        """Set the micro-batches of the next pass."""
        shapes = [[batch.tokens.shape[1] // self._sequence_parts, 1, hidden] for batch in batches]
        self._from_previous, self._from_next = itertools.cycle(shapes), itertools.cycle(shapes)

    def belongs_to(self, engine: MegatronEngine) -> None:
        """Follow the passes of an engine."""
        run, hidden = engine._run, engine.request.spec.hidden

        def followed(batches: Sequence[MicroBatch], *rest: Any, **options: Any) -> Any:
            self.expect(batches, hidden)
            return run(batches, *rest, **options)

        engine._run = followed  # type: ignore[method-assign]

    @property
    def shapes(self) -> Callable[..., tuple[list[int], list[int]]]:
        def answer(_: Any, send_next: Any, send_prev: Any, recv_prev: bool, recv_next: bool) -> Any:
            return (
                next(self._from_previous) if recv_prev else [0, 0, 0],
                next(self._from_next) if recv_next else [0, 0, 0],
            )

        return answer


def _operand_dtype(hidden_TH: Tensor, weight_VH: Tensor, dtype: torch.dtype) -> torch.dtype:
    return hidden_TH.dtype if hidden_TH.dtype == weight_VH.dtype else dtype


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, torch.empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _norm(self: layer_spec.RmsNorm, x: Tensor) -> Tensor:
    return _Norm.apply(x, self.weight)  # type: ignore[no-untyped-call,no-any-return]


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, angles: Tensor) -> Tensor:
        ctx.save_for_backward(angles)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return torch.empty_like(grads[0]), None


def _rotate(x: Tensor, ends: Tensor, angles: Tensor, **_: Any) -> Tensor:
    return _Rotation.apply(x, angles)  # type: ignore[no-untyped-call,no-any-return]


def _half(y: Tensor) -> Tensor:
    return y.new_empty(*y.shape[:-1], y.shape[-1] // 2)


def _host_buffer(self: HostMirroredStorage) -> Tensor:
    return torch.empty(self.host_buffer_bytes, dtype=torch.uint8, device="meta")


def _norm_of_gradients(*_: Any) -> tuple[Tensor, None]:
    return torch.empty(1), None


class _AddToBuffer:
    @staticmethod
    def wgrad_gemm_accum_fp32(*_: Any) -> None:
        pass

    wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32


def _gather_own(answers: list[Any], own: Any, group: Any = None) -> None:
    answers[:] = [own] * len(answers)
