"""A worker's log: everything that its process says goes to one file of the run, without secrets.

Warnings of other libraries that are known to mean nothing here (`HARMLESS`) are set aside and never lost: they stand
beside the log, and its tail says how many. A warning that a user could act on does not belong among them.
"""

from __future__ import annotations

import faulthandler
import io
import itertools
import os
import re
import signal
import sys
from pathlib import Path

from mrl.redaction import redact_text

STACK_SIGNAL = signal.SIGUSR2


def make_log_directory(run_directory: Path, role: str) -> Path:
    """Make a new directory for the logs of one group of workers: a role that is started again gets another."""
    for attempt in itertools.count(1):
        directory = run_directory / "logs" / f"{role}.{attempt}"
        try:
            directory.mkdir(mode=0o700, parents=True)
        except FileExistsError:
            continue
        return directory
    raise AssertionError("counting ended")


def log_path(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.log"


def stack_path(log: Path) -> Path:
    """Return where a rank writes its Python stacks when it is asked for them."""
    return log.with_suffix(".stack")


def harmless_path(log: Path) -> Path:
    """Return where those warnings of a rank go that are known to be harmless."""
    return log.with_suffix(".harmless")


class _RedactingStream(io.TextIOBase):
    """A text stream that blanks out secrets before they reach the file, and sends what is harmless to another."""

    def __init__(self, descriptor: int, for_harmless: int) -> None:
        self._descriptor = descriptor
        self._for_harmless = for_harmless
        self._num_lost = 0

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def write(self, text: str) -> int:
        """Write it. What a full disk does not take is counted, and told of later: no training ends over a log."""
        lost = f"({self._num_lost} bytes could not be written here)\n" if self._num_lost else ""
        data = (lost + redact_text(text)).encode("utf-8", "backslashreplace")
        descriptor = self._for_harmless if is_harmless(text) else self._descriptor
        try:
            while data:
                data = data[os.write(descriptor, data) :]
            self._num_lost = 0
        except OSError:
            self._num_lost += len(data) - len(lost)
        return len(text)


def redirect_output(log: Path) -> None:
    """Send this process's output, a crash's traceback, and stacks on request, to the log and its neighbor.

    The file descriptors themselves are redirected, so that what C code prints while it dies is kept too.
    """
    descriptor = _open(log)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    for_harmless = _open(harmless_path(log))
    sys.stdout = _RedactingStream(1, for_harmless)
    sys.stderr = _RedactingStream(2, for_harmless)
    faulthandler.enable(file=2)
    faulthandler.register(STACK_SIGNAL, file=_open(stack_path(log)), all_threads=True)


def tail(path: Path, num_lines: int) -> str:
    """Return the last lines of a log, secrets blanked out; empty if there are none.

    Harmless warnings, which C code and processes of libraries write to it directly, are left out and counted.
    """
    kept, num_left_out = _last_lines(path, num_lines)
    aside = harmless_path(path)
    num_aside = len(aside.read_bytes().splitlines()) if aside.is_file() else 0
    note = f"({num_left_out + num_aside} lines of harmless warnings left out, {num_aside} of them are in {aside.name})"
    return "\n".join([*([note] if num_left_out + num_aside else []), *kept])


def last_words(path: Path) -> str:
    """Return the last line of a log that says something; empty where there is none."""
    return next(filter(str.strip, reversed(_last_lines(path, 10)[0])), "")


def _last_lines(path: Path, num_lines: int) -> tuple[list[str], int]:
    """The last lines without harmless warnings and secrets, and the number of lines that are left out among them."""
    if not path.is_file():
        return [], 0
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - num_lines * 800))
        lines = file.read().decode("utf-8", "replace").splitlines()
    kept = without_harmless(lines)
    return redact_text("\n".join(kept[-num_lines:])).splitlines(), len(lines) - len(kept)


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


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
