"""Workers on the judge's devices: the first worker of each engine runs vLLM's server on all of the engine's devices."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from threading import Thread
from typing import Any

from mrl.config.reward import JUDGE, JudgeConfig
from mrl.controller import Dispatch, RankInfo, Worker, register
from mrl.errors import RolloutError
from mrl.hub import node_copy
from mrl.rollout.judge_guard import OPEN_PATH, SERVER_KEY_VARIABLE

_LOOK_S, _LOOK_LIMIT_S = 0.5, 5.0
_PAUSE_S = 1.0


class JudgeServer(Worker):
    """Runs one server on one port, and restarts it whenever it ends."""

    def __init__(self, place: RankInfo, judge: JudgeConfig, start_s: float) -> None:
        super().__init__(place)
        self._judge = judge
        self._start_s, self._num_ends = start_s, 0

    @register(Dispatch.ONE_TO_ALL)
    def serve(self, addresses: Sequence[str], gpus: Sequence[str], key: str) -> str:
        """Start the server and return its address once it answers; empty on the engine's other devices."""
        tp = self._judge.tp
        if self.rank % tp:
            return ""
        host = addresses[self.rank]
        self._reserved = _reserve_port(host)
        port = self._reserved.getsockname()[1]
        command = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", *self._arguments(host, port)]
        environment = {**os.environ, **_ENVIRONMENT, SERVER_KEY_VARIABLE: key}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        if devices := ",".join(gpus[self.rank : self.rank + tp]):
            environment["CUDA_VISIBLE_DEVICES"] = devices
        Thread(target=self._keep, args=(command, environment), daemon=True).start()
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._wait_for(address)
        return f"{address}/v1"

    @register(Dispatch.ONE_TO_ALL)
    def ends(self) -> str:
        """Return how often the server has ended by itself, and the path of its log; empty if never."""
        return f"{self._num_ends} times, see {_log()}" if self._num_ends else ""

    def _keep(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        keeper = [sys.executable, "-P", "-m", "mrl.rollout.kept_process", *command]
        while True:
            with subprocess.Popen(keeper, stdin=subprocess.PIPE, env=environment) as kept:
                kept.wait()
            self._num_ends += 1
            sys.stderr.write("the judge server has ended; restarting it\n")
            time.sleep(_PAUSE_S)

    def _wait_for(self, address: str) -> None:
        deadline = time.monotonic() + self._start_s
        while not _answers(f"{address}{OPEN_PATH}"):
            is_late = time.monotonic() > deadline
            if self._num_ends or is_late:
                problem = f"did not answer within {self._start_s:g} s" if is_late else "ended before it answered"
                raise RolloutError(
                    f"the judge server {problem}", where=_log(), fix="see its log for the reason; check judge.vllm"
                )
            time.sleep(_LOOK_S)

    def _arguments(self, host: str, port: int) -> Iterator[str]:
        required = {
            "model": str(node_copy(self._judge.path)),
            "served_model_name": JUDGE,
            "host": host,
            "port": port,
            "tensor_parallel_size": self._judge.tp,
            "max_model_len": self._judge.max_tokens,
            "middleware": "mrl.rollout.judge_guard.RequireKey",
            "disable_uvicorn_access_log": True,
        }
        for name, value in {**self._judge.vllm, **required}.items():
            yield from _flag(name.replace("_", "-"), value)


_ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}


def _log() -> str:
    """Return the log of this process and its children."""
    return os.readlink("/proc/self/fd/2")


def _flag(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, bool):
        yield f"--{name}" if value else f"--no-{name}"
    elif value is not None:
        yield f"--{name}={value if isinstance(value, str) else json.dumps(value)}"


def _reserve_port(host: str) -> socket.socket:
    """Return a bound socket that does not listen. The server can listen on its port, also after a restart."""
    reserved = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((host, 0))
    return reserved


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=_LOOK_LIMIT_S) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
