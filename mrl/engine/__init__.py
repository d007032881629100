"""Megatron-core: groups, build, forward and backward, log-probs, offload, checkpoints, and a stand-in for the CPU.

Nothing here knows of Ray: the engine runs in a worker, under torchrun, or in one process.
"""
