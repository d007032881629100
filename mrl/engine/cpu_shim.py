"""Megatron-core on a machine without CUDA, over gloo.

Megatron asks torch for the current CUDA device, streams, events and random generators by name, everywhere. This file
replaces the *name* `torch` in every loaded `megatron.core` module by a shim: it forwards everything to the real
torch, except that the current device is the CPU, streams and events do nothing, and tensors on "cuda" are created in
memory. Other modules keep their `torch`, with one exception: `Tensor.cuda` and `Tensor.type` are methods, so they are
wrapped, and behave differently only when a `megatron.core` module calls them.

If CUDA is available, `install` raises an error: Megatron must run unchanged there.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from mrl.errors import EngineError

_MEGATRON = "megatron.core"
_CPU = torch.device("cpu")
_FACTORIES = (
    *("empty", "zeros", "ones", "full", "tensor", "arange", "rand", "randn", "randint", "eye", "linspace", "as_tensor"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "Generator"),
)
_ALREADY = "_mrl_cpu_standin"


def import_megatron() -> None:
    """Import Megatron without loading torch's compiler, which its decorators would load and `install` switches off.

    Loading the compiler takes three seconds per process, a third of its start.
    """
    if torch.cuda.is_available():
        return
    compiler = torch.compile
    torch.compile = lambda function: function  # type: ignore[assignment]
    try:
        importlib.import_module(_MEGATRON)
    finally:
        torch.compile = compiler


class _NullStream:
    """A stream or event that does nothing: on a CPU, work is done in program order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., _NullStream]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: self  # an event of a stream does nothing either

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _NullStream)

    def __hash__(self) -> int:
        return 0


class _PatchedModule(ModuleType):
    """A module with some names replaced; all other names come from the original."""

    def __init__(self, original: ModuleType, replaced: dict[str, Any]) -> None:
        super().__init__(original.__name__)
        self.__dict__.update(replaced)
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


@contextlib.contextmanager
def _nothing(*_: Any, **__: Any) -> Iterator[None]:
    yield


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*args: Any, device: Any = None, **options: Any) -> Any:
        if options.pop("pin_memory", False):
            warnings.warn("pinned memory needs CUDA: plain memory is used", stacklevel=2)
        if device is not None:
            options["device"] = _CPU if torch.device(device).type == "cuda" else device
        return factory(*args, **options)

    return make


def _random_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_random_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(state)


def _cuda() -> ModuleType:
    random = _PatchedModule(torch.cuda.random, {"get_rng_state": _random_state, "set_rng_state": _set_random_state})
    nvtx = _PatchedModule(
        torch.cuda.nvtx, {"range_push": lambda *_: None, "range_pop": lambda: None, "range": _nothing}
    )
    return _PatchedModule(
        torch.cuda,
        {
            "current_device": lambda: _CPU,
            "set_device": lambda *_: None,
            "device": _nothing,
            "device_count": lambda: 1,
            "Stream": _NullStream,
            "Event": _NullStream,
            "current_stream": lambda *_: _NullStream(),
            "default_stream": lambda *_: _NullStream(),
            "stream": _nothing,
            "set_stream": lambda *_: None,
            "synchronize": lambda *_: None,
            "empty_cache": lambda: None,
            "manual_seed": torch.manual_seed,
            "get_rng_state": _random_state,
            "set_rng_state": _set_random_state,
            "random": random,
            "nvtx": nvtx,
        },
    )


def _all_gather(outputs: list[torch.Tensor], own: torch.Tensor, group: Any = None, **options: Any) -> Any:
    """Gather tensors of different lengths too, which gloo refuses: all are padded."""
    lengths = [len(output) for output in outputs]
    if len(set(lengths)) == 1 or torch.distributed.get_backend(group) != "gloo":
        return torch.distributed.all_gather(outputs, own, group, **options)
    padded = own.new_zeros(max(lengths), *own.shape[1:])
    padded[: len(own)] = own
    gathered = [torch.empty_like(padded) for _ in outputs]
    torch.distributed.all_gather(gathered, padded, group)
    for output, whole in zip(outputs, gathered, strict=True):
        output.copy_(whole[: len(output)])


