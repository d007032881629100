"""Processes of a vLLM engine: what they inherit, and the workers on its nodes after the first.

Each of several workers is a separate process. Over several nodes, the engine on the first node directs all
workers by messages, and a follower on each further node starts and watches the workers of its node.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from multiprocessing.connection import wait
from typing import Any

import torch
import zmq
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from mrl.errors import RolloutError, SetupError
from mrl.rollout.engine import EngineFollower, EngineSettings
from mrl.weight_sync.vllm_plugin import ENDS_WITH_PARENT, TRANSFER_BACKEND

_LAYERS = "VLLM_PP_LAYER_PARTITION"


class VllmFollower(EngineFollower):
    """vLLM's workers on a node after the first of an engine."""

    def __init__(self, settings: EngineSettings, arguments: Mapping[str, Any]) -> None:
        prepare_process(settings)
        # with the usage of `LLMEngine.from_engine_args`, on which defaults depend
        config = EngineArgs(**arguments).create_engine_config(UsageContext.ENGINE_CONTEXT, headless=True)
        self._executor = MultiprocExecutor(config, monitor_workers=False)

    def watch(self) -> None:
        processes = [worker.proc for worker in self._executor.workers]
        raise_if_ended(processes, wait([process.sentinel for process in processes]))


def raise_if_ended(processes: Sequence[Any], ready: Sequence[Any]) -> None:
    """Raise an error that names a process if its sentinel is ready: it has ended."""
    for process in processes:
        if process.sentinel in ready:
            raise RolloutError(f"{process.name} of the engine, pid {process.pid}, has ended")


def prepare_process(settings: EngineSettings) -> None:
    """Set everything that the processes of vLLM inherit from this one."""
    if TRANSFER_BACKEND not in entry_points(group="vllm.general_plugins").names:
        raise SetupError(
            "vLLM cannot receive mrl's weights: mrl is on the path, but it is not installed (vLLM plugin)",
            fix="pip install -e .",
        )
    _keep_lost_contexts()
    if settings.pp > 1 and (layers := os.environ.get(_LAYERS)):
        what = f"{_LAYERS} is {layers}, but mrl sends each stage of an engine the layers that vLLM gives it by default"
        raise SetupError(what, fix=f"unset {_LAYERS}")
    if settings.device == "cpu" and settings.vllm.get("enforce_eager"):
        _compile_nothing()
    if settings.nodes:
        os.environ["VLLM_HOST_IP"] = settings.nodes[settings.node]  # its workers' address for messages
        os.environ[ENDS_WITH_PARENT] = "1"


def end_engine(client: Any) -> None:
    """Shut an engine of vLLM down, and close the sockets of the queues to its workers.

    vLLM leaves them to the garbage collector. If that ends a queue's context before its sockets, it waits forever.
    """
    executor = client.engine_core.model_executor
    queues: list[MessageQueue | None] = []
    if isinstance(executor, MultiprocExecutor):
        queues = [executor.rpc_broadcast_mq, *executor.response_mqs]
        for worker in executor.workers:
            queues += [worker.worker_response_mq, *worker.peer_worker_response_mqs]
    client.shutdown()
    for queue in queues:
        if queue is not None:
            close_sockets(queue)


def close_sockets(queue: MessageQueue) -> None:
    """Close the sockets of a queue, which share a context. Unread messages are lost."""
    condition, sockets = queue._spin_condition, [queue.local_socket, queue.remote_socket]
    if condition is not None:
        sockets += [condition.local_notify_socket, condition.read_cancel_socket, condition.write_cancel_socket]
    for context in {socket.context for socket in sockets if socket is not None}:
        context.destroy(linger=0)


def node_arguments(settings: EngineSettings) -> dict[str, Any]:
    """Return vLLM's arguments for an engine over several nodes: whole nodes, whose workers meet on the first."""
    if not settings.nodes:
        return {}
    if settings.dp > 1:  # each data-parallel rank is an engine of vLLM on one node
        return {"data_parallel_address": settings.nodes[0]}
    return {
        "nnodes": len(settings.nodes),
        "node_rank": settings.node,
        "master_addr": settings.nodes[0],
        "master_port": settings.port,
    }


@contextmanager
def store_without_a_file() -> Iterator[None]:
    """Use a temporary directory for the store file of a single-process engine, removed even if the engine is killed.

    vLLM remembers where its sockets go when an engine starts. That place must outlast the directory.
    """
    before = tempfile.tempdir
    os.environ.setdefault("VLLM_RPC_BASE_PATH", tempfile.gettempdir())
    with tempfile.TemporaryDirectory(prefix="mrl-") as directory:
        tempfile.tempdir = directory
        try:
            yield
        finally:
            tempfile.tempdir = before


def _keep_lost_contexts() -> None:
    """Keep zmq's contexts that nothing refers to until the process ends.

    The garbage collector may end such a context before its sockets, and it then waits for them forever.
    """
    zmq.Context.__del__ = lambda context: None  # type: ignore[method-assign]


def _compile_nothing() -> None:
    """Apply `enforce_eager` also to the one function that vLLM compiles anyway: it counts the ranks of log-probs.

    Compiling it at the first token takes three seconds on a CPU, and a C++ compiler that a laptop may not have.
    """
    torch.compiler.set_stance("force_eager")
    os.environ["TORCH_COMPILE_DISABLE"] = "1"  # for the worker processes
