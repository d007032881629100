"""The judge on the run's own engines: vLLM's real server, its key, its death, and its cleanup."""

from __future__ import annotations

import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mrl.config.reward import KEY_VARIABLE, URLS_VARIABLE, JudgeConfig, RewardConfig, RewardFunctionConfig
from mrl.controller import RunContext
from mrl.demo.model import make_model
from mrl.errors import WorkerDied, WorkerRaised
from mrl.events import EventLog
from mrl.rewards.manager import RewardManager
from mrl.rewards.outcome import Failure, Score
from mrl.trainer.components import judge_served
from tests.rewards.conftest import make_sample, marked, settle

VLLM = {"enforce_eager": True, "kv_cache_memory_bytes": 64 << 20, "dtype": "float32"}
SERVICE = {"max_tokens": 4, "attempts": 1, "timeout_s": 30.0}
ANY = {"pattern": "()", "values": {"": 0.5}}
"""A verdict that matches any output of a random model."""


@contextmanager
def served(run_context: RunContext, model: Path) -> Iterator[dict[str, str]]:
    """One engine on one device of the session's."""
    slots = replace(device_slots := run_context.resources.device_slots("actor"), devices=device_slots.devices[:1])
    resources = SimpleNamespace(device_slots=lambda role: slots, node=run_context.resources.node, numa_binding=False)
    context = replace(run_context, resources=resources, deadlines=replace(run_context.deadlines, call_s=240.0))
    with judge_served(JudgeConfig(path=str(model), vllm=VLLM), "cpu", context) as environment:
        yield environment


@pytest.fixture
def judges(tmp_path: Path) -> Iterator[Callable[..., RewardManager]]:
    """Makes managers of a judge that asks the run's own engines."""
    managers: list[RewardManager] = []

    def make(environment: dict[str, str], verdict: dict[str, Any], share: float = 1.0) -> RewardManager:
        options = {"template": "{response}?", "service": SERVICE, "verdict": verdict}
        functions = {"judge": RewardFunctionConfig(name="judge", options=options)}
        reward = RewardConfig(functions=functions, num_workers=2, limit_s=60, max_failed_share=share)
        managers.append(RewardManager(reward.told(environment), EventLog(tmp_path / "events.jsonl")))
        return managers[-1]

    yield make
    for manager in managers:
        manager.close()


SAMPLES = [replace(make_sample(row_id=number), response=f"{number} of 8") for number in range(8)]
"""Each asks another question: the same one a worker asks once."""


def status(url: str, key: str = "") -> int:
    try:
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def server_process(key: str) -> int:
    """The server's process, identified by its arguments."""
    (found,) = [pid for pid in marked(key) if _arguments(pid)[2:4] == [b"-m", b"vllm.entrypoints.openai.api_server"]]
    return found


def _arguments(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


@pytest.mark.slow
def test_the_runs_own_judge(run_context: RunContext, judges: Callable[..., RewardManager], tmp_path: Path) -> None:
    """The server answers requests with the key, restarts after it was killed, and ends with the run."""
    keys: list[str] = []

    def use() -> None:
        with served(run_context, make_model(tmp_path / "model", seed=1)) as environment:
            keys.append(environment[KEY_VARIABLE])
            verdicts_come_with_the_key_alone(judges, environment)
            who_is_killed_costs_failures_and_comes_back(judges, environment)
            judges(environment, {"pattern": "(no such verdict)"}, share=0.0).score(SAMPLES)

    with pytest.raises(WorkerDied, match=r"(?s)ended: 1 times, see .*rank-0\.log.*samples have no reward"):
        use()
    assert settle(f"VLLM_API_KEY={keys[0]}", 0, within_s=10) == set()
    files = [file for file in run_context.run_directory.rglob("*") if file.is_file()]
    assert not [file for file in files if keys[0].encode() in file.read_bytes()]


def verdicts_come_with_the_key_alone(judges: Callable[..., RewardManager], environment: dict[str, str]) -> None:
    key, url = environment[KEY_VARIABLE], environment[URLS_VARIABLE]
    outcomes = judges(environment, ANY).score(SAMPLES)
    assert [outcome.value for outcome in outcomes if isinstance(outcome, Score)] == [0.5] * 8
    assert sum(outcome.parts["judge/completion_tokens"] for outcome in outcomes if isinstance(outcome, Score)) == 32
    unread = judges(environment, {"pattern": "(no such verdict)"}).score(SAMPLES)
    assert [outcome.kind for outcome in unread if isinstance(outcome, Failure)] == ["raised"] * 8

    root = url.removesuffix("/v1")
    assert [status(f"{url}/models", key), status(f"{root}/health")] == [200, 200]
    paths = (f"{url}/models", f"{root}/metrics", f"{root}/version", f"{root}/openapi.json")
    assert [status(path) for path in paths] == [401] * 4
    assert not any(key.encode() in b"".join(_arguments(pid)) for pid in marked(key)), "others could read it"


def who_is_killed_costs_failures_and_comes_back(
    judges: Callable[..., RewardManager], environment: dict[str, str]
) -> None:
    of_server = f"VLLM_API_KEY={environment[KEY_VARIABLE]}"
    before = marked(of_server)
    os.kill(server_process(environment[KEY_VARIABLE]), signal.SIGKILL)
    failed = judges(environment, ANY).score(SAMPLES)
    assert [outcome.kind for outcome in failed if isinstance(outcome, Failure)] == ["raised"] * 8, "no score, so no 0"
    wait_for(environment[URLS_VARIABLE].replace("/v1", "/health"))
    again = judges(environment, ANY).score(SAMPLES)
    assert [outcome.value for outcome in again if isinstance(outcome, Score)] == [0.5] * 8
    assert not before & marked(of_server), "the dead server's engine went with it"


def wait_for(url: str) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        with suppress(OSError):
            if status(url) == 200:
                return
        time.sleep(0.5)
    raise AssertionError("the server was not started again")


@pytest.mark.slow
@pytest.mark.on_demand
def test_a_server_that_cannot_start_says_where_its_log_is(run_context: RunContext, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", seed=1)
    (model / "config.json").write_text('{"model_type": "nothing-known"}')
    expected = r"rank-0\.log: the judge server ended before it answered"
    with pytest.raises(WorkerRaised, match=expected), served(run_context, model):
        pass
