"""Checks of machines: this one, each node of a cluster by the facts it sends, and Slurm's partitions."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from mrl.config.arithmetic import rows_per_step, tokens_limit
from mrl.config.resolved.load import Resolved
from mrl.config.resolved.run_directory import CHECKPOINTS, steps_in
from mrl.config.schema import Config
from mrl.config.sft import AnyConfig
from mrl.config.sglang import INSTALL
from mrl.errors import ModelError, SetupError
from mrl.libraries import TRANSFORMER_ENGINE_FIX
from mrl.plan.assumptions import GIB
from mrl.plan.known_models import model_spec
from mrl.plan.memory import gib
from mrl.preflight.findings import (
    CheckResult,
    check_adapters,
    check_columns,
    check_experts,
    check_machine,
    check_own_parts,
    check_planned_memory,
    fail,
    ok,
    skip,
    warn,
)
from mrl.preflight.node_facts import node_facts

_CHECKPOINT_BYTES_PER_PARAMETER = 12  # float32 weights and Adam's two moments
_COLUMN_BYTES_PER_TOKEN = 4 * 8  # ids, log-probs, values, advantages, ... of a step, in Ray's object store
_SHM_FLOOR_BYTES = 1 << 30  # NCCL and vLLM also use it for communication; a container has 64 MiB by default
_MIN_FILES, _MIN_PROCESSES, _MIN_PORTS = 16384, 8192, 8192
_PROBE = "mrl.preflight.node_facts:node_facts"
_SINFO = ("sinfo", "--noheader", "--format=%P|%a|%F|%G|%c|%l")
_SINFO_TIMEOUT_S = 20
_GPUS = re.compile(r"gpu(?::[^:,(]+)?:(\d+)")


def existing_parent(directory: Path) -> Path:
    """Return the nearest existing directory at or above a path."""
    return next(parent for parent in (directory.absolute(), *directory.absolute().parents) if parent.is_dir())


@contextmanager
def canary_file(config: AnyConfig) -> Iterator[str]:
    """Create a file where the run directory will be, for the length of the block. Every node must see it."""
    directory = existing_parent(Path(config.run.dir))
    try:
        handle, path = tempfile.mkstemp(prefix=".mrl-canary-", dir=directory)
    except OSError as error:
        fix = "choose another run.dir"
        raise SetupError(f"cannot write there: {error.strerror}", where=str(directory), fix=fix) from error
    os.close(handle)
    try:
        yield path
    finally:
        os.unlink(path)


def check_start(resolved: Resolved[Any]) -> Iterator[CheckResult]:
    """Check what a run needs before it starts. Nodes of a joined cluster are checked when the run joins it."""
    config = resolved.config
    yield from check_own_parts(config)
    yield from check_columns(config)
    yield from check_experts(config)
    yield from check_adapters(config)
    yield from check_planned_memory(resolved)
    yield from check_disk(config)
    if config.cluster.ray_address is None:
        yield from check_here(config, with_gpus=False)


def check_here(config: AnyConfig, *, with_gpus: bool) -> Iterator[CheckResult]:
    """Check this machine. The query of its GPUs takes about a second."""
    with canary_file(config) as canary:
        facts = node_facts(canary, with_gpus)
    yield from check_nodes(config, [facts], facts["versions"])


def check_disk(config: AnyConfig) -> Iterator[CheckResult]:
    """Check the space for the kept checkpoints, the best one, and the one being written."""
    free, about = shutil.disk_usage(existing_parent(Path(config.run.dir))).free, "disk"
    try:
        num_parameters = model_spec(config.model.path).num_parameters
    except ModelError as error:
        yield skip(about, f"{gib(free)} free in {config.run.dir}; {error.what}", error.fix)
        return
    parameters = len(config.trained_roles()) * num_parameters
    num_existing = len(steps_in(Path(config.run.dir, config.run.name, CHECKPOINTS)))
    checkpoint_bytes, num = (
        parameters * _CHECKPOINT_BYTES_PER_PARAMETER,
        max(1, config.training.keep + 2 - num_existing),
    )
    what = f"{gib(free)} free in {config.run.dir}; {num} more checkpoints of {checkpoint_bytes / GIB:.2f} GiB"
    if checkpoint_bytes * num > free:
        fix = f"free {gib(checkpoint_bytes * num - free)}, a smaller training.keep, or another run.dir"
        yield fail(about, what, fix)
    else:
        yield ok(about, what)


def check_nodes(
    config: AnyConfig, facts: Sequence[Mapping[str, Any]], expected: Mapping[str, str]
) -> Iterator[CheckResult]:
    """Yield results about nodes, with identical results of several nodes merged. `expected` are the driver's
    versions."""
    nodes_of: dict[CheckResult, list[str]] = {}
    for node in facts:
        for finding in _check_node(config, node, expected):
            nodes_of.setdefault(finding, []).append(node["node"])
    for finding, names in nodes_of.items():
        if finding.verdict == "ok" and len(names) == len(facts):
            yield finding
            continue
        several = f"{len(names)} nodes ({', '.join(names[:4])}{', ...' * (len(names) > 4)})"
        yield replace(finding, what=f"{several if len(names) > 1 else names[0]}: {finding.what}")


def _check_node(config: AnyConfig, node: Mapping[str, Any], expected: Mapping[str, str]) -> Iterator[CheckResult]:
    if not node["sees_canary"]:
        fix = "put run.dir on a file system that all nodes share"
        yield fail("run directory", f"{config.run.dir} is not the directory that the driver sees", fix)
    elif not node["has_sockets"]:
        what = f"cannot create a Unix socket in {config.run.dir}; weights are sent to the engines through one"
        yield fail("run directory", what, "choose another run.dir")
    else:
        yield ok("run directory", f"{config.run.dir} is visible and supports sockets")
    if other := {name: version for name, version in node["versions"].items() if expected.get(name) != version}:
        actual = ", ".join(f"{name} {version}" for name, version in other.items())
        required = ", ".join(f"{name} {expected.get(name, 'not installed')}" for name in other)
        yield fail("versions", f"{actual}; the driver has {required}", "install the same versions on all nodes")
    if isinstance(config, Config) and config.rollout.engine == "vllm" and "mrl" not in node["versions"]:
        what = "mrl is on the path, but it is not installed: vLLM would not find the way to receive its weights"
        yield fail("weights", what, "pip install -e .")
    if isinstance(config, Config) and config.rollout.engine == "sglang":
        python = config.rollout.sglang.interpreter()  # at the same place on all nodes
        if python.is_file():
            yield ok("SGLang", f"its interpreter is {python}")
        else:
            yield fail("SGLang", f"there is no interpreter at {python}", INSTALL)
    yield _shared_memory(config, node["shm_free_bytes"])
    if config.cluster.device == "cpu":
        yield check_machine(config, node["usable_memory_bytes"], node["taken_memory_bytes"])
    yield from _limits(node, max(config.placement.pools.values()))
    for variable, interface in node["missing_interfaces"].items():
        what = f"{variable}={interface}, but this network interface does not exist"
        yield fail("network", what, f"unset {variable}, or set an interface from `ip link`")
    if config.cluster.device == "gpu" and node["gpus"] is not None:
        yield _gpus(config, node["gpus"], node["versions"])
        if node["transformer_engine"]:
            yield fail("Transformer Engine", node["transformer_engine"], TRANSFORMER_ENGINE_FIX)


def _shared_memory(config: AnyConfig, free: int) -> CheckResult:
    step = rows_per_step(config) * tokens_limit(config) * _COLUMN_BYTES_PER_TOKEN
    wanted = step + (_SHM_FLOOR_BYTES if config.cluster.device == "gpu" else 0)
    # Whole GiB, so that all nodes give the same message.
    what = f"/dev/shm has {free // GIB} GiB free; the columns of a step take up to {step / GIB:.2f} GiB"
    if free < wanted:
        return fail("shared memory", what, f"give the node or container {gib(wanted)} (--shm-size)")
    return ok("shared memory", what)


def _limits(node: Mapping[str, Any], num_ranks: int) -> Iterator[CheckResult]:
    low, files = False, max(_MIN_FILES, 2 * num_ranks)  # every rank of a group connects to the store of its rank 0
    for name, key, fewest, fix in (
        ("open files", "max_files", files, f"ulimit -Hn {files} for the user, or in the container"),
        ("processes", "max_processes", _MIN_PROCESSES, f"ulimit -u {_MIN_PROCESSES}"),
        ("ports", "num_ports", _MIN_PORTS, "widen net.ipv4.ip_local_port_range"),
    ):
        if 0 <= node[key] < fewest:  # -1 means no limit
            low = True
            yield warn("limits", f"at most {node[key]} {name}; a full node needs {fewest}", fix)
    if not low:
        yield ok("limits", "enough open files, processes and ports for a full node")


def _gpus(config: AnyConfig, gpus: Sequence[Sequence[str]], versions: Mapping[str, str]) -> CheckResult:
    wanted = config.cluster.devices_per_node
    kinds = ", ".join(sorted({f"{name}, driver {driver}" for name, driver in gpus}))
    nccl = next((version for name, version in versions.items() if name.startswith("nvidia-nccl")), "")
    what = f"{len(gpus)} GPUs ({kinds or 'nvidia-smi finds none'}); " + (f"NCCL {nccl}" if nccl else "no NCCL package")
    if len(gpus) < wanted:
        fix = (
            f"cluster.devices_per_node={len(gpus)}"
            if gpus
            else "check that this is the right node and that its driver is loaded"
        )
        return fail("GPUs", f"{what}; cluster.devices_per_node is {wanted}", fix)
    hardware = config.cluster.hardware
    if hardware is not None and any(hardware.partition("-")[0] not in name.lower() for name, _ in gpus):
        what += f"; the plan assumes cluster.hardware={hardware}"
        return warn("GPUs", what, "mrl plan --hardware NAME")
    return ok("GPUs", what) if nccl else warn("GPUs", what, "mrl env shows whether torch includes it")


# --- several machines -------------------------------------------------------------------------------------------------


def check_machines(config: AnyConfig) -> Iterator[CheckResult]:
    """Check every node of the Ray cluster that the run would join, or this machine."""
    if config.cluster.ray_address is None:
        yield ok("Ray", "the run starts Ray on this machine")
        yield from check_here(config, with_gpus=True)
        return
    # These load Ray and torch, so import them only here.
    from mrl.controller import ray_cluster
    from mrl.controller.nodes import (
        LINK_FIX,
        broken_links,
        free_devices,
        link_distances,
        linked_nodes,
        offered_nodes,
        run_on_nodes,
    )
    from mrl.preflight.data import found_models, node_models

    with canary_file(config) as canary:
        arguments = [canary, config.cluster.device == "gpu"]
        with ray_cluster(config.cluster):
            offers = offered_nodes(config.cluster.device)
            usable = [offer for offer in offers if offer.devices >= config.cluster.devices_per_node]
            yield _offer(config, {offer.name: offer.devices for offer in offers}, free_devices(config.cluster.device))
            node_ids = [offer.node_id for offer in usable]
            facts = run_on_nodes(node_ids, _PROBE, arguments, config.deadlines.start_s)
            models = list(found_models(config))
            missing = run_on_nodes(node_ids, "mrl.hub:node_lacks", [models, False], config.deadlines.start_s)
            with linked_nodes(usable) as nodes:
                broken = broken_links(nodes, config.deadlines.start_s)
        yield from node_models({offer.name: reason for offer, reason in zip(usable, missing, strict=True)})
        yield from check_nodes(config, facts, node_facts(canary, with_gpus=False)["versions"])
        yield from (fail("network", line, LINK_FIX) for line in broken)
        if not broken:
            num_tried = len(link_distances(len(usable)))
            others = "every other node" if num_tried == len(usable) - 1 else f"{num_tried} others, near and far,"
            yield ok("network", f"each of {len(usable)} nodes reaches {others} by TCP")


def check_slurm(config: AnyConfig) -> Iterator[CheckResult]:
    if shutil.which(_SINFO[0]) is None:
        yield skip("Slurm", "sinfo is not installed on this machine")
        return
    try:
        answer = subprocess.run(_SINFO, capture_output=True, text=True, timeout=_SINFO_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        yield warn("Slurm", f"sinfo failed: {error}", "check that the Slurm controller is running")
        return
    cluster, enough, limits = config.cluster, dict[str, int](), dict[str, str]()
    for line in answer.stdout.splitlines():
        if line.count("|") != 5:
            continue
        partition, state, counts, resources, cpus, limit = line.split("|")
        name = partition.rstrip("*")
        limits.setdefault(name, limit)
        num_gpus = sum(map(int, _GPUS.findall(resources)))
        devices = num_gpus if cluster.device == "gpu" else int(cpus.rstrip("+"))
        if state == "up" and devices >= cluster.devices_per_node:
            allocated, idle, *_ = counts.split("/")  # allocated / idle / other / total; others are down or drained
            enough[name] = enough.get(name, 0) + int(allocated) + int(idle)
    matches = [
        f"{name} ({nodes} such nodes, at most {limits[name]})"
        for name, nodes in enough.items()
        if nodes >= cluster.nodes
    ]
    needed = f"{cluster.nodes} nodes of {cluster.devices_per_node} {'GPUs' if cluster.device == 'gpu' else 'CPUs'}"
    if matches:
        yield ok("Slurm", f"{needed}: {', '.join(matches)}")
    else:
        available = ", ".join(f"{name} has {nodes}" for name, nodes in enough.items()) or "no running partition has any"
        yield fail("Slurm", f"{needed} are needed; {available}", "see sinfo, or set a smaller cluster.nodes")


def _offer(config: AnyConfig, devices_of: dict[str, int], free: int) -> CheckResult:
    cluster = config.cluster
    kind = "CPU slots" if cluster.device == "cpu" else "GPUs"
    num_usable = sum(devices >= cluster.devices_per_node for devices in devices_of.values())
    taken = sum(config.placement.pools.values())
    what = (
        f"{num_usable} nodes with {cluster.devices_per_node} {kind} or more, {free} {kind} free; the run takes {taken}"
    )
    if num_usable < cluster.nodes:
        listed = ", ".join(f"{name}: {devices}" for name, devices in devices_of.items())
        return fail("Ray", f"{what} on {cluster.nodes} nodes ({listed})", "start Ray on the missing nodes")
    if free < taken:
        return warn("Ray", what, "other jobs use the devices; the run waits deadlines.resources_s and then fails")
    return ok("Ray", what)