def _reduce_scatter(output: torch.Tensor, parts: list[torch.Tensor], *, group: Any = None, **options: Any) -> Any:
    """Sum tensors of different lengths too, which gloo refuses: each rank gets all sums."""
    if len({len(part) for part in parts}) == 1 or torch.distributed.get_backend(group) != "gloo":
        return torch.distributed.reduce_scatter(output, parts, group=group, **options)
    sums = torch.cat(parts)
    torch.distributed.all_reduce(sums, group=group)
    output.copy_(torch.split(sums, [len(part) for part in parts])[torch.distributed.get_rank(group)])


def _torch() -> ModuleType:
    factories = {name: _on_cpu(getattr(torch, name)) for name in _FACTORIES if name != "Generator"}
    # `Generator` must remain a class: Megatron uses it in isinstance.
    collectives = {"all_gather": _all_gather, "reduce_scatter": _reduce_scatter}
    distributed = _PatchedModule(torch.distributed, collectives)
    return _PatchedModule(torch, {"cuda": _cuda(), "distributed": distributed, **factories})


def _called_by_megatron() -> bool:
    caller = sys._getframe(2).f_globals.get("__name__", "")
    return bool(caller == _MEGATRON or caller.startswith(f"{_MEGATRON}."))


def _wrap_tensor_methods() -> None:
    to_cuda, type_of = torch.Tensor.cuda, torch.Tensor.type

    @functools.wraps(to_cuda)
    def cuda(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        return self if _called_by_megatron() else to_cuda(self, *args, **options)

    @functools.wraps(type_of)
    def type_(self: torch.Tensor, *args: Any, **options: Any) -> Any:
        named = type_of(self, *args, **options)
        # The distributed optimizer and gradient clipping only know the types of CUDA tensors.
        return (
            named.replace("torch.", "torch.cuda.", 1) if not args and not options and _called_by_megatron() else named
        )

    torch.Tensor.cuda = cuda  # type: ignore[method-assign,assignment]
    torch.Tensor.type = type_  # type: ignore[method-assign,assignment]


def _import_late_modules() -> None:
    """Import the modules that Megatron imports inside functions, so that `install` can replace their `torch`."""
    import megatron.core.dist_checkpointing.strategies.async_utils
    import megatron.core.dist_checkpointing.strategies.common
    import megatron.core.dist_checkpointing.strategies.filesystem_async
    import megatron.core.dist_checkpointing.strategies.fully_parallel
    import megatron.core.dist_checkpointing.strategies.state_dict_saver
    import megatron.core.dist_checkpointing.strategies.torch
    import megatron.core.distributed.finalize_model_grads
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer
    import megatron.core.pipeline_parallel.schedules
    import megatron.core.tensor_parallel
    import megatron.core.transformer.moe.moe_layer
    import megatron.core.transformer.multi_token_prediction  # noqa: F401


def _all_to_all_with_numbers(all_to_all: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(all_to_all)
    def exchange(group: Any, x: torch.Tensor, output_sizes: Any = None, input_sizes: Any = None, **options: Any) -> Any:
        numbers = [
            sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes for sizes in (output_sizes, input_sizes)
        ]
        return all_to_all(group, x, *numbers, **options)

    return exchange


def install() -> None:
    """Make Megatron run on the CPU. Call it once per process, before creating any Megatron object."""
    if torch.cuda.is_available():
        raise EngineError("the CPU shim for Megatron cannot be installed on a machine with CUDA")
    _import_late_modules()
    if not hasattr(torch.Tensor.cuda, _ALREADY):
        _wrap_tensor_methods()
        setattr(torch.Tensor.cuda, _ALREADY, True)
    replacement = _torch()
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{_MEGATRON}.") and getattr(module, "torch", None) is torch:
            module.torch = replacement  # type: ignore[attr-defined]
    _replace_single_names()
    # Compiled helpers take long to build and bring no gain here. It is too late for an environment variable of torch.
    torch._dynamo.config.disable = True


def _replace_single_names() -> None:
    from megatron.core.tensor_parallel import mappings, random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    random._get_cuda_rng_state = _random_state
    random._set_cuda_rng_state = _set_random_state
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # 0.16 leaves the name undefined without Transformer Engine
    if not hasattr(mappings.all_to_all, _ALREADY):
        exchange = _all_to_all_with_numbers(mappings.all_to_all)  # gloo needs split sizes as numbers
        setattr(exchange, _ALREADY, True)
        modules: list[Any] = [mappings, token_dispatcher, sys.modules[f"{_MEGATRON}.tensor_parallel"]]
        for module in modules:
            module.all_to_all = exchange
