"""Receiving side in SGLang's workers. SGLang has vLLM's tensors, except for the names of experts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrl.dtypes import dtype_name
from mrl.errors import RolloutError, did_you_mean
from mrl.weight_sync.digest import Digests
from mrl.weight_sync.ipc import IpcReceiver, socket_path

LOAD_FORMAT = "mrl:"
"""Beginning of the load format of an update from the trainer; the version follows."""
SOCKETS, REPLICA = "MRL_SGLANG_SOCKETS", "MRL_SGLANG_REPLICA"
"""Variables with the run's directory of sockets and the name of the replica."""
_VLLM_EXPERTS, _EXPERTS = ".experts.routed_experts.", ".experts."
_PLAIN = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod")


def receive_update(
    original: Callable[..., tuple[bool, str]], updater: Any, named_tensors: Any, load_format: str | None = None
) -> tuple[bool, str]:
    """Receive one version, or send the trainer the reason for rejecting it, and return whether all ranks have it.

    It never raises an error: an error here ends the whole engine.
    """
    if load_format is None or not load_format.startswith(LOAD_FORMAT):
        return original(updater, named_tensors, load_format)
    ipc = _receiver(updater.tp_rank)
    try:
        ipc.reply(write(updater.get_model(), _tensors(ipc, int(load_format.removeprefix(LOAD_FORMAT)))))
        reason = ""
    except (RolloutError, RuntimeError, ValueError) as error:
        reason = str(error)
        ipc.reject(reason)
    return _of_all_ranks(reason)


@torch.no_grad()
def write(model: Any, tensors: Iterator[tuple[str, Tensor]]) -> dict[str, str]:
    """Write every parameter of a model exactly once. Return digests of the result, by the trainer's names."""
    if reason := rearranged(model):
        raise RolloutError(reason)
    digests, missing = Digests(), dict(model.named_parameters())
    for name, tensor in tensors:
        if name in digests:
            raise RolloutError("this parameter was sent twice", where=name)
        parameter = missing.pop(name.replace(_VLLM_EXPERTS, _EXPERTS), None)
        if parameter is None:
            raise RolloutError("the model has no parameter of this name", where=name, fix=did_you_mean(name, missing))
        if (sent := _form(tensor)) != (wanted := _form(parameter)):
            raise RolloutError(f"the trainer sends {sent}, but the model has {wanted}", where=name)
        parameter.copy_(tensor)
        digests.add(name, parameter)
    if missing:
        listed = ", ".join(sorted(missing)[:5])
        raise RolloutError(f"{len(missing)} of the model's parameters were not sent: {listed}")
    return digests.read()


def rearranged(model: Any) -> str:
    """Return why a model's parameters cannot be overwritten; empty if kernels read them directly."""
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None and type(method).__name__ not in _PLAIN:
            return f"{name} is stored by {type(method).__name__}, which rearranges its weights"
        if getattr(module, "use_intel_amx_backend", False):
            return f"the kernels for Intel AMX have rearranged the weights of {name}"
    return ""


def _tensors(ipc: IpcReceiver, version: int) -> Iterator[tuple[str, Tensor]]:
    for bucket in ipc.buckets():
        if bucket.version != version:
            raise RolloutError(f"the trainer sends version {bucket.version} instead of version {version}")
        yield from bucket.tensors.items()


def _form(tensor: Tensor) -> str:
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"


def _of_all_ranks(reason: str) -> tuple[bool, str]:
    from sglang.srt.distributed import get_tp_group

    num_failed = torch.tensor([bool(reason)], dtype=torch.int32)
    torch.distributed.all_reduce(num_failed, group=get_tp_group().cpu_group)
    if not num_failed.item():
        return True, ""
    return False, reason or "another rank of the engine refused the weights"


@cache
def _receiver(tp_rank: int) -> IpcReceiver:
    """Listen while the worker lives."""
    return IpcReceiver(socket_path(Path(os.environ[SOCKETS]), os.environ[REPLICA], tp_rank))
