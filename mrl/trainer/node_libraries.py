"""Libraries on every node that computes, before a process is started on any of its devices."""

from __future__ import annotations

from mrl.config.schema import Config
from mrl.config.sft import SftConfig
from mrl.controller import ResourcePoolManager
from mrl.controller.nodes import run_on_nodes
from mrl.errors import SetupError
from mrl.libraries import TRANSFORMER_ENGINE_FIX, transformer_engine_fault

_PROBE = "mrl.libraries:transformer_engine_fault"


def check_libraries(config: Config | SftConfig, resources: ResourcePoolManager) -> None:
    """Refuse a Transformer Engine that is broken on some node: each of its workers would die of it."""
    if config.cluster.device == "cpu":
        return
    names = {node.node_id: node.name for node in resources.nodes}
    if config.cluster.ray_address is None:  # this is the one machine
        faults = [transformer_engine_fault()] * len(names)
    else:
        faults = run_on_nodes(list(names), _PROBE, [], config.deadlines.start_s)
    found = [f"node {name}: {fault}" for name, fault in zip(names.values(), faults, strict=True) if fault]
    if found:
        raise SetupError("\n".join(found), fix=TRANSFORMER_ENGINE_FIX)
