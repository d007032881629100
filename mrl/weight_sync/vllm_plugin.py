"""Entry point `vllm.general_plugins`: every vLLM process loads it and registers mrl's weight transfer."""

from __future__ import annotations

import contextlib
import os
from multiprocessing import parent_process

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from mrl.children import die_with

TRANSFER_BACKEND = "mrl"
"""Name of this transfer engine in vLLM's factory and configuration."""
ENDS_WITH_PARENT = "MRL_ENGINE_ENDS_WITH_PARENT"
"""Variable of engines whose worker processes must not outlive the process that started them.

A worker that waits for one on a lost node never notices that its parent has ended.
"""


def register() -> None:
    """Register the receiver with vLLM, without importing it: vLLM may call this before the import is possible."""
    if ENDS_WITH_PARENT in os.environ and (parent := parent_process()) is not None and parent.pid is not None:
        die_with(parent.pid)
    with contextlib.suppress(ValueError):  # already registered: a process may load its plugins twice
        WeightTransferEngineFactory.register_engine(
            TRANSFER_BACKEND, f"{__package__}.vllm_receiver", "IpcTransferEngine"
        )
