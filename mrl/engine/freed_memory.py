"""Memory that a process has freed goes back to the driver or the system, where other processes can have it."""

from __future__ import annotations

import ctypes

import torch

_C = ctypes.CDLL(None)


def free_unused_memory(device: torch.device) -> None:
    """Have torch's allocator, or on a CPU glibc's, keep nothing; what is wanted again is taken anew.

    Both keep what was freed for the process itself, and an engine is another process. On a GPU, work under way on any
    stream ends first, and buffers that an engine has let go of only since the last look count as freed.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    elif trim := getattr(_C, "malloc_trim", None):  # other C libraries have none, and keep little
        trim(0)
