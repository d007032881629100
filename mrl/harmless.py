"""Warnings of other libraries that have no meaning in mrl, and are hidden from the output of its processes.

Each has its library and the reason. Warnings that a user could act on do not belong here. Workers store theirs in a
separate file next to their logs, and a command drops those of the process it runs in.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

_OF_PINNED = "it warns about a release later than the pinned one"
_AS_TOLD = "it repeats what mrl or the configuration has set"
HARMLESS = (  # pattern, library, reason
    (r"`torch\.distributed\.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated", "Megatron", _OF_PINNED),
    (r"full scope is deprecated\. Use empty cuda_graph_scope", "Megatron", "it warns about its own default"),
    (
        r"megatron/core/optimizer/optimizer\.py:\d+: UserWarning: The \.grad attribute of a Tensor that is not a leaf",
        "Megatron",
        "it checks whether there is a gradient to clear",
    ),
    (
        r"Ignoring clean_up_tokenization_spaces=True for BPE tokenizer",
        "transformers",
        "the text stays as the model wrote it, as it should",
    ),
    (r"`torch\.distributed\.reduce_op` is deprecated", "vLLM", "it inspects every name in torch"),
    (r"Passing raw prompts to InputProcessor is deprecated", "vLLM", _OF_PINNED),
    (
        r"The global random seed is set to 0\. Since VLLM_ENABLE_V1_MULTIPROCESSING is set to False",
        "vLLM",
        "the engine has the process to itself, and each request has its own seed",
    ),
    (r"Using None for EOS token id because tokenizer is not init", "vLLM", "mrl sets the tokens that end a sample"),
    (r"Enforce eager set, disabling torch\.compile", "vLLM", _AS_TOLD),
    (r"TORCH_COMPILE_DISABLE is set, disabling torch\.compile", "vLLM", _AS_TOLD),
    (r"Inductor compilation was disabled by user settings", "vLLM", _AS_TOLD),
    (r"sleep mode is not supported on CPU, ignore it", "vLLM", "a CPU has no separate memory to free"),
)
HARMLESS_WITHOUT_GPU = (  # with a GPU, they may explain why a run is slow
    (r"Apex (is|are) not installed\. Falling back to", "Megatron", "both it and Transformer Engine need CUDA"),
    (r"recommended to set the environment variable CUDA_DEVICE_MAX_CONNECTIONS", "Megatron", "it is read by CUDA"),
    (r"torch/_library/triton\.py:\d+\] Triton not available", "torch", "its kernels are for GPUs"),
    (r"Triton is not installed\. triton-cpu is expected", "vLLM", "the plain kernels are used"),
    (r"Model Runner V2 requires Triton; using the V1", "vLLM", "mrl is tested with both"),
    (r"Failed to import the DeepSelect extension", "vLLM", "it is a kernel for GPUs"),
    (
        r"does not officially support disabling chunked prefill",
        "vLLM",
        "mrl switches it off, so that its seeds are reproducible",
    ),
)
_HAS_GPU = Path("/proc/driver/nvidia").exists()
_KNOWN = re.compile("|".join(row[0] for row in (*HARMLESS, *(() if _HAS_GPU else HARMLESS_WITHOUT_GPU))))
_SOURCE_FOLLOWS = re.compile(r"^\S.*:\d+: \w*Warning: ")


def is_harmless(text: str) -> bool:
    """Return whether a piece of output begins with a harmless warning."""
    return _KNOWN.search(text.partition("\n")[0]) is not None


def without_harmless(lines: list[str]) -> list[str]:
    """Return these lines without harmless warnings, and without the source line that Python prints after one."""
    kept = []
    is_source = False
    for line in lines:
        if is_source and line.startswith("  "):
            is_source = False
        elif is_harmless(line):
            is_source = _SOURCE_FOLLOWS.match(line) is not None
        else:
            is_source = False
            kept.append(line)
    return kept


class _WithoutHarmless:
    """A text stream that drops harmless warnings, which arrive in one piece each. Otherwise it behaves like the
    original."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return len(text) if is_harmless(text) else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def harmless_dropped() -> Iterator[None]:
    """Drop harmless warnings from stderr for the length of the block."""
    with contextlib.redirect_stderr(_WithoutHarmless(sys.stderr)):
        yield
