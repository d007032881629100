"""Calls between the nodes of a vLLM engine with data-parallel ranks. `tests/hosts` runs such an engine."""

from __future__ import annotations

import multiprocessing
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import answer_challenge
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput

from mrl.errors import RolloutError
from mrl.rollout import vllm_node_ranks
from mrl.rollout.engine import EngineSettings
from mrl.rollout.requests import GenerationRequest, Sampling
from mrl.rollout.vllm_channel import VllmChannel, accept_followers, connect_to_first
from mrl.rollout.vllm_data_parallel import DataParallelEngine
from mrl.rollout.vllm_engine import _sample, _sampling_params, engine_arguments
from mrl.rollout.vllm_node_ranks import DataParallelFollower, NodeRanks, node_ranks, ports_of, set_ports
from tests.rollout.conftest import Small

LOOPBACK = "127.0.0.1"
WAIT_S = 20


def _begin(action: Callable[..., Any], *args: Any) -> Future[Any]:
    """Call a function in a thread that does not keep this process from ending."""
    future: Future[Any] = Future()

    def act() -> None:
        try:
            future.set_result(action(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=act, daemon=True).start()
    return future


def _free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture
def settings(tmp_path: Path) -> EngineSettings:
    """Settings of the first of three nodes with two ranks each."""
    nodes = (LOOPBACK, "127.0.0.2", "127.0.0.3")
    options = {"enable_expert_parallel": True}
    own = {"dp": 6, "nodes": nodes, "port": _free_port(), "secret": "a secret", "vllm": options}
    return EngineSettings(tmp_path, "float32", "cpu", 64, 128, tmp_path, "rollout-0", **own)


@pytest.fixture
def worker() -> Iterator[Any]:
    """A process of a worker. Tests take it before `channels`, whose sockets it would hold open."""
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), name="VllmWorker-0")
    process.start()
    yield process
    process.kill()


@pytest.fixture
def channels() -> Iterator[tuple[VllmChannel, VllmChannel]]:
    with socket.create_server((LOOPBACK, 0)) as server:
        other = VllmChannel(socket.create_connection(server.getsockname()), "a")
        first = VllmChannel(server.accept()[0], "b")
    with first.connection, other.connection:
        yield first, other


def test_only_processes_that_know_the_secret_join_in_the_order_of_the_nodes(settings: EngineSettings) -> None:
    """A follower waits for the first node, which a scan of ports and another engine do not end."""
    last = _begin(connect_to_first, replace(settings, node=2))
    time.sleep(0.2)
    assert not last.done(), "the first node does not listen yet"
    accepting = _begin(accept_followers, settings)
    assert last.exception(WAIT_S) is None
    socket.create_connection((LOOPBACK, settings.port)).close()
    with pytest.raises(AuthenticationError):
        connect_to_first(replace(settings, node=1, secret="another"))
    time.sleep(0.2)
    assert not accepting.done(), "neither is a process of this engine"
    second = connect_to_first(replace(settings, node=1))
    pairs = zip(accepting.result(WAIT_S), (second, last.result(WAIT_S)), strict=True)
    for number, (channel, other) in enumerate(pairs):
        called = _begin(channel.call, "step", number)
        assert other.connection.poll(5), "the call went to another node"
        assert other.receive() == ["step", number]
        other.send(["", number])
        assert called.result(WAIT_S) == number


def test_a_follower_takes_no_orders_from_a_process_without_the_secret(settings: EngineSettings) -> None:
    with socket.create_server((LOOPBACK, settings.port)) as server:
        connecting = _begin(connect_to_first, replace(settings, node=1))
        channel = VllmChannel(server.accept()[0], "")
        with closing(channel.connection) as connection:
            connection.send_bytes(b"#CHALLENGE#" + bytes(20))
            assert connection.recv_bytes(), "an answer that proves the follower's secret"
            connection.send_bytes(b"#WELCOME#")
            with pytest.raises(AuthenticationError):
                answer_challenge(connection, b"a guess")
        with pytest.raises(AuthenticationError):
            connecting.result(WAIT_S)


