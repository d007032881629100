"""`mrl env`: show versions, devices, and which parts of the stack work on this machine, for a bug report."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mrl
from mrl.cli.arguments import aligned
from mrl.libraries import IMPORT_TRANSFORMER_ENGINE, failure, versions
from mrl.preflight.node_facts import cpu_model, git_revision, gpus, memory_bytes, usable_cpus
from mrl.redaction import redact

EXAMPLE = "mrl env --json"

_PROBES = {
    "Megatron": "import megatron.core",
    "vLLM": "from vllm import LLM",
    "Transformer Engine": IMPORT_TRANSFORMER_ENGINE,
    "NCCL": (
        "import torch, torch.distributed as distributed\n"
        "if not distributed.is_nccl_available(): raise SystemExit('this build of torch has no NCCL')\n"
        "if not torch.cuda.is_available(): raise SystemExit('no CUDA device')"
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--timeout", type=float, default=120, metavar="SECONDS", help="time for each import test (default 120)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the report. A missing component is part of the report, not a failure."""
    report = redact(collect(arguments.timeout))
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        print("\n".join(describe(report)))
    return 0


def collect(timeout_s: float) -> dict[str, Any]:
    with ThreadPoolExecutor() as threads:
        tried = threads.map(lambda code: failure(code, timeout_s), _PROBES.values())
        usable = {name: {"usable": not reason, "why": reason} for name, reason in zip(_PROBES, tried, strict=True)}
    return {
        "mrl": {"version": mrl.__version__, "revision": git_revision(Path(mrl.__file__).parent.parent)},
        "versions": versions(),
        "devices": {"cpu": cpu_model(), "usable_cpus": usable_cpus(), "memory_bytes": memory_bytes(), "gpus": gpus()},
        "usable": usable,
    }


def describe(report: dict[str, Any]) -> Iterator[str]:
    own, devices = report["mrl"], report["devices"]
    yield f"mrl {own['version']}" + (f" at {own['revision']}" if own["revision"] else "")
    yield "\nversions"
    yield from aligned((name, version or "not installed") for name, version in report["versions"].items())
    yield "\ndevices"
    shown = {
        "processor": f"{devices['cpu']}, {devices['usable_cpus']:g} usable",
        "memory": f"{devices['memory_bytes'] / 2**30:.1f} GiB",
    }
    for index, gpu in enumerate(devices["gpus"]):
        memory = "memory of the host" if gpu["memory_mib"] is None else f"{gpu['memory_mib'] / 1024:.1f} GiB"
        shown[f"GPU {index}"] = f"{gpu['name']}, {memory}, driver {gpu['driver']}"
    yield from aligned((shown if devices["gpus"] else shown | {"GPUs": "none"}).items())
    yield "\nusable"
    usable = report["usable"].items()
    yield from aligned((name, "yes" if probe["usable"] else f"no: {probe['why']}") for name, probe in usable)
