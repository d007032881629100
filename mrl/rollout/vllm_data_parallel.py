"""Data-parallel attention in one vLLM engine: several of vLLM's engines, which share their experts.

vLLM has a coordinator process that makes all ranks step together. Here, the process on the engine's first node knows
which rank has work. It directs the ranks of its node and, at the same time, the processes on further nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.usage.usage_lib import UsageContext

from mrl.rollout.engine import EngineSettings
from mrl.rollout.vllm_channel import accept_followers
from mrl.rollout.vllm_node_ranks import NodeRanks, node_ranks, ports_of, together


class DataParallelEngine:
    """The part of `LLMEngine` that mrl uses, over all ranks."""

    def __init__(self, arguments: EngineArgs, settings: EngineSettings) -> None:
        config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
        channels = accept_followers(settings) if settings.nodes else []
        for channel in channels:
            channel.send(ports_of(config))
        own = node_ranks(settings)
        self._per_node = len(own)
        self._nodes = [NodeRanks(config, own).call, *(channel.call for channel in channels)]
        """For each node, what calls a method of its ranks."""
        self._threads = ThreadPoolExecutor(len(self._nodes), "node")
        self._loads = [0] * settings.dp
        """Number of requests under way of each rank."""
        self._rank_of: dict[str, int] = {}
        """Rank of each request under way."""

    @property
    def engine_core(self) -> DataParallelEngine:
        return self

    def shutdown(self) -> None:
        self._on_nodes("shutdown")

    def add_request(self, key: str, prompt: Any, params: SamplingParams, lora_request: Any = None) -> str:
        """Give a request to the rank with the fewest."""
        assert lora_request is None, "a rule refuses adapters next to experts"
        loads = self._loads
        self._rank_of[key] = rank = loads.index(min(loads))
        loads[rank] += 1
        node, local_rank = divmod(rank, self._per_node)
        added: str = self._nodes[node]("add_request", local_rank, key, prompt, params)
        return added

    def step(self) -> list[RequestOutput]:
        """Make one pass on every rank. Return the finished samples."""
        outputs = [output for some in self._on_nodes("step") for output in some]
        self._forget(output.request_id for output in outputs)
        return outputs

    def abort_request(self, keys: Iterable[str]) -> None:
        self._on_nodes("abort_request", known := [key for key in keys if key in self._rank_of])
        self._forget(known)

    def num_written(self) -> dict[str, int]:
        """Return the number of tokens of each sample under way."""
        return {key: number for some in self._on_nodes("num_written") for key, number in some.items()}

    def reset_prefix_cache(self, *, reset_running_requests: bool) -> bool:
        return all(self._on_nodes("reset_prefix_cache", reset_running_requests))

    def sleep(self, level: int, mode: Any) -> None:
        self._on_nodes("sleep", level, mode)

    def wake_up(self, tags: list[str]) -> None:
        self._on_nodes("wake_up", tags)

    def collective_rpc(self, method: Any, kwargs: dict[str, Any] | None = None) -> list[Any]:
        """Call a method of all workers. Return their answers in the order of the workers."""
        return [answer for answers in self._on_nodes("collective_rpc", method, kwargs) for answer in answers]

    def _forget(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._loads[self._rank_of.pop(key)] -= 1

    def _on_nodes(self, method: str, *args: Any) -> list[Any]:
        return together(self._threads, [partial(node, method, *args) for node in self._nodes])