def test_samples_and_parameters_arrive_as_they_were(channels: tuple[VllmChannel, VllmChannel]) -> None:
    first, other = channels
    request = GenerationRequest("a/0", "a", np.arange(3, dtype=np.int32), (1 << 63) - 1, 7, stop=("end",))
    params = _sampling_params(request, Sampling(0.7, 0.9, 5, (3, 4), ("stop",), alone=True), 100)
    routes = np.arange(12, dtype=np.int16).reshape(3, 2, 2)
    flat = FlatLogprobs(logprobs=[-0.1, -2.5])
    sample = CompletionOutput(0, "", [5, 6], None, flat, routed_experts=routes, finish_reason="stop")
    output = RequestOutput("a/0", None, [1, 2], None, [sample], finished=True, num_cached_tokens=32)
    first.send([params, output, {"routes": routes}])
    given, finished, arrays = other.receive()
    taken: list[Any] = []
    engine = SimpleNamespace(add_request=lambda *args: taken.append(args) or "number")
    ranks = NodeRanks.__new__(NodeRanks)
    ranks._ranks = [SimpleNamespace(engine=engine)]  # type: ignore[list-item]
    assert ranks.call("add_request", 0, "a/0", {"prompt_token_ids": [1]}, given) == "number"
    assert taken == [("a/0", {"prompt_token_ids": [1]}, params)]
    assert isinstance(taken[0][2], SamplingParams)
    assert (finished.request_id, finished.finished, finished.num_cached_tokens) == ("a/0", True, 32)
    assert (len(finished.prompt_token_ids), finished.outputs[0].finish_reason) == (2, "stop")
    drawn = _sample(finished, 3, 100)
    assert (drawn.token_ids.tolist(), drawn.sampling_mask) == ([5, 6], None)
    np.testing.assert_array_equal(drawn.log_probs, np.float32([-0.1, -2.5]))
    for arrived in (finished.outputs[0].routed_experts, arrays["routes"]):
        np.testing.assert_array_equal(arrived, routes)
        assert arrived.dtype == np.int16


def test_objects_that_are_no_data_are_not_sent(channels: tuple[VllmChannel, VllmChannel]) -> None:
    with pytest.raises(TypeError, match="Event cannot be sent to another node"):
        channels[0].send([threading.Event()])
    with pytest.raises(ValueError, match="allow_pickle"):
        channels[0].send([np.array([None])])


def _engine(nodes: list[Any], per_node: int = 2) -> DataParallelEngine:
    engine = DataParallelEngine.__new__(DataParallelEngine)
    engine._nodes, engine._threads, engine._per_node = nodes, ThreadPoolExecutor(len(nodes)), per_node
    engine._loads, engine._rank_of = [0] * (len(nodes) * per_node), {}
    return engine


def test_each_request_goes_to_the_rank_with_the_fewest_on_any_node() -> None:
    added: list[tuple[int, int, str]] = []
    finished: list[str] = []
    aborted: list[tuple[int, list[str]]] = []

    def node(number: int, method: str, *args: Any) -> Any:
        if method == "add_request":
            added.append((number, args[0], args[1]))
            return f"number of {args[1]}"
        if method == "abort_request":
            aborted.append((number, *args))
        return [SimpleNamespace(request_id=key) for at, _, key in added if key in finished and at == number]

    engine = _engine([partial(node, number) for number in range(2)])
    assert [engine.add_request(key, {}, SamplingParams()) for key in "abcde"] == [f"number of {key}" for key in "abcde"]
    assert added == [(0, 0, "a"), (0, 1, "b"), (1, 0, "c"), (1, 1, "d"), (0, 0, "e")]
    finished += "d"
    assert [output.request_id for output in engine.step()] == ["d"]
    engine.abort_request(["c", "d", "never given"])
    assert sorted(aborted) == [(0, ["c"]), (1, ["c"])]
    assert engine._loads == [2, 1, 0, 0]
    for key in "fg":
        engine.add_request(key, {}, SamplingParams())
    assert added[5:] == [(1, 0, "f"), (1, 1, "g")]


def test_answers_of_workers_come_in_the_order_of_their_ranks_from_nodes_that_work_at_the_same_time() -> None:
    all_are_called = threading.Barrier(3, timeout=WAIT_S)

    def node(number: int, method: str, *args: Any) -> Any:
        all_are_called.wait()
        time.sleep(0.02 * (2 - number))
        answers = {
            "collective_rpc": [[number, 0], [number, 1]],
            "num_written": {f"{number}": number},
            "reset_prefix_cache": number != 1,
        }
        return answers[method]

    engine = _engine([partial(node, number) for number in range(3)])
    assert engine.collective_rpc("m") == [[0, 0], [0, 1], [1, 0], [1, 1], [2, 0], [2, 1]]
    assert engine.num_written() == {"0": 0, "1": 1, "2": 2}
    assert not engine.reset_prefix_cache(reset_running_requests=True), "one rank did not drop its cache"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ("an error", (RuntimeError, r"`step` failed on the engine's node b: its worker")),
        ("an end", (ConnectionError, r"the engine's process on b does not answer")),
    ],
)
def test_a_follower_that_fails_ends_the_pass_while_the_own_ranks_wait(
    answer: str, error: tuple[type[Exception], str], channels: tuple[VllmChannel, VllmChannel]
) -> None:
    own, other = channels
    released = threading.Event()
    engine = _engine([lambda *_: released.wait(4) and [], own.call])

    def follower() -> None:
        assert other.receive() == ["step"]
        if answer == "an error":
            other.send(["its worker", None])
        else:
            other.connection.close()

    _begin(follower)
    began = time.monotonic()
    with pytest.raises(error[0], match=error[1]):
        engine.step()
    assert time.monotonic() - began < 3, "the error waits for no other node"
    released.set()


