"""Warnings of other libraries that mean nothing where mrl uses them: who sees the output of a process is spared them.

Each has its library and its reason. A warning that a user could act on does not belong among them. Workers set theirs
aside beside their logs, and a command drops those of its own process.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

_OF_PINNED = "it warns of a later release than the pinned one"
_AS_TOLD = "it repeats what mrl or the configuration has set"
HARMLESS = (  # pattern, library, why
    (r"`torch\.distributed\.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated", "Megatron", _OF_PINNED),
    (r"full scope is deprecated\. Use empty cuda_graph_scope", "Megatron", "it speaks of its own default"),
    (
        r"megatron/core/optimizer/optimizer\.py:\d+: UserWarning: The \.grad attribute of a Tensor that is not a leaf",
        "Megatron",
        "it looks whether there is a gradient to clear",
    ),
    (
        r"Ignoring clean_up_tokenization_spaces=True for BPE tokenizer",
        "transformers",
        "the text stays as the model wrote it, as it should",
    ),
    (r"`torch\.distributed\.reduce_op` is deprecated", "vLLM", "it looks at every name that torch has"),
    (r"Passing raw prompts to InputProcessor is deprecated", "vLLM", _OF_PINNED),
    (
        r"The global random seed is set to 0\. Since VLLM_ENABLE_V1_MULTIPROCESSING is set to False",
        "vLLM",
        "the engine has the process for itself, and each request has its own seed",
    ),
    (r"Using None for EOS token id because tokenizer is not init", "vLLM", "mrl names the tokens that end a sample"),
    (r"Enforce eager set, disabling torch\.compile", "vLLM", _AS_TOLD),
    (r"TORCH_COMPILE_DISABLE is set, disabling torch\.compile", "vLLM", _AS_TOLD),
    (r"Inductor compilation was disabled by user settings", "vLLM", _AS_TOLD),
    (r"sleep mode is not supported on CPU, ignore it", "vLLM", "a CPU has no memory of its own to give back"),
)
HARMLESS_WITHOUT_GPU = (  # with one they may say why a run is slow
    (r"Apex (is|are) not installed\. Falling back to", "Megatron", "both it and Transformer Engine need CUDA"),
    (r"recommended to set the environment variable CUDA_DEVICE_MAX_CONNECTIONS", "Megatron", "it is read by CUDA"),
    (r"torch/_library/triton\.py:\d+\] Triton not available", "torch", "its kernels are for GPUs"),
    (r"Triton is not installed\. triton-cpu is expected", "vLLM", "the plain kernels serve"),
    (r"Model Runner V2 requires Triton; using the V1", "vLLM", "mrl is tested with both"),
    (r"Failed to import the DeepSelect extension", "vLLM", "it is a kernel for GPUs"),
    (r"does not officially support disabling chunked prefill", "vLLM", "mrl switches it off, for its seeds to hold"),
)
_HAS_GPU = Path("/proc/driver/nvidia").exists()
_KNOWN = re.compile("|".join(row[0] for row in (*HARMLESS, *(() if _HAS_GPU else HARMLESS_WITHOUT_GPU))))
_SOURCE_FOLLOWS = re.compile(r"^\S.*:\d+: \w*Warning: ")


def is_harmless(text: str) -> bool:
    """Return whether a piece of output begins with such a warning."""
    return _KNOWN.search(text.partition("\n")[0]) is not None


def without_harmless(lines: list[str]) -> list[str]:
    """Return these lines without such warnings, and without the line of source code that Python shows below one."""
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
    """A text stream that drops such warnings, which come in one piece each, and is the other's in all else."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return len(text) if is_harmless(text) else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def harmless_dropped() -> Iterator[None]:
    """Drop such warnings from stderr for the length of the block."""
    with contextlib.redirect_stderr(_WithoutHarmless(sys.stderr)):
        yield
