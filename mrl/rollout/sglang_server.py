"""Commands to SGLang's engine, in its own process: requests, samples, versions of the weights, and memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    ContinueGenerationReqInput,
    EndWeightUpdateReqInput,
    GenerateReqInput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightsFromTensorReqInput,
)
from sglang.srt.utils import MultiprocessingSerializer

from mrl.errors import RolloutError
from mrl.rollout.engine_channel import Channel
from mrl.rollout.sglang_hooks import unapplied_hooks
from mrl.weight_sync.sglang_receiver import LOAD_FORMAT


class EngineServer:
    """Commands to an engine. Each takes and returns values that JSON has."""

    def __init__(self, engine: Any) -> None:
        self._manager = engine.tokenizer_manager
        self._tp = engine.server_args.tp_size
        self._running: set[asyncio.Task[None]] = set()
        self._finished: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def start(self, requests: list[dict[str, Any]], salt: str | None) -> None:
        for fields in requests:
            asked = GenerateReqInput(
                input_ids=fields["prompt"],
                sampling_params=fields["params"],
                return_logprob=True,
                logprob_start_len=-1,  # only of the response
                cache_salt=salt,
            )
            task = asyncio.ensure_future(self._generate(fields["key"], asked))
            task.set_name(fields["key"])
            self._running.add(task)
            task.add_done_callback(self._ended)

    async def _generate(self, key: str, asked: Any) -> None:
        async for answer in self._manager.generate_request(asked, None):
            if (meta := answer["meta_info"])["finish_reason"] is None:
                continue
            rows = meta["output_token_logprobs"]
            self._finished.put_nowait(
                {
                    "key": key,
                    "tokens": [token for _, token, _ in rows],
                    "log_probs": [log_prob for log_prob, _, _ in rows],
                    "finish": meta["finish_reason"]["type"],
                    "versions": [[span["start"], span["version"]] for span in meta["weight_versions"]],
                    "cached": meta["cached_tokens"],
                }
            )

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if error := task.exception():
            self._finished.put_nowait({"key": task.get_name(), "error": str(error)})

    async def poll(self, wait_s: float) -> list[dict[str, Any]]:
        """Return the finished samples, after waiting up to `wait_s` for the first one."""
        try:
            samples = [await asyncio.wait_for(self._finished.get(), wait_s)]
        except TimeoutError:
            return []
        while not self._finished.empty():
            samples.append(self._finished.get_nowait())
        return samples

    async def abort(self) -> None:
        """End all samples, and drop what they have."""
        while self._running:
            self._manager.abort_request(abort_all=True)
            await self.proceed()  # a paused sample would never end
            await asyncio.wait(self._running, timeout=0.5)
        self._finished = asyncio.Queue()

    async def pause(self, keeps_cache: bool) -> None:
        """Stop all samples between two tokens. Unless the cache is kept, drop the keys and values of these samples."""
        mode = "in_place" if keeps_cache else "retract"
        await self._manager.pause_generation(PauseGenerationReqInput(mode=mode))

    async def proceed(self) -> None:
        await self._manager.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))

    async def receive(self, version: int, keeps_cache: bool) -> str:
        """Take one version from the trainer. Return why it was refused; empty if it was not."""
        update = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[MultiprocessingSerializer.serialize([])] * self._tp,
            load_format=f"{LOAD_FORMAT}{version}",
            flush_cache=not keeps_cache,
            weight_version=str(version),
        )
        begun, problem = await self._manager.begin_weight_update(BeginWeightUpdateReqInput(), None)
        if not begun:
            return str(problem)
        taken, problem = await self._manager.update_weights_from_tensor(update, None)
        ended, other = await self._manager.end_weight_update(EndWeightUpdateReqInput(), None)
        return "" if taken and ended else str(other if taken else problem)

    async def release(self, parts: list[str]) -> None:
        await self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=parts), None)

    async def resume(self, parts: list[str]) -> None:
        await self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=parts), None)


async def serve(server: EngineServer, channel: Channel) -> None:
    """Answer commands until the other side closes the channel."""
    commands: dict[str, Callable[..., Coroutine[Any, Any, Any]]] = {
        name: getattr(server, name)
        for name in ("start", "poll", "abort", "pause", "proceed", "receive", "release", "resume")
    }
    loop = asyncio.get_running_loop()
    while True:
        try:
            frame = await loop.run_in_executor(None, channel.receive)
        except RolloutError:
            return
        channel.send({"answer": await commands[frame["command"]](**frame["arguments"])})


def run(channel: Channel) -> None:
    """Start the engine with the arguments that arrive first, then answer commands."""
    engine = Engine(**channel.receive()["arguments"])
    channel.send({"answer": unapplied_hooks()})
    engine.loop.run_until_complete(serve(EngineServer(engine), channel))
    engine.shutdown()
