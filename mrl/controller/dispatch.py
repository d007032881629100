"""How a call reaches the ranks of a group, and what a worker's method declares about itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from mrl.config.step_calls import StepCall

Method = TypeVar("Method", bound=Callable[..., Any])

_SPEC_ATTRIBUTE = "mrl_method_spec"


class Dispatch(Enum):
    """Who is called with what, and whose answers come back."""

    ONE_TO_ALL = "one_to_all"
    """Every rank gets the same arguments; a list with every rank's answer comes back."""
    RANK_ZERO = "rank_zero"
    """Only rank 0 is called; its answer comes back."""
    DATA_PARALLEL = "data_parallel"
    """The first argument is a batch, split over the data-parallel axis: ranks that differ only in tp, cp or pp get
    the same shard, and one of them answers for it. Columns come back as one batch, other answers as a list."""


@dataclass(frozen=True)
class MethodSpec:
    """What a registered method declares: its dispatch, and the columns that it reads and writes."""

    name: str
    dispatch: Dispatch
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    optional: tuple[str, ...] = ()
    """Columns that it reads where they are there."""


def register(
    dispatch: Dispatch, reads: tuple[str, ...] = (), writes: tuple[str, ...] = (), optional: tuple[str, ...] = ()
) -> Callable[[Method], Method]:
    """Let a worker's method be called through its group.

    A group ships only the columns in `reads` and `optional` and accepts only those in `writes`, so these are promises
    that are kept. Optional ones are for columns that some algorithms have and others do not.
    """
    if (reads or writes or optional) and dispatch is not Dispatch.DATA_PARALLEL:
        raise ValueError(f"only DATA_PARALLEL methods read and write columns, not {dispatch.name}")

    def mark(method: Method) -> Method:
        spec = MethodSpec(method.__name__, dispatch, tuple(reads), tuple(writes), tuple(optional))
        setattr(method, _SPEC_ATTRIBUTE, spec)
        return method

    return mark


def register_call(call: StepCall) -> Callable[[Method], Method]:
    """Let a worker's method be called in a training step, with the columns that the step's table says."""

    def mark(method: Method) -> Method:
        if method.__name__ != call.method:
            raise ValueError(f"{method.__name__} is registered as {call.method}")
        return register(Dispatch.DATA_PARALLEL, call.reads, call.writes, call.optional)(method)

    return mark


def registered_methods(worker_class: type) -> dict[str, MethodSpec]:
    """Return the methods of a class that a group may call, by name."""
    specs: dict[str, MethodSpec] = {}
    for name in dir(worker_class):
        spec = getattr(getattr(worker_class, name, None), _SPEC_ATTRIBUTE, None)
        if isinstance(spec, MethodSpec):
            specs[name] = spec
    return specs
