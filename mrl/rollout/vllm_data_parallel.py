"""Data-parallel attention in one vLLM engine: several of vLLM's engines in this process, which share their experts.

In each pass, every rank gives the experts of all ranks its tokens. So the ranks make their passes together, and a rank
without samples makes one without a result. vLLM has a coordinator process for this. Here one process directs all
ranks and knows which of them has work.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, TypeVar

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.outputs import RequestOutput
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.abstract import Executor

from mrl.rollout.vllm_processes import end_engine

T = TypeVar("T")


class DataParallelEngine:
    """The part of `LLMEngine` that mrl uses, over all ranks."""

    def __init__(self, arguments: EngineArgs) -> None:
        first = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
        size = first.parallel_config.data_parallel_size
        self._threads = ThreadPoolExecutor(size, "data-parallel rank")
        self._rank_of: dict[str, int] = {}
        """Rank of each request under way."""
        with _standard_output_kept():
            self._ranks = self._together(lambda rank: _Rank(first, rank), size)

    @property
    def engine_core(self) -> DataParallelEngine:
        return self

    def shutdown(self) -> None:
        for rank in self._ranks:
            end_engine(rank.engine.engine_core)

    def add_request(self, key: str, prompt: Any, params: Any, lora_request: Any = None) -> str:
        """Give a request to the rank with the fewest."""
        loads = [rank.engine.get_num_unfinished_requests() for rank in self._ranks]
        self._rank_of[key] = number = loads.index(min(loads))
        added: str = self._ranks[number].engine.add_request(key, prompt, params, lora_request=lora_request)
        return added

    def step(self) -> list[RequestOutput]:
        """Make one pass on every rank."""
        outputs = [output for some in self._together(lambda rank: self._ranks[rank].step()) for output in some]
        for output in outputs:
            if output.finished:
                self._rank_of.pop(output.request_id, None)
        return outputs

    def abort_request(self, keys: Iterable[str]) -> None:
        for key in keys:
            if (number := self._rank_of.pop(key, None)) is not None:
                self._ranks[number].engine.abort_request([key])

    def request_states(self) -> list[Any]:
        return [state for rank in self._ranks for state in rank.engine.output_processor.request_states.values()]

    def reset_prefix_cache(self, *, reset_running_requests: bool) -> bool:
        dropped = [rank.engine.reset_prefix_cache(reset_running_requests) for rank in self._ranks]
        return all(dropped)

    def sleep(self, level: int, mode: Any) -> None:
        self._together(lambda rank: self._ranks[rank].engine.sleep(level, mode))

    def wake_up(self, tags: list[str]) -> None:
        self._together(lambda rank: self._ranks[rank].engine.wake_up(tags))

    def collective_rpc(self, method: Any, kwargs: dict[str, Any] | None = None) -> list[Any]:
        """Call a method of all workers. Return their answers in the order of the workers."""
        calls = self._together(lambda rank: self._ranks[rank].engine.collective_rpc(method, kwargs=kwargs))
        return [answer for answers in calls for answer in answers]

    def _together(self, action: Callable[[int], T], size: int = 0) -> list[T]:
        """Do something on all ranks at the same time. The first error ends it: the others may wait for that rank."""
        futures = [self._threads.submit(action, rank) for rank in range(size or len(self._ranks))]
        for future in wait(futures, return_when=FIRST_EXCEPTION).done:
            future.result()
        return [future.result() for future in futures]


class _Rank:
    """One of vLLM's engines, which says whether a step made a pass."""

    def __init__(self, config: VllmConfig, rank: int) -> None:
        config = deepcopy(config)
        parallel = config.parallel_config
        parallel.data_parallel_rank = parallel.data_parallel_index = parallel.data_parallel_rank_local = rank
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
