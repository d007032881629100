"""What no configuration says and a plan needs: every number that is not derived stands here."""

from __future__ import annotations

from dataclasses import dataclass

from mrl.config.hardware import ENGINE_RESERVE_BYTES

GIB = 1 << 30


@dataclass(frozen=True)
class Assumptions:
    """Memory that libraries take for themselves, and how much of a device's speed each kind of work reaches."""

    process_bytes: int = 2_150 << 20
    """Measured on an H100, for each trainer process outside of torch's allocator: 0.6 GiB of CUDA context, and 1.5 of
    kernels and libraries that are loaded while the model is built and first trained."""
    communicator_bytes: int = 205 << 20
    """Of each of its NCCL groups."""
    peer_bytes: int = 24 << 20
    """Of each rank that it sends to directly: experts' tokens, and slices of the reshard."""
    receiver_bytes: int = 2 * GIB
    """Of the process that takes weights next to engines of their own pool: CUDA context and NCCL."""
    engine_reserve_bytes: int = ENGINE_RESERVE_BYTES
    """Of each engine process, also while it sleeps: CUDA context, NCCL, captured graphs."""
    cpu_rank_bytes: int = 288 << 20
    """Of a rank on a CPU slot: what its libraries take for themselves, before there is a model."""
    cpu_engine_bytes: int = 464 << 20
    """The same of each process of an engine."""
    cpu_run_bytes: int = 768 << 20
    """Of the driver, Ray and what it starts on each node, and files of libraries, which all share; or half more."""
    cpu_allocator_share: float = 0.4
    """Of what a rank works with: what a CPU's allocator keeps between blocks for as long as the phase is."""
    allocator_share: float = 0.05
    """Of activations: what torch's allocator cannot use because blocks have other sizes."""
    expert_imbalance: float = 1.25
    """Tokens of the busiest expert rank over the mean."""
    train_efficiency: float = 0.42
    """Of the peak, in matrix products forward and backward; links, bubbles and launches come on top."""
    prefill_efficiency: float = 0.42
    """The same in an engine's prefill, and in decoding where that is bound by arithmetic."""
    decode_bandwidth: float = 0.6
    """Of the memory's bandwidth, in decoding."""
    link_efficiency: float = 0.7
    """Of NVLink and network, in collectives and in the reshard."""
    decode_step_s: float = 0.004
    """Sampling and launches of one decoding step, whatever is computed; published runs take as much."""
    decode_layer_s: float = 0.00005
    """The same for each layer, twice this where tensor ranks add up, four times where they are on several machines."""
    decode_sample_s: float = 0.000022
    """Measured, for each running sample in one decoding step: scheduling and output on one core of the engine's host.
    The host works while the GPU computes the step before, so the slower of both counts."""
    train_layer_s: float = 0.001
    """Launches of one layer forward for one micro-batch, for backward twice this."""
    expert_layer_s: float = 0.004
    """The same for a layer with experts."""
    lone_expert_s: float = 0.0001
    """Of each expert of a rank in such a layer, where they are not multiplied together (`moe_grouped_gemm`)."""
    tail_share: float = 0.1
    """Of the samples that an engine works on at a time: those that are left when most have ended."""
    mean_response_share: float = 0.5
    """Mean length of responses over the longest that is allowed."""
    mean_prompt_share: float = 0.5
    """The same of prompts."""
    response_sigma: float = 1.0
    """Of the logarithm of a response's tokens, before the longest that is allowed cuts it."""


ASSUMPTIONS = Assumptions()
