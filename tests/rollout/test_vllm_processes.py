"""Processes of an engine over several nodes: arguments, addresses, and what ends them. `tests/hosts` runs some."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from vllm import envs
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from mrl.config.mesh import Mesh
from mrl.controller import RankInfo, Rendezvous
from mrl.errors import RolloutError
from mrl.rollout.engine import EngineSettings
from mrl.rollout.replica import RolloutReplica
from mrl.rollout.vllm_engine import VllmEngine, engine_arguments
from mrl.rollout.vllm_processes import VllmFollower, end_engine, prepare_process, store_without_a_file
from mrl.weight_sync import vllm_plugin
from mrl.weight_sync.vllm_plugin import ENDS_WITH_PARENT

ADDRESSES = ("10.0.0.1", "10.0.0.2")


@pytest.fixture
def settings(small: Callable[..., Path], tmp_path: Path) -> EngineSettings:
    """Settings of the second of two nodes."""
    model = small("qwen3")
    return EngineSettings(model, "float32", "cpu", 64, 128, tmp_path, "rollout-0", 2, nodes=ADDRESSES, node=1, port=77)


def test_the_end_of_an_engine_closes_the_sockets_to_its_workers() -> None:
    """A context of zmq that the garbage collector ends before its sockets waits for them forever."""
    requests = MessageQueue(1, 1)
    answers, of_peers = (MessageQueue.create_from_handle(requests.export_handle(), 0) for _ in range(2))
    executor = MultiprocExecutor.__new__(MultiprocExecutor)
    executor.is_failed = executor.shutting_down = True
    worker = SimpleNamespace(worker_response_mq=None, peer_worker_response_mqs=[None, of_peers])
    executor.rpc_broadcast_mq, executor.response_mqs, executor.workers = requests, [answers], [worker]
    queues = [requests, answers, of_peers]
    contexts = [queue.local_socket.context for queue in queues]
    requests.local_socket.send(b"a message that nobody reads")
    end_engine(SimpleNamespace(engine_core=SimpleNamespace(model_executor=executor), shutdown=executor.shutdown))
    assert executor.rpc_broadcast_mq is None, "vLLM has forgotten the queue"
    assert all(context.closed for context in contexts)
    assert all(queue._spin_condition.local_notify_socket.closed for queue in queues)


def test_a_lost_context_waits_for_no_socket(settings: EngineSettings) -> None:
    prepare_process(replace(settings, nodes=(), node=0))
    context = zmq.Context()
    socket = context.socket(zmq.PUB)
    context.__del__()
    assert not context.closed
    assert not socket.closed
    context.destroy(linger=0)


def test_sockets_outlast_the_directory_of_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", "")  # restored afterwards
    monkeypatch.delenv("VLLM_RPC_BASE_PATH")
    with store_without_a_file():
        store = Path(tempfile.gettempdir())
        sockets = Path(envs.VLLM_RPC_BASE_PATH)  # vLLM reads it while it starts, and keeps it
    assert sockets.is_dir()
    assert not store.exists()


def test_workers_of_all_nodes_meet_on_the_first(settings: EngineSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = engine_arguments(settings)
    assert (arguments["nnodes"], arguments["node_rank"]) == (2, 1)
    assert (arguments["master_addr"], arguments["master_port"]) == ("10.0.0.1", 77)
    assert (arguments["tensor_parallel_size"], arguments["distributed_executor_backend"]) == (2, "mp")
    for name in ("VLLM_HOST_IP", ENDS_WITH_PARENT):
        monkeypatch.setenv(name, "")  # restored afterwards
        monkeypatch.delenv(name)
    prepare_process(settings)
    assert os.environ["VLLM_HOST_IP"] == "10.0.0.2", "on this node"
    assert ENDS_WITH_PARENT in os.environ


def test_an_engine_on_one_node_gets_no_addresses(settings: EngineSettings) -> None:
    alone = engine_arguments(
        EngineSettings(settings.model, "float32", "cpu", 64, 128, settings.sockets, "rollout-0", 2)
    )
    assert not {"nnodes", "node_rank", "master_addr", "master_port"} & alone.keys()


def test_the_first_worker_that_ends_is_named() -> None:
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=time.sleep, args=(seconds,), name=f"VllmWorker-{seconds}") for seconds in (60, 0)
    ]
    for process in processes:
        process.start()
    follower: Any = SimpleNamespace(
        _executor=SimpleNamespace(workers=[SimpleNamespace(proc=each) for each in processes])
    )
    with pytest.raises(RolloutError, match=f"VllmWorker-0 of the engine, pid {processes[1].pid}, has ended"):
        VllmFollower.watch(follower)
    processes[0].kill()


@pytest.mark.parametrize("wanted", [True, False])
def test_a_worker_ends_with_the_process_that_started_it(wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[int] = []
    monkeypatch.setattr(vllm_plugin, "die_with", bound.append)
    monkeypatch.setattr(vllm_plugin, "parent_process", lambda: SimpleNamespace(pid=4711))
    monkeypatch.delenv(ENDS_WITH_PARENT, raising=False)
    if wanted:
        monkeypatch.setenv(ENDS_WITH_PARENT, "1")
    vllm_plugin.register()
    assert bound == [4711] * wanted, "other programs with vLLM load this plugin, too"


def test_an_engine_that_cannot_span_nodes_says_so(settings: EngineSettings) -> None:
    place = RankInfo("rollout-0", 1, 0, Mesh(2, tp=2), Rendezvous(ADDRESSES[0], 77, 2, None))
    with pytest.raises(RolloutError, match="engines of transformers cannot span 2 nodes"):
        RolloutReplica(place, "transformers", settings, 1.0)
    assert VllmEngine.follower is not None
