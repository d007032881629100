"""vLLM as a rollout engine: its public synchronous engine, one step at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

# vLLM reads these variables when it needs them. The engine steps in this process. Workers are spawned, because forked
# copies of a process with threads hang. No usage statistics are sent. Replicas on one machine share its cores.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import numpy as np
from vllm import SamplingParams
from vllm.config import WeightTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.llm_engine import LLMEngine

from mrl.config.algorithm import LARGEST_MASK, NUM_TIES
from mrl.config.arithmetic import mask_width
from mrl.config.libraries.vllm_fields import OWNED
from mrl.errors import RolloutError
from mrl.files import write_text
from mrl.models.families import FAMILIES, read_spec
from mrl.models.hf_config import HfConfig
from mrl.models.open_model import OpenSpec
from mrl.rollout.capacity import EngineDemand, engine_capacity
from mrl.rollout.engine import Cache, EngineSettings, FreeMemory, Part, RolloutEngine
from mrl.rollout.engine_adapters import EngineAdapters
from mrl.rollout.engine_routes import EngineRoutes, route_arguments
from mrl.rollout.quantization import gate_arguments
from mrl.rollout.requests import Generated, GenerationRequest, Sampling
from mrl.rollout.sampling_mask import mask_of
from mrl.rollout.vllm_data_parallel import DataParallelEngine
from mrl.rollout.vllm_node_ranks import DataParallelFollower
from mrl.rollout.vllm_processes import VllmFollower, end_engine, node_arguments, prepare_process, store_without_a_file
from mrl.weight_sync.vllm_adapters import adapter_arguments
from mrl.weight_sync.vllm_plugin import TRANSFER_BACKEND

_DISCARD_EVERYTHING = 2


class VllmEngine(RolloutEngine):
    """A vLLM engine in this process. Several workers are separate processes."""

    follower = staticmethod(
        lambda settings: (VllmFollower if settings.dp == 1 else DataParallelFollower)(
            settings, engine_arguments(settings)
        )
    )

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        prepare_process(settings)
        with store_without_a_file() if settings.num_workers == 1 else nullcontext():
            arguments = EngineArgs(**engine_arguments(settings))
            is_one = settings.dp == 1
            self._engine: Any = (
                LLMEngine.from_engine_args(arguments) if is_one else DataParallelEngine(arguments, settings)
            )
        init_info = {"sockets": str(settings.sockets), "replica": settings.replica}
        self._on_workers("init_weight_transfer_engine", init_info=init_info)
        if settings.pp > 1 and settings.device == "cpu":
            self._on_workers("make_stage_input")
        self.full_tensor_reason = next(filter(None, self._on_workers("full_tensor_reason")), "")
        if isinstance(spec := read_spec(settings.model), OpenSpec):
            self.full_tensor_reason = f"mrl has no table for the family {spec.family}"
        if self.full_tensor_reason and settings.adapter_rank:
            raise RolloutError(
                f"adapters need weights that can be written directly, but {self.full_tensor_reason}",
                fix="set actor.lora.sync=merged",
            )
        self._adapters = EngineAdapters(self._engine, settings, self._on_workers) if settings.adapter_rank else None
        self._routes = EngineRoutes(settings, self._on_workers) if settings.returns_routes else None
        self._ended: list[Generated] = []
        """Finished samples that were left when steps had to end."""
        self._first: str | None = ""
        """First request since the last change of weights, which cannot have cached tokens; None once it has ended."""

    def close(self) -> None:
        if isinstance(self._engine, DataParallelEngine):
            self._engine.shutdown()
        else:
            end_engine(self._engine.engine_core)

    def _start(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> None:
        for request in requests:
            params = _sampling_params(request, sampling, self.settings.vocab)
            prompt: dict[str, Any] = {"prompt_token_ids": request.prompt_ids.tolist()}
            if self.settings.takes_weights_in_flight:  # never read caches computed with other weights
                prompt["cache_salt"] = str(self.weight_version)
            adapter = self._adapters.request if self._adapters else None
            number = self._engine.add_request(request.key, prompt, params, lora_request=adapter)
            if self._routes is not None:
                self._routes.add(request.key, number)
            if self._first == "":
                self._first = request.key

    def _step(self) -> list[Generated]:
        if self._ended:
            samples, self._ended = self._ended, []
            return samples
        return self._finished(self._engine.step()) if self.unfinished else []

    def receive_weights(self, version: int, cache: Cache | None = None, *, adapters_only: bool = False) -> None:
        self._end_steps()
        super().receive_weights(version, cache, adapters_only=adapters_only)

    def sleep(self, *, keep: bool = False) -> None:
        self._end_steps()
        super().sleep(keep=keep)

    def _end_steps(self) -> None:
        """Empty vLLM's batch queue: with async scheduling one step is computed while the previous one is read.

        A paused scheduler begins no new step, so that each call of `step` takes one step out of the queue.
        """
        if self.settings.dp > 1:
            return  # no step is under way, because scheduling is synchronous
        core = self._engine.engine_core.engine_core
        if core.batch_queue:
            core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
            while core.batch_queue:
                self._ended += self._finished(self._engine.step())
            core.scheduler.set_pause_state(PauseState.UNPAUSED)

    def _finished(self, outputs: Sequence[RequestOutput]) -> list[Generated]:
        finished = [output for output in outputs if output.finished]
        for output in finished:
            if output.request_id == self._first and output.num_cached_tokens:
                raise RolloutError(
                    f"{output.num_cached_tokens} tokens of the first sample after a change of weights came from the "
                    "prefix cache, which was computed with the previous weights",
                    where=output.request_id,
                )
            if output.request_id == self._first:
                self._first = None
        vocab = self.settings.vocab
        samples = [_sample(output, self.unfinished[output.request_id][0][1], vocab) for output in finished]
        return samples if self._routes is None else self._routes.added(samples, finished)

    def _abort(self, keys: Iterable[str]) -> None:
        self._engine.abort_request(list(keys))
        if self._routes is not None:
            self._routes.forget()
        self._ended.clear()
        self._first = None

    def _receive_weights(self, version: int, *, keeps_cache: bool, adapters_only: bool = False) -> None:
        if adapters_only:
            assert self._adapters is not None, "only an engine that applies adapters gets them alone"
            self._adapters.check_frozen()
        else:
            self._transfer(version)
        if self._adapters is not None:
            self._adapters.load(version)
            self.adapter_digest = self._adapters.digest
        self._first = ""
        if not keeps_cache:
            self._drop_cache()

    def _transfer(self, version: int) -> None:
        """Take all weights from the trainer."""
        self._on_workers("start_weight_update")
        self._on_workers("update_weights", update_info={"version": version, "full": bool(self.full_tensor_reason)})
        self._on_workers("finish_weight_update")
        if reasons := [reason for reason in self._on_workers("last_update_error") if reason]:
            raise RolloutError(reasons[0])

    def _num_written(self) -> Mapping[str, int]:
        if isinstance(self._engine, DataParallelEngine):
            return self._engine.num_written()
        states = self._engine.output_processor.request_states.values()
        return {state.external_req_id: state.detokenizer.num_output_tokens() for state in states}

    def _drop_cache(self) -> None:
        if not self._engine.reset_prefix_cache(reset_running_requests=bool(self.unfinished)):
            raise RolloutError("vLLM did not drop its prefix cache, which was computed with the previous weights")

    def _sleep(self) -> None:
        self._drop_cache()
        self._engine.sleep(_DISCARD_EVERYTHING, "keep")

    def _wake(self, part: Part) -> list[FreeMemory]:
        if self.settings.device == "cuda":  # on a CPU the engine keeps its memory
            rooms = [FreeMemory(*fields) for fields in self._on_workers("free_memory", part=part)]
            if any(room.lacking_bytes > 0 for room in rooms):
                return rooms
        self._engine.wake_up([part])
        return []

    def _on_workers(self, method: str, **arguments: Any) -> list[Any]:
        answers: list[Any] = self._engine.collective_rpc(method, kwargs=arguments)
        return answers


def _sample(output: RequestOutput, version: int, vocab: int) -> Generated:
    (sample,) = output.outputs
    if sample.finish_reason not in ("stop", "length"):
        what = f"vLLM ended this sample with the finish reason `{sample.finish_reason}`"
        raise RolloutError(what, where=output.request_id)
    token_ids, mask = np.asarray(sample.token_ids, np.int32), None
    log_probs = np.asarray(sample.logprobs.logprobs, np.float32)
    if len(log_probs) > len(token_ids):  # of each token the sampled one, then the likeliest
        ids_TM = np.asarray(sample.logprobs.token_ids, np.int32).reshape(len(token_ids), -1)
        log_probs_TM = log_probs.reshape(len(token_ids), -1)
        mask = mask_of(output.request_id, token_ids, ids_TM[:, 1:], log_probs_TM[:, 1:], vocab)
        log_probs = log_probs_TM[:, 0]
    return Generated(output.request_id, token_ids, log_probs, sample.finish_reason, version, sampling_mask=mask)


def engine_arguments(settings: EngineSettings) -> dict[str, Any]:
    """Return vLLM's arguments: those mrl requires, then the user's."""
    required = {
        "model": str(settings.model),
        "dtype": settings.dtype,
        "tensor_parallel_size": settings.tp,
        "pipeline_parallel_size": settings.pp,
        "distributed_executor_backend": "mp" if settings.num_workers > 1 else "uni",
        "max_model_len": settings.max_tokens,
        "skip_tokenizer_init": not settings.reads_text,
        "trust_remote_code": False,
        "disable_log_stats": True,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": LARGEST_MASK + NUM_TIES,
        "enable_sleep_mode": settings.device == "cuda",
        "weight_transfer_config": WeightTransferConfig(backend=TRANSFER_BACKEND),
        "worker_extension_cls": "mrl.weight_sync.vllm_receiver.WorkerExtension",
        # If the trainer sends weights before generation starts, weights are not read from files.
        "load_format": "auto" if settings.loads_files else "dummy",
        **adapter_arguments(settings.adapter_rank),
        **node_arguments(settings),
    }
    if settings.dp > 1:  # of the first rank; scheduling ahead would begin passes that other ranks do not make
        required |= {"data_parallel_size": settings.dp, "data_parallel_rank": 0, "async_scheduling": False}
    if settings.device == "cpu":  # vLLM rewinds the noise after a chunk, which CPU generators cannot do
        required["enable_chunked_prefill"] = False
    for name in settings.vllm:
        if name in required or name in OWNED:
            owner = OWNED.get(name, "the settings of this engine").format(role="rollout")
            raise RolloutError(f"{name} is set by {owner}", where="rollout.vllm", fix="remove this key")
    capacity = engine_capacity(_demand(settings)).arguments(settings.vllm, settings.device)
    return {**_model_arguments(settings), **capacity, **required}


def _model_arguments(settings: EngineSettings) -> dict[str, Any]:
    """Return the user's arguments, and those with which the engine computes the model as the trainer does."""
    spec = read_spec(settings.model)
    # Log-probs of logits rounded to bfloat16 are off by 0.01; the trainer's head is float32, too.
    overrides: dict[str, Any] = {"head_dtype": "float32", **FAMILIES[spec.family].engine_overrides}
    if not settings.loads_files and "quantization_config" in HfConfig.read(settings.model):
        overrides["quantization_config"] = None  # the trainer sends unquantized weights
    own: dict[str, Any] = route_arguments(settings.device) if settings.returns_routes else {}
    own |= gate_arguments(settings.vllm)
    if not settings.loads_files and (text := _without_vision(settings)):
        own |= {"hf_config_path": text}
    if spec.mla and settings.device == "cpu":
        # The kernel for machines with AMX takes only bfloat16, and the one for rotary embeddings no separate heads.
        own |= {"attention_backend": "CPU_MLA", "compilation_config": {"custom_ops": ["-rotary_embedding"]}}
    if spec.gdn and settings.device == "cpu":
        own |= {"enable_prefix_caching": False}  # for states of linear attention, it needs prefill in chunks
    return {**own, **settings.vllm, "hf_overrides": {**overrides, **(settings.vllm.get("hf_overrides") or {})}}


