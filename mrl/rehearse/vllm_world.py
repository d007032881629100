"""This process as any rank of a vLLM engine, with a model that has no memory, and what vLLM's loader does to it.

Replaced are the groups' connections to other ranks. vLLM itself computes which ranks form which group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import Module
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from mrl.models.parameters import Piece
from mrl.models.regions import Region, Shape
from mrl.models.rollout_table import Fused


@contextmanager
def engine_rank(config: VllmConfig, rank: int) -> Iterator[None]:
    """Make this process one rank of an engine, in groups that vLLM computes."""
    tp, pp = config.parallel_config.tensor_parallel_size, config.parallel_config.pipeline_parallel_size
    size = tp * pp
    torch.distributed.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        with (
            patch.object(torch.distributed, "new_group", partial(_fake_group, torch.distributed.new_group)),
            patch.object(parallel_state, "init_model_parallel_group", _without_connections),
            set_current_vllm_config(config),
        ):
            parallel_state._WORLD = parallel_state.init_world_group([*range(size)], rank, "fake")
            parallel_state.initialize_model_parallel(tp, pp)
            yield
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


def build(config: VllmConfig) -> Module:
    """Return vLLM's model of this rank. Its parameters have shapes, but no memory."""
    with set_default_torch_dtype(config.model_config.dtype), _WithoutFloats():  # type: ignore[no-untyped-call]
        model: Module = initialize_model(vllm_config=config)
        return model


@torch.no_grad()
def load(model: Module, files: Mapping[str, Shape], dtype: torch.dtype) -> list[Fused]:
    """Make vLLM load tensors of these shapes. Return the slices of them that each parameter then has."""
    tensors = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in files.items()}
    parameters = dict(model.named_parameters())
    with _Copies(tensors, parameters) as copies:
        model.load_weights(iter(tensors.items()))  # type: ignore[operator]
    return [
        Fused(name, tuple(parameter.shape), tuple(copies.pieces[name]), tuple(copies.zeros[name]))
        for name, parameter in parameters.items()
    ]


def _fake_group(new_group: Callable[..., Any], ranks: Sequence[int], *_: Any, **__: Any) -> Any:
    """Replace gloo's groups, which vLLM makes for each of its groups, and which would wait for other ranks."""
    return new_group(ranks, backend="fake")


def _without_connections(group_ranks: list[list[int]], local_rank: int, backend: str, *_: Any, **names: Any) -> Any:
    """Make a group without shared memory and custom kernels: no tensor is ever sent."""
    return parallel_state.GroupCoordinator(
        group_ranks, local_rank, backend, use_device_communicator=False, group_name=names.get("group_name")
    )


class _WithoutFloats(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes floating-point tensors on torch's meta device, and all others for real."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's compiler is off; skipping it takes time at every operation

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if "device" in options and not any(isinstance(value, Tensor) for value in args):
            made: Tensor = func(*args, **options | {"device": torch.device("meta")})
            if made.dtype.is_floating_point:
                return made
        return func(*args, **options)


class _Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which slices of files are copied to which places of parameters, and where zeros are written."""

    def __init__(self, files: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pieces: dict[str, list[Piece]] = defaultdict(list)
        self.zeros: dict[str, list[Region]] = defaultdict(list)
        self._files, self._parameters = (
            {tensor.untyped_storage()._cdata: (name, tensor.shape) for name, tensor in tensors.items()}
            for tensors in (files, parameters)
        )

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's compiler is off; skipping it takes time at every operation

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (torch.ops.aten.copy_.default, torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default):
            self._note(*args)
        return func(*args, **(kwargs or {}))

    def _note(self, target: Tensor, source: Tensor | float = 0, *_: Any) -> None:
        if (place := _slice(target, self._parameters)) is None:
            return
        if isinstance(source, Tensor):
            if (origin := _slice(source, self._files)) is not None and source.shape == target.shape:
                self.pieces[place[0]].append(Piece(origin[0], origin[1], place[1]))
        elif source == 0 and target.numel():
            self.zeros[place[0]].append(place[1])


def _slice(view: Tensor, known: Mapping[int, tuple[str, Shape]]) -> tuple[str, Region] | None:
    """Return which rows and columns of which tensor a view shows; None if it shows none, or in another order.

    Stacked experts count as one matrix, one below another.
    """
    name, shape = known.get(view.untyped_storage()._cdata, ("", ()))
    if not shape or not view.numel():
        return None
    columns = shape[-1] if len(shape) > 1 else 1
    matrix = view.unsqueeze(-1) if len(shape) == 1 else view.unsqueeze(0) if view.ndim == 1 else view
    width = matrix.shape[-1]
    try:
        matrix = matrix.view(-1, width)
    except RuntimeError:
        return None
    if not all(
        size == 1 or stride == step
        for size, stride, step in zip(matrix.shape, matrix.stride(), (columns, 1), strict=True)
    ):
        return None
    row, column = divmod(int(view.storage_offset()), columns)
    rows = (row, row + matrix.shape[0])
    if len(shape) == 1:
        return name, (rows,)
    between = ((0, 1),) if shape[1:-1] == (1,) else ()  # a convolution has one input for each channel
    return name, (rows, *between, (column, column + width))
