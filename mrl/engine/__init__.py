"""Megatron-core: groups, build, forward and backward, log-probs, offload, checkpoints, and a stand-in for the CPU.

Nothing here knows of Ray: the engine runs in a worker, under torchrun, or in one process.
"""

from __future__ import annotations

from mrl.engine.cpu_shim import import_megatron

import_megatron()  # before any module here does it
