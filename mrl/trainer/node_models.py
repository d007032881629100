"""The models' files on every node that computes, before a process is started on any of its devices."""

from __future__ import annotations

from mrl.config.model_names import model_names
from mrl.config.schema import Config
from mrl.config.sft import SftConfig
from mrl.controller import ResourcePoolManager
from mrl.controller.nodes import run_on_nodes
from mrl.errors import ModelError
from mrl.events import EventLog, Warned

_PROBE = "mrl.hub:node_lacks"


def fetch_models(config: Config | SftConfig, resources: ResourcePoolManager, events: EventLog) -> None:
    """See that each node of the pools has the models' directories, or downloads them itself, once for all its ranks.

    Which nodes these are is known once Ray has placed the pools; other nodes of the cluster are left in peace.
    """
    if config.cluster.ray_address is None:
        return  # one machine, which has them
    directories = sorted(set(model_names(config).values()))
    names = {node.node_id: node.name for node in resources.nodes}
    answers = run_on_nodes(list(names), _PROBE, [directories, False], config.deadlines.start_s)
    lacking = [node for node, answer in zip(names, answers, strict=True) if answer]
    if not lacking:
        return
    what = f"{len(lacking)} of {len(names)} nodes fetch what they lack: {', '.join(names[node] for node in lacking)}"
    events.write(Warned("models", what))
    answers = run_on_nodes(lacking, _PROBE, [directories, True], config.deadlines.download_s)
    if failed := [f"node {names[node]}: {answer}" for node, answer in zip(lacking, answers, strict=True) if answer]:
        raise ModelError("\n".join(failed), fix="or put the models on a file system that all nodes share (HF_HOME)")
