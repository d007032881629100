"""SGLang as a rollout engine. Its process has another interpreter, because its packages conflict with vLLM's.

SGLang generates without being asked, so a step waits for the next finished samples. It counts itself which weights drew
which tokens.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mrl.children import end_group
from mrl.config.sglang import INSTALL, PROVEN_FAMILIES
from mrl.errors import RolloutError, SetupError
from mrl.models.families import read_spec
from mrl.models.open_model import OpenSpec
from mrl.rollout.engine import Cache, EngineSettings, FreeMemory, Part, RolloutEngine
from mrl.rollout.engine_channel import Channel
from mrl.rollout.requests import Generated, GenerationRequest, Sampling
from mrl.rollout.sglang_process import ON_CPU
from mrl.weight_sync.sglang_receiver import REPLICA, SOCKETS

_STEP_S = 0.02
_MARGIN_TOKENS = 8
"""SGLang would silently shorten a response that fills the context exactly."""
_MIN_SEQUENCES = 128
_ROOT = Path(__file__).parents[2]


class SglangEngine(RolloutEngine):
    """An SGLang engine in separate processes."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        arguments = engine_arguments(settings)
        ours, theirs = socket.socketpair()
        with theirs:
            numbers = str(theirs.fileno()), str(os.getpid())
            self._process = subprocess.Popen(
                [interpreter(settings), "-W", "ignore", "-m", "mrl.rollout.sglang_process", *numbers],
                env=_environment(settings),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._channel = Channel(ours, f"the SGLang process {self._process.pid} of {settings.replica}")
        self._channel.send({"arguments": arguments})
        if unapplied := self._channel.receive()["answer"]:
            self.close()
            raise RolloutError(f"this SGLang has changed: nothing to hook at {', '.join(unapplied)}")
        self._asked: dict[str, GenerationRequest] = {}
        self._first: str | None = ""
        """First request since the last change of weights, which cannot have cached tokens; None once it has ended."""

    def close(self) -> None:
        self._channel.close()
        end_group(self._process.pid)
        self._process.wait()

    def _start(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> None:
        self._asked |= {request.key: request for request in requests}
        if self._first == "":
            self._first = requests[0].key if requests else ""
        salt = str(self.weight_version) if self.settings.takes_weights_in_flight else None
        asked = [
            {"key": request.key, "prompt": request.prompt_ids.tolist(), "params": _params(request, sampling)}
            for request in requests
        ]
        self._command("start", requests=asked, salt=salt)

    def step(self) -> list[Generated]:
        finished = self._step()
        for sample in finished:
            del self.unfinished[sample.key]
        return finished

    def _step(self) -> list[Generated]:
        return [self._sample(fields) for fields in self._command("poll", wait_s=_STEP_S)]

    def _sample(self, fields: dict[str, Any]) -> Generated:
        key = fields["key"]
        if "error" in fields:
            raise RolloutError(f"SGLang refused this request: {fields['error']}", where=key)
        finish, request = fields["finish"], self._asked.pop(key)
        if finish not in ("stop", "length") or (finish == "length") > (len(fields["tokens"]) == request.max_tokens):
            what = f"SGLang ended this sample after {len(fields['tokens'])} of {request.max_tokens} tokens: {finish}"
            raise RolloutError(what, where=key)
        if key == self._first:
            self._first = None
            if fields["cached"]:
                raise RolloutError(
                    f"{fields['cached']} tokens of the first sample after a change of weights came from the cache, "
                    "which was computed with the previous weights",
                    where=key,
                )
        (_, version), *switches = self._versions(fields["versions"])
        return Generated(
            key,
            np.asarray(fields["tokens"], np.int32),
            np.asarray(fields["log_probs"], np.float32),
            finish,
            version,
            switches=tuple(switches),
        )

    def _versions(self, spans: Sequence[tuple[int, str]]) -> list[tuple[int, int]]:
        """Return the first token of each version. An engine that loads files has one version, unknown to SGLang."""
        if self.settings.loads_files:
            assert self.weight_version is not None, "a request starts only with weights"
            return [(0, self.weight_version)]
        return [(first, int(version)) for first, version in spans]

    def _abort(self, keys: Iterable[str]) -> None:
        self._command("abort")
        self._asked.clear()
        self._first = None

    def receive_weights(self, version: int, cache: Cache | None = None, *, adapters_only: bool = False) -> None:
        """Do the same with all samples paused. They continue only with valid weights and a cache."""
        self._need("weights")
        self._command("pause", keeps_cache=cache == "keep")
        super().receive_weights(version, cache, adapters_only=adapters_only)
        if "kv_cache" in self.resident:
            self._command("proceed")

    def _receive_weights(self, version: int, *, keeps_cache: bool) -> None:
        if reason := self._command("receive", version=version, keeps_cache=keeps_cache):
            raise RolloutError(reason)
        self._first = None if self.unfinished else ""

    def _num_written(self) -> Mapping[str, int]:
        return {}  # SGLang counts

    def _sleep(self) -> None:
        self._command("pause", keeps_cache=False)
        self._command("release", parts=["weights", "kv_cache"])

    def _wake(self, part: Part) -> list[FreeMemory]:
        self._command("resume", parts=[part])
        if part == "kv_cache":
            self._command("proceed")
        return []

    def _command(self, command: str, **arguments: Any) -> Any:
        self._channel.send({"command": command, "arguments": arguments})
        return self._channel.receive()["answer"]


def interpreter(settings: EngineSettings) -> str:
    """Return the interpreter that has SGLang."""
    python = settings.sglang.interpreter()
    if not python.is_file():
        raise SetupError(f"there is no interpreter for SGLang at {python}", fix=INSTALL)
    return str(python)


def engine_arguments(settings: EngineSettings) -> dict[str, Any]:
    """Return SGLang's arguments: those mrl requires, and the user's."""
    spec, own = read_spec(settings.model), settings.sglang
    if isinstance(spec, OpenSpec) or spec.family not in PROVEN_FAMILIES:
        what = f"SGLang's weights of the family {spec.family} have not been compared with the trainer's"
        raise RolloutError(what, where=str(settings.model), fix="rollout.engine=vllm")
    sequences = own.max_running_requests or max(settings.share, _MIN_SEQUENCES)
    arguments = {
        "model_path": str(settings.model),
        "dtype": settings.dtype,
        "device": settings.device,
        "tp_size": settings.tp,
        "context_length": settings.max_tokens + _MARGIN_TOKENS,
        "skip_tokenizer_init": not settings.reads_text,
        "trust_remote_code": False,
        "enable_fp32_lm_head": True,
        "sampling_backend": "pytorch",
        "disable_overlap_schedule": True,
        "enable_memory_saver": settings.device == "cuda",
        "sleep_on_idle": settings.device == "cpu",  # an idle scheduler would keep a core busy
        # If the trainer sends weights before generation starts, weights are not read from files.
        "load_format": "auto" if settings.loads_files else "dummy",
        "log_level": "warning",
        "max_running_requests": sequences,
        "max_total_tokens": own.max_total_tokens,
        "mem_fraction_static": own.mem_fraction_static,
    }
    if settings.device == "cpu":
        arguments |= {"attention_backend": "torch_native", "disable_cuda_graph": True}
        arguments["max_total_tokens"] = own.max_total_tokens or sequences * settings.max_tokens
    return {name: value for name, value in arguments.items() if value is not None}


def _params(request: GenerationRequest, sampling: Sampling) -> dict[str, Any]:
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "sampling_seed": request.seed,
        "max_new_tokens": request.max_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
        "stop": [*sampling.stop, *request.stop],
        "no_stop_trim": True,
        "skip_special_tokens": False,
    }


def _environment(settings: EngineSettings) -> dict[str, str]:
    """Return the variables of the process. It finds mrl where this process has it, or next to its base's packages."""
    roots = [str(_ROOT)] if _ROOT.name != "site-packages" else []
    path = os.pathsep.join([*roots, *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = os.environ | {"PYTHONPATH": path, SOCKETS: str(settings.sockets), REPLICA: settings.replica}
    variables["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"  # by the margin; mrl has compared the longest sample
    if settings.device == "cpu":
        variables |= {ON_CPU: "1", "TORCHDYNAMO_DISABLE": "1"}
    if settings.device == "cpu" and settings.tp > 1:
        cores = sorted(os.sched_getaffinity(0))
        shares = [cores[rank :: settings.tp] or cores for rank in range(settings.tp)]
        variables["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, share)) for share in shares)
    return variables
