"""Numbers that a plan needs and cannot derive from the configuration."""

from __future__ import annotations

from dataclasses import dataclass

from mrl.config.hardware import ENGINE_RESERVE_BYTES

GIB = 1 << 30
RESERVE, UNUSED = "CUDA and NCCL", "unused blocks"
"""Names of the items of a plan that are not tensors. No rehearsal shows them."""


@dataclass(frozen=True)
class Assumptions:
    """Memory used by libraries, and the share of a device's speed that each kind of work reaches."""

    process_bytes: int = 2_150 << 20
    """Memory of each trainer process outside torch's allocator, measured on an H100: 0.6 GiB of CUDA context, and 1.5
    of kernels and libraries that are loaded while the model is built and first trained."""
    communicator_bytes: int = 205 << 20
    """Memory of each NCCL group of a trainer process."""
    peer_bytes: int = 24 << 20
    """Memory for each rank that a process sends to directly: tokens of experts, and slices of the reshard."""
    receiver_bytes: int = 2 * GIB
    """Memory of the process that receives weights for engines with their own pool: CUDA context and NCCL."""
    engine_reserve_bytes: int = ENGINE_RESERVE_BYTES
    """Memory of each engine process, even while it sleeps: CUDA context, NCCL, captured graphs."""
    cpu_rank_bytes: int = 288 << 20
    """Memory of libraries in each rank on a CPU slot, before a model is loaded."""
    cpu_engine_bytes: int = 464 << 20
    """Memory of libraries in each process of an engine on CPU slots."""
    cpu_run_bytes: int = 768 << 20
    """Memory of the driver, Ray and its processes on each node, and shared library files; up to half more."""
    cpu_allocator_share: float = 0.4
    """Share of a rank's working memory that a CPU allocator keeps between blocks during the phase."""
    allocator_share: float = 0.05
    """Share of activations that torch's allocator cannot use, because blocks have other sizes."""
    expert_imbalance: float = 1.25
    """Tokens of the busiest expert rank relative to the mean."""
    train_efficiency: float = 0.42
    """Share of the peak rate in matrix products, forward and backward. Links, bubbles and launches are added."""
    prefill_efficiency: float = 0.42
    """Share of the peak rate in an engine's prefill, and in decoding when arithmetic limits it."""
    decode_bandwidth: float = 0.6
    """Share of the memory bandwidth in decoding."""
    link_efficiency: float = 0.7
    """Share of the bandwidth of NVLink and network, in collectives and in the reshard."""
    decode_step_s: float = 0.004
    """Sampling and launches of one decoding step, for any amount of computation. Published runs need as much."""
    decode_layer_s: float = 0.00005
    """Launches per layer of one decoding step; doubled if tensor ranks communicate, four times if they span
    machines."""
    decode_sample_s: float = 0.000022
    """Measured, per running sample in one decoding step: scheduling and output on one core of the engine's host. The
    host works while the GPU computes the previous step, so the slower of the two counts."""
    train_layer_s: float = 0.001
    """Launches of one layer forward for one micro-batch; twice this for backward."""
    expert_layer_s: float = 0.004
    """Launches of one layer with experts forward for one micro-batch."""
    lone_expert_s: float = 0.0001
    """Time per expert of a rank in such a layer, if experts are not multiplied together (`moe_grouped_gemm`)."""
    tail_share: float = 0.1
    """Share of an engine's running samples that remain when most have ended."""
    mean_response_share: float = 0.5
    """Mean length of responses relative to the longest allowed."""
    mean_prompt_share: float = 0.5
    """Mean length of prompts relative to the longest allowed."""
    response_sigma: float = 1.0
    """Standard deviation of the logarithm of response tokens, before they are cut at the longest allowed."""


ASSUMPTIONS = Assumptions()