def test_an_error_on_a_rank_ends_the_pass_while_another_rank_waits() -> None:
    released = threading.Event()

    def die() -> list[Any]:
        raise RuntimeError("the worker has died")

    ranks: Any = NodeRanks.__new__(NodeRanks)
    ranks._threads = ThreadPoolExecutor(2)
    ranks._ranks = [SimpleNamespace(step=lambda: released.wait(4) and []), SimpleNamespace(step=die)]
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="the worker has died"):
        _engine([ranks.call]).step()
    assert time.monotonic() - began < 3, "the error waits for no other rank"
    released.set()


class _Calls:
    """Ranks of a follower with one worker process."""

    def __init__(self, process: Any) -> None:
        self.process = process

    def processes(self) -> list[Any]:
        return [self.process]

    def call(self, method: str, *args: Any) -> Any:
        if method == "wait":
            self.process.join(WAIT_S)
            time.sleep(1)
        if method == "fail":
            raise ValueError(f"no {args[0]}")
        return [method, *args]


def _follower(channel: VllmChannel, worker: Any) -> Any:
    follower: Any = DataParallelFollower.__new__(DataParallelFollower)
    follower._channel, follower._ranks, follower._call = channel, _Calls(worker), ThreadPoolExecutor(1)
    return follower


def test_a_follower_answers_with_errors_until_its_caller_ends(
    worker: Any, channels: tuple[VllmChannel, VllmChannel]
) -> None:
    first, other = channels
    serving = _begin(_follower(other, worker)._serve)
    assert first.call("step", 1) == ["step", 1]
    with pytest.raises(RuntimeError, match=r"ValueError\('no cache'\)"):
        first.call("fail", "cache")
    assert first.call("step", 2) == ["step", 2]
    first.connection.close()
    assert serving.result(WAIT_S) is None


def test_a_worker_that_ends_in_a_call_is_named_although_the_call_waits_for_it(
    worker: Any, channels: tuple[VllmChannel, VllmChannel]
) -> None:
    """The end of the caller is no fault of the follower."""
    follower = _follower(channels[1], worker)
    _begin(follower._serve)
    watching = _begin(follower.watch)
    channels[0].send(["wait"])
    channels[0].connection.close()
    time.sleep(0.1)
    assert not watching.done()
    worker.kill()
    error = watching.exception(2)
    assert f"VllmWorker-0 of the engine, pid {worker.pid}, has ended" in str(error)
    assert isinstance(error, RolloutError)


def test_ranks_are_numbered_over_the_nodes_and_meet_at_ports_of_the_first(
    settings: EngineSettings, small: Small
) -> None:
    assert [[*node_ranks(replace(settings, node=node))] for node in range(3)] == [[0, 1], [2, 3], [4, 5]]
    assert [*node_ranks(replace(settings, nodes=(), dp=4))] == [0, 1, 2, 3]
    arguments = engine_arguments(replace(settings, model=small("qwen3_moe"), node=1))
    assert (arguments["data_parallel_address"], arguments["data_parallel_size"]) == (LOOPBACK, 6)
    assert not {"nnodes", "node_rank", "master_addr"} & arguments.keys(), "each rank is an engine on one node"
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_master_port=5, _data_parallel_master_port_list=[1, 2, 3])
    )
    other: Any = SimpleNamespace(parallel_config=SimpleNamespace())
    set_ports(other, ports_of(config))
    assert other == config
    assert settings.secret not in repr(settings)


def test_a_rank_takes_the_device_of_its_number_on_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process sees the devices of its node only. The workers of all ranks are in one group."""

    class Engine:
        def __init__(self, config: Any, *_: Any, **__: Any) -> None:
            self.config = config.parallel_config
            core = SimpleNamespace(step_fn=lambda: None)
            self.engine_core = SimpleNamespace(engine_core=core)

    monkeypatch.setattr(vllm_node_ranks, "LLMEngine", Engine)
    monkeypatch.setattr(vllm_node_ranks.Executor, "get_class", lambda config: None)
    config: Any = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_rank=0))
    places = [rank.engine.config for rank in NodeRanks(config, range(2, 4))._ranks]
    assert [place.data_parallel_rank for place in places] == [2, 3]
    assert [place.data_parallel_index for place in places] == [2, 3]
    assert [place.data_parallel_rank_local for place in places] == [0, 1]
