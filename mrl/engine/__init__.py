"""Megatron-core: groups, build, forward and backward passes, log-probs, offload, checkpoints, and a CPU shim.

This package does not depend on Ray: the engine runs in a worker, under torchrun, or in one process.
"""

from __future__ import annotations

from mrl.engine.cpu_shim import import_megatron

import_megatron()  # before any other module here imports it
