"""One process as any rank of a world of any size, on tensors that have a shape and a dtype but no memory.

Floating-point tensors are torch's fake tensors: operations on them compute shapes only. Integers and booleans stay
real, because packing, routing and row arithmetic branch on their values. Collectives return at once without changing
anything. Everything else is the code of a real run; `stand_ins.py` lists the exceptions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

Observer = Callable[[Any, tuple[Any, ...], Any], None]
"""Is called after every operation on floats, with the operation, its arguments and its result."""


@contextmanager
def fake_world(rank: int, world_size: int, observe: Observer) -> Iterator[None]:
    """Make this process one rank of a world without other processes, in which floats have no memory."""
    torch.distributed.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), _RealIntegers(observe):
            yield
    finally:
        torch.distributed.destroy_process_group()


class _RealIntegers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes integers and booleans for real, and answers collectives and reads of values."""

    def __init__(self, observe: Observer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._observe = observe

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's compiler is off; skipping it takes a tenth of the time

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its own dispatch calls the operation on the rank's shard
        if func.namespace == "c10d":
            return _answer(func, args)
        tensors = list(_tensors((*args, *options.values())))
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(tensors[0], FakeTensor):
            return _value(tensors[0].dtype)
        if _is_real(func, tensors, options):
            with unset_fake_temporarily():
                return func(*args, **options)
        result = self._with_real_integers(func, args, options)
        self._observe(func, args, result)
        return result

    def _with_real_integers(self, func: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        """Run an operation on floats whose result, or the shape of whose result, depends on integers."""
        if func is torch.ops.aten.masked_select.default and not isinstance(args[1], FakeTensor):
            with unset_fake_temporarily():
                count = int(args[1].expand(args[0].shape).sum())
            return args[0].new_empty(count)
        result = func(*args, **options)
        if func is torch.ops.aten.topk.default:  # any different places will do
            values, places = result
            with unset_fake_temporarily():
                return values, torch.arange(places.shape[-1]).expand(places.shape)
        return result


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among arguments or results, also those in lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _value(dtype: torch.dtype) -> float | int | bool:
    """Return the value that the code reads from a tensor without contents.

    Gradient norms are finite, all numbers are as they should be, and none of them is counted as wrong.
    """
    if dtype is torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 0


def _is_real(func: Any, tensors: Sequence[Tensor], options: Mapping[str, Any]) -> bool:
    """Return whether an operation reads and makes only integers and booleans."""
    if any(isinstance(tensor, FakeTensor) or tensor.dtype.is_floating_point for tensor in tensors):
        return False
    dtype = options.get("dtype")
    if dtype is not None:
        return not dtype.is_floating_point
    # Without tensors and dtype, `empty` and its like make floats, `arange` and `full` of integers make integers.
    return bool(tensors) or func.overloadpacket.__name__ in ("arange", "randint", "randperm")


def _answer(func: Any, args: tuple[Any, ...]) -> Any:
    """Return the answer of a collective that has come to an end: its own outputs.

    Integers are gathered as if every rank had sent what this one sends. Other outputs keep their values.
    """
    with unset_fake_temporarily():
        if func is torch.ops.c10d._allgather_base_.default and not isinstance(args[0], FakeTensor):
            args[0].copy_(args[1].repeat(len(args[0]) // len(args[1]), *[1] * (args[1].ndim - 1)))
        elif func is torch.ops.c10d.alltoall_base_.default and not isinstance(args[0], FakeTensor):
            args[0].copy_(args[1])
    work = FakeWork().boxed()
    return work if len(func._schema.returns) == 1 else (args[0], work)
