"""The machines that a run would get: this one, a Ray cluster that is up, or what Slurm has."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from mrl.config.schema import Config
from mrl.preflight.data import found_models, node_models
from mrl.preflight.findings import CheckResult
from mrl.preflight.machine import canary_file, check_here, check_nodes
from mrl.preflight.node_facts import node_facts

_PROBE = "mrl.preflight.node_facts:node_facts"
_SINFO = ("sinfo", "--noheader", "--format=%P|%a|%F|%G|%c|%l")
_SINFO_TIMEOUT_S = 20
_GPUS = re.compile(r"gpu(?::[^:,(]+)?:(\d+)")


def check_machines(config: Config) -> Iterator[CheckResult]:
    """Check every node of the Ray cluster that the run would join, or this machine."""
    if config.cluster.ray_address is None:
        yield CheckResult("ok", "Ray", "the run starts it on this machine")
        yield from check_here(config, with_gpus=True)
        return
    # With Ray, and so only here.
    from mrl.controller import ray_cluster
    from mrl.controller.links import LINK_FIX, broken_links, linked_nodes
    from mrl.controller.nodes import free_devices, offered_nodes, run_on_nodes

    with canary_file(config) as canary:
        arguments = [canary, config.cluster.device == "gpu"]
        with ray_cluster(config.cluster):
            offers = offered_nodes(config.cluster.device)
            usable = [offer for offer in offers if offer.devices >= config.cluster.devices_per_node]
            yield _offer(config, {offer.name: offer.devices for offer in offers}, free_devices(config.cluster.device))
            node_ids = [offer.node_id for offer in usable]
            facts = run_on_nodes(node_ids, _PROBE, arguments, config.deadlines.start_s)
            found = list(found_models(config))
            lacks = run_on_nodes(node_ids, "mrl.hub:node_lacks", [found, False], config.deadlines.start_s)
            with linked_nodes(usable) as nodes:
                broken = broken_links(nodes, config.deadlines.start_s)
        yield from node_models({offer.name: lack for offer, lack in zip(usable, lacks, strict=True)})
        yield from check_nodes(config, facts, node_facts(canary, with_gpus=False)["versions"])
        yield from (CheckResult("fail", "network", line, LINK_FIX) for line in broken)
        if not broken:
            yield CheckResult("ok", "network", f"each of {len(usable)} nodes reaches every other by TCP")


def check_slurm(config: Config) -> Iterator[CheckResult]:
    """Check whether some partition has nodes enough, where Slurm is."""
    if shutil.which(_SINFO[0]) is None:
        yield CheckResult("skip", "Slurm", "there is no sinfo on this machine")
        return
    try:
        answer = subprocess.run(_SINFO, capture_output=True, text=True, timeout=_SINFO_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        yield CheckResult("warn", "Slurm", f"sinfo fails: {error}", "is the controller up?")
        return
    cluster = config.cluster
    kinds = [_read(line) for line in answer.stdout.splitlines() if line.count("|") == 5]
    enough: dict[str, int] = {}
    for kind in kinds:
        devices = kind.gpus if cluster.device == "gpu" else kind.cpus
        if kind.is_up and devices >= cluster.devices_per_node:
            enough[kind.partition] = enough.get(kind.partition, 0) + kind.nodes
    fit = [
        f"{name} ({nodes} such nodes, at most {_limit(kinds, name)})"
        for name, nodes in enough.items()
        if nodes >= cluster.nodes
    ]
    wanted = f"{cluster.nodes} nodes of {cluster.devices_per_node} {'GPUs' if cluster.device == 'gpu' else 'CPUs'}"
    if fit:
        yield CheckResult("ok", "Slurm", f"{wanted}: {', '.join(fit)}")
    else:
        has = ", ".join(f"{name} has {nodes}" for name, nodes in enough.items()) or "no partition that is up has any"
        yield CheckResult("fail", "Slurm", f"{wanted} are wanted; {has}", "sinfo shows all; or a smaller cluster.nodes")


def _offer(config: Config, devices_of: dict[str, int], free: int) -> CheckResult:
    cluster = config.cluster
    kind = "CPU slots" if cluster.device == "cpu" else "GPUs"
    num_usable = sum(devices >= cluster.devices_per_node for devices in devices_of.values())
    taken = sum(config.placement.pools.values())
    what = f"{num_usable} nodes of {cluster.devices_per_node} {kind} or more, {free} {kind} free; the run takes {taken}"
    if num_usable < cluster.nodes:
        listed = ", ".join(f"{name}: {devices}" for name, devices in devices_of.items())
        return CheckResult(
            "fail", "Ray", f"{what} on {cluster.nodes} nodes ({listed})", "start Ray on the nodes that lack"
        )
    if free < taken:
        return CheckResult(
            "warn", "Ray", what, "other work holds them; the run waits deadlines.resources_s and then fails"
        )
    return CheckResult("ok", "Ray", what)


@dataclass(frozen=True)
class _Nodes:
    partition: str
    is_up: bool
    nodes: int
    cpus: int
    gpus: int
    limit: str


def _read(line: str) -> _Nodes:
    partition, state, counts, resources, cpus, limit = line.split("|")
    allocated, idle, *_ = counts.split("/")  # allocated / idle / other / total; the others are down or drained
    gpus = sum(int(count) for count in _GPUS.findall(resources))
    return _Nodes(partition.rstrip("*"), state == "up", int(allocated) + int(idle), int(cpus.rstrip("+")), gpus, limit)


def _limit(kinds: list[_Nodes], partition: str) -> str:
    return next(kind.limit for kind in kinds if kind.partition == partition)
