"""The states of all random generators that a model may draw from on this rank."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from megatron.core import tensor_parallel
from torch import Tensor

_TRACKED = "tensor-parallel/"


def random_states() -> dict[str, Tensor]:
    """Copies of them, by name: torch's own on the CPU and the GPU, and those that Megatron keeps beside."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["gpu"] = torch.cuda.get_rng_state()
    tracked = tensor_parallel.get_cuda_rng_tracker().get_states()
    return states | {_TRACKED + name: state.clone() for name, state in tracked.items()}


def set_random_states(states: Mapping[str, Tensor]) -> None:
    """Put back what `random_states` gave."""
    torch.set_rng_state(states["cpu"])
    if "gpu" in states:
        torch.cuda.set_rng_state(states["gpu"])
    tracked = {name.removeprefix(_TRACKED): x for name, x in states.items() if name.startswith(_TRACKED)}
    tensor_parallel.get_cuda_rng_tracker().set_states(tracked)
