"""Preparation of a run's nodes: join Ray, place the pools, and check the nodes before any process starts."""

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
    """Place the pools of a run on nodes that have its libraries and models, for the length of the block."""
    with ExitStack() as stack:
        stack.enter_context(ray_cluster(config.cluster))
        resources = ResourcePoolManager(config.placement, config.cluster, config.deadlines)
        resources.create(directory, events)
        stack.callback(resources.release)
        check_libraries(config, resources)
        fetch_models(config, resources, events)
        yield RunContext(directory, events, config.deadlines, resources)


def check_libraries(config: Config | SftConfig, resources: ResourcePoolManager) -> None:
    """Raise an error if Transformer Engine is broken on a node, where every worker would fail to import it."""
    if config.cluster.device == "cpu":
        return
    names = {node.node_id: node.name for node in resources.nodes}
    if config.cluster.ray_address is None:  # one machine
        faults = [transformer_engine_fault()] * len(names)
    else:
        faults = run_on_nodes(list(names), _FAULT_PROBE, [], config.deadlines.start_s)
    broken = [f"node {name}: {fault}" for name, fault in zip(names.values(), faults, strict=True) if fault]
    if broken:
        raise SetupError("\n".join(broken), fix=TRANSFORMER_ENGINE_FIX)


def fetch_models(config: Config | SftConfig, resources: ResourcePoolManager, events: EventLog) -> None:
    """Download the models on nodes that do not have them, once per node.

    Ray has already placed the pools, so that only the nodes of this run download anything.
    """
    if config.cluster.ray_address is None:
        return  # one machine, which already has them
    directories = sorted(set(model_names(config).values()))
    names = {node.node_id: node.name for node in resources.nodes}
    answers = run_on_nodes(list(names), _LACK_PROBE, [directories, False], config.deadlines.start_s)
    incomplete = [node for node, answer in zip(names, answers, strict=True) if answer]
    if not incomplete:
        return
    message = (
        f"{len(incomplete)} of {len(names)} nodes download models: {', '.join(names[node] for node in incomplete)}"
    )
    events.write(Warned("models", message))
    answers = run_on_nodes(incomplete, _LACK_PROBE, [directories, True], config.deadlines.download_s)
    if failed := [f"node {names[node]}: {answer}" for node, answer in zip(incomplete, answers, strict=True) if answer]:
        raise ModelError("\n".join(failed), fix="put the models on a file system that all nodes share (HF_HOME)")
