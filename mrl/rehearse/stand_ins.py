"""Everything that a rehearsal answers by hand, each with its reason. Everything else is the code of a run on GPUs.

There are two groups: kernels of GPUs, whose stand-ins make the tensors that the kernel makes and keep for backward what
it keeps; and answers that depend on other ranks or on the values of floats. Every replaced name must exist, so a
library that renames one is noticed at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from megatron.core import optimizer
from megatron.core.fusions import fused_bias_swiglu
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.optimizer import clip_grads
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.tensor_parallel import layers as linear_layers
from megatron.core.transformer.moe import router
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

from mrl.engine import delta_kernels, delta_rule, layer_spec, vocab_head
from mrl.engine.engine import MegatronEngine
from mrl.engine.offload import HostMirroredStorage
from mrl.engine.packed_rows import MicroBatch
from mrl.engine.pipeline_p2p import OrderedP2PCommunicator
from mrl.rehearse import kernels

_MISSING = object()
_ONLY_WITH_APEX = "fused_weight_gradient_mlp_cuda"

Replaced = list[tuple[Any, str, Any]]
"""An object, the name of an attribute, and its value for the time of a rehearsal."""


@contextmanager
def replaced(attributes: Replaced) -> Iterator[None]:
    """Replace attributes for the block. Each must exist: a library that renames one needs another stand-in."""
    for owner, name, _ in attributes:
        assert hasattr(owner, name) or name == _ONLY_WITH_APEX, f"{owner} has no {name}"
    originals = [(owner, name, vars(owner).get(name, _MISSING)) for owner, name, _ in attributes]
    for owner, name, replacement in attributes:
        setattr(owner, name, replacement)
    try:
        yield
    finally:
        for owner, name, original in originals:
            delattr(owner, name) if original is _MISSING else setattr(owner, name, original)


def gpu_kernels(*, adapted: bool = False, adapted_experts: bool = False) -> Replaced:
    """Return kernels of GPUs instead of the CPU's own code. Layers with adapters have separate norms, and
    experts with adapters are multiplied one by one."""
    fused = (layer_spec, "_local_layer", kernels.layer_of(layer_spec._local_layer))
    return [
        *head_kernels(),
        # Kernels of Transformer Engine and Apex, which need CUDA, and what torch's compiler fuses.
        *([] if adapted else [fused]),
        (layer_spec.PackedAttention, "forward", kernels.attention),
        (layer_spec.RmsNorm, "forward", kernels.norm),
        (rope_utils, "fused_apply_rotary_pos_emb_thd", kernels.rotate),
        (fused_bias_swiglu, "swiglu", kernels.swiglu),
        (fused_bias_swiglu, "swiglu_back", kernels.swiglu_back),
        *([] if adapted_experts else [(SequentialMLP, "forward", kernels.experts)]),
        (linear_layers, _ONLY_WITH_APEX, kernels.AddToBuffer),
        (linear_layers, "_grad_accum_fusion_available", True),
        (optimizer, "Adam", partial(torch.optim.AdamW, fused=True)),
    ]


def head_kernels() -> Replaced:
    """Return the head of GPUs: on a CPU it has smaller tiles, and multiplies in float32."""
    return [
        (vocab_head, "TILE_BYTES", vocab_head.TILE_BYTES | {"cpu": vocab_head.TILE_BYTES["cuda"]}),
        (vocab_head, "_operand_dtype", _operand_dtype),
    ]


def host_answers() -> Replaced:
    """Return answers about the host: copies there have no contents, and a buffer is no memory of the device."""
    return [
        (torch.distributed, "all_gather_object", _gather_own),
        (HostMirroredStorage, "new_host_buffer", _host_buffer),
        (HostMirroredStorage, "_contents", lambda _: []),
        (HostMirroredStorage, "_slots", lambda _, host: []),
    ]


def answers(messages: StageMessages, routing: Routing) -> Replaced:
    """Return what depends on other ranks, on the values of floats, or on contents that fake tensors do not have."""
    return [
        *host_answers(),
        (P2PCommunicator, "_communicate_shapes", messages.shapes),
        (OrderedP2PCommunicator, "_communicate_shapes", messages.shapes),
        # The loop over chunks takes minutes on fake tensors.
        (delta_rule, "_read_in_order", kernels.read_in_order),
        (delta_kernels, "usable", lambda _: False),  # they have no form for fake tensors, and need less memory
        # Which experts a token takes depends on the values of its logits.
        (router, "topk_routing_with_score_function", routing.of(router.topk_routing_with_score_function)),
        # The norm of all gradients is one number. Megatron's own function makes a tensor from a list of them.
        (clip_grads, "l2_norm_impl", lambda *_: (torch.empty(1), None)),
        (clip_grads, "multi_tensor_scale_impl", lambda *_: None),
        # A fake parameter cannot be replaced by its copy on a device, and it is there already.
        (torch.nn.Module, "to", lambda self, *_, **__: self),
    ]


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


class Routing:
    """Which experts the tokens take: all equally often, except that those of this rank take `skew` times as many."""

    def __init__(self, own_experts: range, skew: float) -> None:
        self._own, self._skew = np.array(own_experts, np.int64), skew
        self._made: dict[tuple[int, int, int], Tensor] = {}

    def of(self, route: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
        """Return Megatron's function with a real map of experts."""

        def routed(logits: Tensor, topk: int, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
            probs, _ = route(logits, topk, *rest, **options)
            num_tokens, num_experts = logits.shape
            return probs, self.experts_of(num_tokens, num_experts, topk)

        return routed

    def experts_of(self, num_tokens: int, num_experts: int, topk: int) -> Tensor:
        """Return which experts each token takes [tokens, experts].

        The slots of all tokens are filled expert by expert. No expert fills more slots than there are tokens, so it
        takes each token at most once.
        """
        if (key := (num_tokens, num_experts, topk)) not in self._made:
            counts = self._counts(num_tokens * topk, num_experts, num_tokens)
            chosen = torch.zeros(num_tokens, num_experts, dtype=torch.bool)
            slots = np.arange(num_tokens * topk) % max(num_tokens, 1)
            chosen[torch.from_numpy(slots), torch.from_numpy(np.repeat(np.arange(num_experts), counts))] = True
            self._made[key] = chosen
        return self._made[key]

    def _counts(self, num_slots: int, num_experts: int, most: int) -> npt.NDArray[np.int64]:
        """Return the number of slots of each expert."""
        is_own = np.isin(np.arange(num_experts), self._own)
        counts = np.zeros(num_experts, np.int64)
        if not is_own.all() and is_own.any():
            counts[is_own] = min(round(self._skew * num_slots / num_experts), most, num_slots // int(is_own.sum()))
        open_experts = np.flatnonzero(counts == 0)
        each, rest = divmod(num_slots - int(counts.sum()), max(len(open_experts), 1))
        counts[open_experts] = each
        counts[open_experts[:rest]] += 1
        return counts


def _operand_dtype(hidden_TH: Tensor, weight_VH: Tensor, dtype: torch.dtype) -> torch.dtype:
    return hidden_TH.dtype if hidden_TH.dtype == weight_VH.dtype else dtype


def _host_buffer(self: HostMirroredStorage) -> Tensor:
    return torch.empty(self.host_buffer_bytes, dtype=torch.uint8, device="meta")


def _gather_own(answers: list[Any], own: Any, group: Any = None) -> None:
    answers[:] = [own] * len(answers)
