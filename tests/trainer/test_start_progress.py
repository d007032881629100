"""Progress output of a run while it starts."""

from __future__ import annotations

import io
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mrl.config.schema import Config
from mrl.controller.worker_log import log_path, make_log_directory
from mrl.events import EventLog, ModelLoaded, PoolReady, WorkersStarted
from mrl.observe.console import Console
from mrl.observe.metrics import StepTimer
from mrl.trainer import start_progress
from mrl.trainer.start_progress import StartProgress, parts_of, show_start_progress
from tests.trainer.test_components import whole_config


def run_in(directory: Path, config: Config | None = None, quiet: bool = False) -> tuple[Any, io.StringIO]:
    stream, events = io.StringIO(), EventLog(directory / "events.jsonl")
    seen: list[tuple[int, int]] = []
    clock = StepTimer(events, progress=lambda done, total: seen.append((done, total)))
    console = Console(1, stream, quiet)
    return SimpleNamespace(
        config=config, directory=directory, events=events, clock=clock, console=console, seen=seen
    ), stream


def test_processes_engines_and_models_are_awaited(tmp_path: Path) -> None:
    assert parts_of(whole_config(tmp_path, critic=None, reward_model=None))[-1] == "the actor's model"
    names = parts_of(whole_config(tmp_path))
    assert names[:5] == ["the devices of pool all", "actor", "critic", "reward_model", "rollout-0"]
    assert names[-3:] == ["the actor's model", "the critic's model", "the reward_model's model"]


def test_what_is_up_is_struck_off_and_what_is_not_says_what_it_does(tmp_path: Path) -> None:
    run, _ = run_in(tmp_path)
    progress = StartProgress(run, ["actor", "rollout-0", "rollout-1", "the actor's model"])
    for _ in range(10):
        make_log_directory(tmp_path, "rollout-0")
    log = log_path(tmp_path / "logs" / "rollout-0.10", 0)
    log.write_text("(pid=7) INFO [a.py:1] before\n(pid=7) INFO [cpu_model_runner.py:69] Starting to load model x\n")
    progress.on_event(WorkersStarted("actor", 2, [1, 2], 3.0))
    progress.on_event(ModelLoaded("critic", 7, 1.0))
    line = progress.line()
    assert re.match(
        r"starting for \d s, 1 of 4 ready; waiting for: rollout-0 \(Starting to load model x\), rollout-1, ", line
    )
    progress.on_event(ModelLoaded("actor", 7, 1.0))
    progress.on_event(WorkersStarted("rollout-1", 1, [3], 3.0))
    assert progress.line().endswith("3 of 4 ready; waiting for: rollout-0 (Starting to load model x)")
    assert run.seen == [(1, 4), (1, 4), (2, 4), (3, 4)]
    many = StartProgress(run, [f"rollout-{index}" for index in range(9)])
    assert many.line().endswith("rollout-2, rollout-3, 5 more")


@pytest.mark.parametrize("quiet", [False, True])
def test_it_is_said_again_and_again_until_all_is_up(
    quiet: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_progress, "EVERY_S", 0.05)
    run, stream = run_in(tmp_path, whole_config(tmp_path), quiet)
    with show_start_progress(run):
        run.events.write(PoolReady("all", 4, ["host"], 1.0))
        run.events.write(WorkersStarted("critic", 1, [1], 3.0))
        time.sleep(0.3)
    said = stream.getvalue().splitlines()
    assert (len(said) >= 2) is not quiet
    assert all("waiting for: actor, reward_model, rollout-0" in line for line in said)
    assert run.events.listeners == []
