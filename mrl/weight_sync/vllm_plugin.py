"""The entry point `vllm.general_plugins`: every process of vLLM loads it, and so knows how weights arrive."""

from __future__ import annotations

import contextlib

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

TRANSFER_BACKEND = "mrl"
"""The name of this transfer engine in vLLM's factory and configuration."""


def register() -> None:
    """Make the receiver known to vLLM, without loading it: vLLM may ask for that before it is ready for it."""
    with contextlib.suppress(ValueError):  # known already: a process may load its plugins twice
        WeightTransferEngineFactory.register_engine(
            TRANSFER_BACKEND, f"{__package__}.vllm_receiver", "IpcTransferEngine"
        )
