"""Memory of every moment: which storages are alive, how large they are, and which line of code made them."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from mrl.rehearse.flops import counted

_NOT_MAKERS = ("torch", "mrl.rehearse", "mrl.engine.cpu_shim", "contextlib", "functools")
"""Packages whose lines are skipped on the way to the line that made a tensor."""

_ON_HOST = "mrl/engine/checkpoint.py"
"""The file whose tensors are copies on the host, which in a rehearsal is the same device."""


@dataclass(frozen=True)
class Maker:
    """The place in the code that made a tensor."""

    line: str
    """File and number of the line, from the package on."""
    module: str
    """Class of the module that was running, or of the step of backward."""

    def __str__(self) -> str:
        return f"{self.line} ({self.module})" if self.module else self.line


@dataclass
class PhaseMemory:
    """Memory of one phase: what was held before and after, the peak, and what was held then."""

    name: str
    before: int
    after: int = 0
    peak: int = 0
    flops: int = 0
    holders: tuple[tuple[Maker, int], ...] = ()
    """The largest at the peak, with the bytes that each made."""


class MemoryTimeline:
    """Counts the bytes of floating-point storages that are alive, by the line that made them."""

    def __init__(self) -> None:
        self.live = 0
        self.phases: list[PhaseMemory] = []
        self._held: Counter[Maker] = Counter()
        self._changes: list[tuple[Maker, int]] = []
        self._storages: dict[int, _Storage] = {}

    def observe(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Note the storages that an operation has made, and what it computed."""
        counted.observe(func, args, result)
        for value in result if isinstance(result, list | tuple) else (result,):
            if isinstance(value, Tensor) and value.dtype.is_floating_point and not value.is_meta:
                self._note(value)

    @contextmanager
    def follows_resizing(self) -> Iterator[None]:
        """Also follow storages that are freed and allocated again, as in an offload."""
        original = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, num_bytes: int) -> torch.UntypedStorage:
            original(storage, num_bytes)
            if (known := self._storages.get(storage._cdata)) is not None:
                self._change(known, num_bytes)
            return storage

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]

    @contextmanager
    def phase(self, name: str) -> Iterator[PhaseMemory]:
        """Measure a block of code as a phase."""
        self._changes.clear()
        held, before, flops = self._held.copy(), self.live, counted.total
        memory = PhaseMemory(name, before)
        try:
            yield memory
        finally:
            memory.after, memory.flops = self.live, counted.total - flops
            heights = list(accumulate((change for _, change in self._changes), initial=before))
            memory.peak = max(heights)
            for maker, change in self._changes[: heights.index(memory.peak)]:
                held[maker] += change
            memory.holders = tuple(held.most_common(5))
            self.phases.append(memory)

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if (key := storage._cdata) not in self._storages:
            maker = _maker(sys._getframe(3))
            if maker.line.startswith(_ON_HOST):
                return
            self._storages[key] = known = _Storage(maker)
            known.reference = weakref.ref(storage, lambda _: self._change(self._storages.pop(key), 0))
            self._change(known, storage.nbytes())

    def _change(self, storage: _Storage, size: int) -> None:
        difference, storage.size = size - storage.size, size
        self.live += difference
        self._held[storage.maker] += difference
        self._changes.append((storage.maker, difference))


@dataclass
class _Storage:
    maker: Maker
    size: int = 0
    reference: weakref.ref[Any] | None = None


def _maker(frame: FrameType | None) -> Maker:
    """Return the innermost line outside torch, and the module that was running there."""
    node = torch._C._current_autograd_node()
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(_NOT_MAKERS):
            break
        frame = frame.f_back
    if frame is None:
        return Maker("", "")
    path = name.replace(".", "/")
    owner = frame.f_locals.get("self")
    module = type(owner).__name__ if isinstance(owner, torch.nn.Module) else frame.f_code.co_name
    return Maker(f"{path}.py:{frame.f_lineno}", f"backward: {node.name()}" if node is not None else module)
