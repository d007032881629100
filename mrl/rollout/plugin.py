"""The entry point `vllm.general_plugins`: every process of vLLM loads it, and so knows how weights arrive."""

from __future__ import annotations

import contextlib

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from mrl.rollout.engine import TRANSFER_BACKEND


def register() -> None:
    """Make the receiver known to vLLM, without loading it: vLLM may ask for that before it is ready for it."""
    with contextlib.suppress(ValueError):  # known already: a process may load its plugins twice
        WeightTransferEngineFactory.register_engine(TRANSFER_BACKEND, "mrl.rollout.receiver", "IpcTransferEngine")
