"""Megatron-core: groups, build, forward and backward passes, log-probs, offload, checkpoints, and a CPU shim.

This package does not depend on Ray: the engine runs in a worker, under torchrun, or in one process. The modules for
packed rows, scores, memory and files do not import Megatron.
"""
