"""Builds vLLM's own model on each rank of an engine, without memory, and compares it with the reshard's plan.

vLLM makes its groups in torch's fake world and builds its model from its own classes: floating-point tensors have a
shape only, and integers, such as maps of experts, are real. Then its own loader copies Hugging Face tensors without
contents into the parameters. The places of these copies show what each parameter consists of.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.nn import Module
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.registry import ModelRegistry

from mrl.config.arithmetic import longest_sample_tokens
from mrl.config.schema import Config
from mrl.dtypes import dtype_name, torch_dtype
from mrl.models.families import FAMILIES, read_spec
from mrl.models.open_model import OpenSpec
from mrl.models.rollout_table import EngineSizes, rollout_tensors
from mrl.models.spec import ModelSpec
from mrl.models.table import file_tensors, hf_tensors
from mrl.rehearse.engine_weights import (
    EngineRanks,
    EngineReport,
    ParameterDifference,
    PlannedWeights,
    differences,
    shape_differences,
)
from mrl.rehearse.model_files import write_config
from mrl.rehearse.vllm_world import build, engine_rank, load
from mrl.rollout.capacity import engine_share
from mrl.rollout.engine import EngineSettings
from mrl.rollout.vllm_engine import engine_arguments
from mrl.weight_sync.vllm_fp8 import is_quantized_on_arrival
from mrl.weight_sync.vllm_parameters import full_tensor_reason

_REFUSALS = (ImportError, NotImplementedError, RuntimeError, ValueError)
"""Errors of vLLM's CPU build for settings of GPUs, and of code that reads values of tensors without contents."""


def rehearse_engine(config: Config, model: str) -> EngineReport:
    """Build every rank of an engine, and compare its parameters with the plan."""
    began = time.monotonic()
    with TemporaryDirectory(prefix="mrl-rehearse-") as directory:
        settings = _settings(config, write_config(model, Path(directory)))
        spec, dtype = read_spec(settings.model), torch_dtype(settings.dtype)
        planned = PlannedWeights(config, spec, settings.dtype)
        sizes = EngineSizes.of(config.rollout, spec)
        stages = (rollout_tensors(spec, sizes, stage * sizes.tp) for stage in range(sizes.pp))
        wide = {tensor.name for tensors in stages for tensor in tensors if tensor.dtype == "float32"}
        name, reason, ranks = FAMILIES[spec.family].architecture("lm"), "", []
        if config.rollout.dp > 1:
            reason = f"the {config.rollout.dp} data-parallel ranks of an engine are not built here"
        for rank in () if reason else range(settings.num_workers):
            with ExitStack() as stack:
                try:
                    vllm_config = EngineArgs(**engine_arguments(settings)).create_engine_config()
                    stack.enter_context(engine_rank(vllm_config, rank))
                    built = build(vllm_config)
                except _REFUSALS as error:
                    error = _import_error(name) or error
                    reason = f"{name} cannot be built on a CPU as rank {rank}: {type(error).__name__}: {error}"
                    break
                name, found = type(built).__name__, list(_wrong_dtypes(rank, built, dtype, wide))
                if isinstance(spec, OpenSpec):
                    reason = f"mrl has no table for {spec.family}, so engines get whole tensors for vLLM's loader"
                elif reason := full_tensor_reason(built):
                    reason = f"{name} takes whole tensors, which only vLLM's loader can divide: {reason}"
                elif reason := _loading_reason(name, built, spec):
                    shapes = {key: tuple(parameter.shape) for key, parameter in built.named_parameters()}
                    found += shape_differences(rank, planned.of(rank), shapes)
                else:
                    found += differences(rank, planned.of(rank), load(built, hf_tensors(spec, "lm"), dtype))
                ranks.append(_figures(rank, built, found))
    return EngineReport(name, tuple(_kinds(ranks)), reason, time.monotonic() - began)


def _import_error(name: str) -> ImportError | None:
    """Return why vLLM cannot import its class of a model. vLLM's own error names only its log."""
    registered = ModelRegistry.models.get(name)
    try:
        importlib.import_module(getattr(registered, "module_name", "vllm"))
    except ImportError as error:
        return error
    return None


def _settings(config: Config, model: Path) -> EngineSettings:
    """Return the settings of a run's engines, for vLLM on a CPU."""
    rollout, spec = config.rollout, read_spec(model)
    left_out = {"dtype"}
    if spec.gdn:  # on a CPU, vLLM has no cache of states. It changes no parameter
        left_out.add("enable_prefix_caching")
    return EngineSettings(
        model=model,
        dtype=rollout.vllm.get("dtype", config.actor.dtype),
        device="cpu",
        max_tokens=longest_sample_tokens(rollout),
        vocab=spec.vocab,
        sockets=model,
        replica="",
        tp=rollout.tp,
        pp=rollout.pp,
        share=engine_share(config),
        vllm={name: value for name, value in rollout.vllm.items() if name not in left_out},
    )


def _loading_reason(name: str, model: Module, spec: ModelSpec) -> str:
    """Return why only names and shapes are compared, as vLLM's loaders do more than copy; empty if they only copy."""
    does = ""
    if any(map(is_quantized_on_arrival, model.modules())):
        does = "quantizes weights to FP8"
    elif file_tensors(spec, "lm") != hf_tensors(spec, "lm"):
        does = "transposes experts"
    return does and f"{name} {does} while it loads them: only names and shapes are compared"


def _wrong_dtypes(rank: int, model: Module, dtype: torch.dtype, wide: set[str]) -> Iterator[ParameterDifference]:
    for name, parameter in model.named_parameters():
        planned = torch.float32 if name in wide else dtype
        if parameter.dtype != planned:
            yield ParameterDifference(rank, name, dtype_name(planned), dtype_name(parameter.dtype))


def _figures(rank: int, model: Module, found: Iterable[ParameterDifference]) -> EngineRanks:
    parameters = [*model.parameters()]
    return EngineRanks((rank,), len(parameters), sum(parameter.nbytes for parameter in parameters), tuple(found))


def _kinds(ranks: Iterable[EngineRanks]) -> Iterator[EngineRanks]:
    """Yield ranks with the same figures together."""
    kinds: dict[tuple[int, int], list[EngineRanks]] = {}
    for one in ranks:
        kinds.setdefault((one.num_parameters, one.num_bytes), []).append(one)
    for (num_parameters, num_bytes), same in kinds.items():
        numbers = tuple(rank for one in same for rank in one.ranks)
        found = tuple(difference for one in same for difference in one.differences)
        yield EngineRanks(numbers, num_parameters, num_bytes, found)