def _without_vision(settings: EngineSettings) -> str:
    """Write the configuration of the language model in a model with vision. Return its directory, or nothing.

    The trainer sends no weights of a vision tower, so the engine builds none.
    """
    config = HfConfig.read(settings.model)
    if (text := config.of_language_model()) is config:
        return ""
    directory = settings.sockets / f"language-model-{settings.replica}"
    directory.mkdir(exist_ok=True)
    architecture = FAMILIES[text.text("model_type")].architecture("lm")
    values = {**text.values, "architectures": [architecture]}
    write_text(directory / "config.json", json.dumps(values))  # another node may read it
    return str(directory)


def _demand(settings: EngineSettings) -> EngineDemand:
    """Return the demand that the engine's limits depend on. NVML reports the device's memory without a CUDA context."""
    return EngineDemand(
        spec=read_spec(settings.model),
        tp=settings.tp,
        dtype=settings.dtype,
        device=settings.device,
        memory_bytes=current_platform.get_device_total_memory() if settings.device == "cuda" else 0,
        max_tokens=settings.max_tokens,
        share=settings.share,
        vllm=settings.vllm,
        adapter_rank=settings.adapter_rank,
        pp=settings.pp,
        dp=settings.dp,
    )


def _sampling_params(request: GenerationRequest, sampling: Sampling, vocab: int) -> SamplingParams:
    stop = [*sampling.stop, *request.stop]
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=request.seed,
        max_tokens=request.max_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # only the stop tokens of `sampling` stop
        logprobs=mask_width(sampling.top_k, vocab) if sampling.keeps_mask else 0,  # besides the sampled token's
        flat_logprobs=True,
        stop=stop,
        detokenize=bool(stop),
        skip_reading_prefix_cache=sampling.alone,
        skip_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
