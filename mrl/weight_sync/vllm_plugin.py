"""Entry point `vllm.general_plugins`: every vLLM process loads it and registers mrl's weight transfer."""

from __future__ import annotations

import contextlib

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

TRANSFER_BACKEND = "mrl"
"""Name of this transfer engine in vLLM's factory and configuration."""


def register() -> None:
    """Register the receiver with vLLM, without importing it: vLLM may call this before the import is possible."""
    with contextlib.suppress(ValueError):  # already registered: a process may load its plugins twice
        WeightTransferEngineFactory.register_engine(
            TRANSFER_BACKEND, f"{__package__}.vllm_receiver", "IpcTransferEngine"
        )
