"""A worker that also records its operations with torch's profiler, and the memory of its device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from mrl.config.training import ProfileConfig
from mrl.controller import Dispatch, Worker, register
from mrl.spans import SPANS

_MAX_ALLOCATIONS = 200_000


class ProfiledWorker(Worker):
    _operations: torch.profiler.profile | None = None
    _begun: tuple[Path, bool] | None = None
    """File of the operations, and whether allocations are recorded."""

    @register(Dispatch.ONE_TO_ALL)
    def begin_profile(self, settings: ProfileConfig, directory: str) -> None:
        """Mark spans for Nsight on a GPU and, on chosen ranks, begin to record operations and allocations."""
        SPANS.around = _marked
        if self.rank not in settings.torch_ranks:
            return
        self._begun = Path(directory, f"torch-{self.place.role}-{self.rank}.json"), settings.memory
        self._operations = torch.profiler.profile()  # of all devices
        self._operations.start()
        if settings.memory:
            torch.cuda.memory._record_memory_history(max_entries=_MAX_ALLOCATIONS)

    @register(Dispatch.ONE_TO_ALL)
    def end_profile(self) -> list[str]:
        """Write what was recorded. Return the files."""
        SPANS.around = nullcontext
        if self._operations is None or self._begun is None:
            return []
        path, has_memory = self._begun
        self._operations.stop()
        self._operations.export_chrome_trace(str(path))
        self._operations = self._begun = None
        if not has_memory:
            return [str(path)]
        snapshot = path.with_suffix(".memory.pickle")  # a file of torch, which mrl never reads
        torch.cuda.memory._dump_snapshot(str(snapshot))  # type: ignore[no-untyped-call]
        torch.cuda.memory._record_memory_history(enabled=None)
        return [str(path), str(snapshot)]


@contextmanager
def _marked(name: str) -> Iterator[None]:
    """Mark a span for torch's profiler and, on a GPU, for Nsight."""
    on_gpu = torch.cuda.nvtx.range(name) if torch.cuda.is_available() else nullcontext()
    with on_gpu, torch.profiler.record_function(name):
        yield
