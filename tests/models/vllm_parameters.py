"""Every parameter of real vLLM models, held by one process that acts as one rank of an engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}

import torch
from safetensors.torch import load_file
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model


@contextmanager
def one_process(store: Path) -> Iterator[Any]:
    """vLLM's groups of a world of one, whose size and rank may be overwritten before a model is built."""
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
    group = parallel_state._EP = parallel_state.get_tp_group()
    yield group
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


def parameters(model: Path, group: Any, tp: int, ep: int, rank: int) -> dict[str, torch.Tensor]:
    """Return the parameters that vLLM's own loader reads from the model's file on that rank."""
    arguments = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        enable_expert_parallel=ep > 1,
    )
    config = arguments.create_engine_config()
    config.parallel_config.tensor_parallel_size = tp
    group.world_size, group.rank_in_group = tp, rank
    try:
        with set_current_vllm_config(config):
            made = initialize_model(vllm_config=config)
            for parameter in made.parameters():
                parameter.data.fill_(torch.nan)  # what the loader leaves shows
            made.load_weights(iter(load_file(model / "model.safetensors").items()))
    finally:
        group.world_size, group.rank_in_group = 1, 0
    return {name: parameter.detach() for name, parameter in made.named_parameters()}
