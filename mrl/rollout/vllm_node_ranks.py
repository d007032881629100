"""The data-parallel ranks of a vLLM engine on one node: several of vLLM's engines in one process.

In each pass, every rank gives the experts of all ranks its tokens. So the ranks make their passes together, and a rank
without samples makes one without a result.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import partial
from multiprocessing import connection
from typing import Any, TypeVar

import msgspec
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.outputs import RequestOutput
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.abstract import Executor

from mrl.rollout.engine import EngineFollower, EngineSettings
from mrl.rollout.vllm_channel import connect_to_first
from mrl.rollout.vllm_processes import end_engine, prepare_process, raise_if_ended

T = TypeVar("T")


class NodeRanks:
    """The ranks of this node."""

    def __init__(self, config: VllmConfig, ranks: Sequence[int]) -> None:
        self._threads = ThreadPoolExecutor(len(ranks), "data-parallel rank")
        with _standard_output_kept():
            starts = [partial(_Rank, config, rank, local_rank) for local_rank, rank in enumerate(ranks)]
            self._ranks = together(self._threads, starts)

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self, method)(*args)

    def add_request(self, local_rank: int, key: str, prompt: Any, params: SamplingParams | Mapping[str, Any]) -> str:
        """Give a rank a request. Parameters from another node are a mapping."""
        given = msgspec.convert(params, SamplingParams)
        added: str = self._ranks[local_rank].engine.add_request(key, prompt, given)
        return added

    def step(self) -> list[RequestOutput]:
        """Make one pass on every rank. Return the finished samples."""
        outputs = together(self._threads, [rank.step for rank in self._ranks])
        return [output for some in outputs for output in some if output.finished]

    def abort_request(self, keys: Sequence[str]) -> None:
        for rank in self._ranks:  # it does not know the keys of the others
            rank.engine.abort_request(keys)

    def num_written(self) -> dict[str, int]:
        """Return the number of tokens of each sample under way."""
        states = [state for rank in self._ranks for state in rank.engine.output_processor.request_states.values()]
        return {state.external_req_id: state.detokenizer.num_output_tokens() for state in states}

    def reset_prefix_cache(self, reset_running_requests: bool) -> bool:
        dropped = [rank.engine.reset_prefix_cache(reset_running_requests) for rank in self._ranks]
        return all(dropped)

    def sleep(self, level: int, mode: Any) -> None:
        together(self._threads, [partial(rank.engine.sleep, level, mode) for rank in self._ranks])

    def wake_up(self, tags: list[str]) -> None:
        together(self._threads, [partial(rank.engine.wake_up, tags) for rank in self._ranks])

    def collective_rpc(self, method: Any, kwargs: dict[str, Any] | None) -> list[Any]:
        """Call a method of the workers of all ranks. Return their answers in the order of the ranks."""
        calls = [partial(rank.engine.collective_rpc, method, kwargs=kwargs) for rank in self._ranks]
        return [answer for answers in together(self._threads, calls) for answer in answers]

    def shutdown(self) -> None:
        for rank in self._ranks:
            end_engine(rank.engine.engine_core)

    def processes(self) -> list[Any]:
        """Return the processes of the ranks' workers."""
        return [worker.proc for rank in self._ranks for worker in rank.engine.model_executor.workers]


class DataParallelFollower(EngineFollower):
    """The ranks on a node after the first of an engine. They do what the engine's process on the first node asks."""

    def __init__(self, settings: EngineSettings, arguments: Mapping[str, Any]) -> None:
        prepare_process(settings)
        config = EngineArgs(**arguments).create_engine_config(UsageContext.ENGINE_CONTEXT)
        self._channel = connect_to_first(settings)
        set_ports(config, self._channel.receive())
        self._ranks = NodeRanks(config, node_ranks(settings))
        # The engine on the first node calls already while it starts.
        self._calls, self._call = ThreadPoolExecutor(1, "calls"), ThreadPoolExecutor(1, "call")
        self._calls.submit(self._serve)

    def watch(self) -> None:
        processes = self._ranks.processes()
        raise_if_ended(processes, connection.wait([process.sentinel for process in processes]))

    def _serve(self) -> None:
        """Answer calls until the caller ends. The group of this engine then ends soon."""
        with self._channel.connection, suppress(EOFError, ConnectionError):
            while True:
                called = self._call.submit(self._ranks.call, *self._channel.receive())
                error = called.exception()
                self._channel.send(["", called.result()] if error is None else [repr(error), None])


class _Rank:
    """One of vLLM's engines, which says whether a step made a pass."""

    def __init__(self, config: VllmConfig, rank: int, local_rank: int) -> None:
        config = deepcopy(config)
        parallel = config.parallel_config
        parallel.data_parallel_rank = parallel.data_parallel_index = rank
        parallel.data_parallel_rank_local = local_rank
        self.engine = LLMEngine(config, Executor.get_class(config), log_stats=False)
        core = self.engine.engine_core.engine_core
        self._core, self._made_a_pass, self._step = core, False, core.step_fn
        core.step_fn = self._noted_step

    def step(self) -> list[RequestOutput]:
        self._made_a_pass = False
        outputs: list[RequestOutput] = self.engine.step() if self.engine.get_num_unfinished_requests() else []
        if not self._made_a_pass:
            self._core.execute_dummy_batch()
        return outputs

    def _noted_step(self) -> Any:
        answer = self._step()
        self._made_a_pass = answer[1]
        return answer


def node_ranks(settings: EngineSettings) -> range:
    """Return the ranks of this node. Each node has as many."""
    size = settings.dp // max(1, len(settings.nodes))
    return range(settings.node * size, (settings.node + 1) * size)


def ports_of(config: VllmConfig) -> list[int]:
    """Return the ports on the first node where the ranks meet, in the order in which vLLM takes them."""
    parallel = config.parallel_config
    return [parallel.data_parallel_master_port, *parallel._data_parallel_master_port_list]


def set_ports(config: VllmConfig, ports: Sequence[int]) -> None:
    parallel = config.parallel_config
    parallel.data_parallel_master_port, *parallel._data_parallel_master_port_list = ports


def together(threads: ThreadPoolExecutor, actions: Iterable[Callable[[], T]]) -> list[T]:
    """Do these things at the same time. The first error ends it: the others may wait for what failed."""
    futures = [threads.submit(action) for action in actions]
    for future in wait(futures, return_when=FIRST_EXCEPTION).done:
        future.result()
    return [future.result() for future in futures]


@contextmanager
def _standard_output_kept() -> Iterator[None]:
    """Restore this process's standard output. vLLM silences it for moments, and two threads that do so lose it."""
    number = sys.stdout.fileno()
    kept = os.dup(number)
    try:
        yield
    finally:
        os.dup2(kept, number)
        os.close(kept)
