"""The nodes of a run: Ray joined, pools placed, and every node that computes in a state to, before a process starts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from mrl.config.resolved.load import model_names
from mrl.config.schema import Config
from mrl.config.sft import SftConfig
from mrl.controller import ResourcePoolManager, RunContext, ray_cluster
from mrl.controller.nodes import run_on_nodes
from mrl.errors import ModelError, SetupError
from mrl.events import EventLog, Warned
from mrl.libraries import TRANSFORMER_ENGINE_FIX, transformer_engine_fault

_FAULT_PROBE, _LACK_PROBE = "mrl.libraries:transformer_engine_fault", "mrl.hub:node_lacks"


@contextmanager
def placed_run(config: Config | SftConfig, directory: Path, events: EventLog) -> Iterator[RunContext]:
    """Have the pools of a run on nodes with its libraries and models, for the length of the block."""
    with ExitStack() as stack:
        stack.enter_context(ray_cluster(config.cluster))
        resources = ResourcePoolManager(config.placement, config.cluster, config.deadlines)
        resources.create(directory, events)
        stack.callback(resources.release)
        check_libraries(config, resources)
        fetch_models(config, resources, events)
        yield RunContext(directory, events, config.deadlines, resources)


def check_libraries(config: Config | SftConfig, resources: ResourcePoolManager) -> None:
    """Refuse a Transformer Engine that is broken on some node: each of its workers would die of it."""
    if config.cluster.device == "cpu":
        return
    names = {node.node_id: node.name for node in resources.nodes}
    if config.cluster.ray_address is None:  # this is the one machine
        faults = [transformer_engine_fault()] * len(names)
    else:
        faults = run_on_nodes(list(names), _FAULT_PROBE, [], config.deadlines.start_s)
    found = [f"node {name}: {fault}" for name, fault in zip(names.values(), faults, strict=True) if fault]
    if found:
        raise SetupError("\n".join(found), fix=TRANSFORMER_ENGINE_FIX)


def fetch_models(config: Config | SftConfig, resources: ResourcePoolManager, events: EventLog) -> None:
    """See that each node of the pools has the models' directories, or downloads them itself, once for all its ranks.

    Which nodes these are is known once Ray has placed the pools; other nodes of the cluster are left in peace.
    """
    if config.cluster.ray_address is None:
        return  # one machine, which has them
    directories = sorted(set(model_names(config).values()))
    names = {node.node_id: node.name for node in resources.nodes}
    answers = run_on_nodes(list(names), _LACK_PROBE, [directories, False], config.deadlines.start_s)
    lacking = [node for node, answer in zip(names, answers, strict=True) if answer]
    if not lacking:
        return
    what = f"{len(lacking)} of {len(names)} nodes fetch what they lack: {', '.join(names[node] for node in lacking)}"
    events.write(Warned("models", what))
    answers = run_on_nodes(lacking, _LACK_PROBE, [directories, True], config.deadlines.download_s)
    if failed := [f"node {names[node]}: {answer}" for node, answer in zip(lacking, answers, strict=True) if answer]:
        raise ModelError("\n".join(failed), fix="or put the models on a file system that all nodes share (HF_HOME)")
