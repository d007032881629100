"""Reactions of a supervisor to the end of a run. The runs are short programs instead of trainings."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

import pytest

from mrl.cli import supervise as module
from mrl.cli.supervise import EXIT_FAILED, EXIT_LOST, EXIT_NO_PLACE, supervise, watched
from mrl.config.resolved.load import load_config
from mrl.errors import ConfigError, MrlError, Problem, TooFewDevices, WorkerDied
from mrl.events import EventLog, RunEnded, RunRestarted, RunStarted, last_ending, read_events

RUN = """#!/bin/sh
next=$(ls {directory}/to-come | head -n 1)
mv {directory}/to-come/$next {directory}/done-$next
. {directory}/done-$next
"""
INTERRUPTED = "import os, signal; signal.signal(2, signal.SIG_DFL); os.kill(os.getpid(), 2)"
SAVES, LOSES, NO_PLACE = "mkdir -p {directory}/checkpoints/step-{step:06d}", "exit 76", "exit 77"


@pytest.mark.parametrize(
    ("attempts", "code", "restarts"),
    [
        (["exit 0"], 0, []),
        (["exit 78"], 1, []),
        (["exit 1", "exit 0"], 0, [(1, 0)]),
        ([LOSES, "exit 0"], 0, [(1, 0)]),
        ([LOSES, LOSES, LOSES], 1, [(1, 0), (2, 0)]),
        ([f"{SAVES}; {LOSES}"] * 4 + ["exit 0"], 0, [(1, 1), (1, 2), (1, 3), (1, 4)]),
        ([f"{SAVES}; {LOSES}", LOSES, LOSES], 1, [(1, 1), (2, 1)]),
        (["kill -9 $$", "exit 0"], 0, [(1, 0)]),
        ([f"{SAVES}; {LOSES}", "rm -r {directory}/checkpoints; exit 1"], 1, [(1, 1)]),  # no restart is wanted
        # Ctrl-C before the handler was installed: no restart is wanted
        ([f"exec {sys.executable} -c '{INTERRUPTED}'"], 130, []),
        ([NO_PLACE], 1, []),
        ([LOSES, NO_PLACE, "exit 0"], 0, [(1, 0), (2, 0)]),
    ],
)
def test_restarts_are_for_what_was_lost_and_counted_from_the_newest_checkpoint(
    attempts: list[str], code: int, restarts: list[tuple[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to_come = tmp_path / "to-come"
    to_come.mkdir()
    for number, attempt in enumerate(attempts, start=1):
        (to_come / str(number)).write_text(attempt.format(directory=tmp_path, step=number))
    run = tmp_path / "run"
    run.write_text(RUN.format(directory=tmp_path))
    run.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(run))
    assert supervise(["train"], tmp_path, 2, 0.0) == code
    assert not list(to_come.iterdir()), "each attempt was made"
    events = tmp_path / "events.jsonl"
    recorded_events = [recorded.event for recorded in read_events(events)] if events.exists() else []
    assert [(event.number, event.step) for event in recorded_events if isinstance(event, RunRestarted)] == restarts


def test_the_watcher_writes_the_ending_of_a_run_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.write(RunStarted("run", "1"))
    log.close()
    monkeypatch.setattr(module, "attempt", lambda command: -signal.SIGKILL)
    assert supervise(["train"], tmp_path, 0, 0.0) == 128 + signal.SIGKILL
    assert last_ending(tmp_path / "events.jsonl") == RunEnded("killed", "was ended by SIGKILL", 0)


@pytest.mark.parametrize(
    ("codes", "resources_s", "left_with", "num_restarts"),
    [
        ([EXIT_NO_PLACE], 9.0, 1, 0),
        ([EXIT_LOST, EXIT_NO_PLACE, EXIT_NO_PLACE, EXIT_NO_PLACE, 0], 9.0, 0, 1),
        ([EXIT_LOST, EXIT_NO_PLACE, EXIT_NO_PLACE], 0.0, 1, 2),
    ],
    ids=["a mistake", "it comes back", "it does not"],
)
def test_a_cluster_that_is_lost_is_waited_for(
    codes: list[int],
    resources_s: float,
    left_with: int,
    num_restarts: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    left = iter(codes)
    monkeypatch.setattr(module, "attempt", lambda command: next(left))
    monkeypatch.setattr(module, "_LOOKS_AGAIN_S", 0.01)
    began = time.monotonic()
    assert supervise(["train"], tmp_path / "run", 2, resources_s) == left_with
    assert time.monotonic() - began < 1
    assert list(left) == []
    assert capsys.readouterr().err.count(": restart ") == num_restarts


def test_a_run_whose_devices_do_not_come_back_goes_on_with_fewer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[list[str]] = []
    codes = iter([EXIT_LOST, EXIT_NO_PLACE, EXIT_LOST, 0])

    def attempt(command: list[str]) -> int:
        made.append(command[3:])
        return next(codes)

    monkeypatch.setattr(module, "attempt", attempt)
    whole = ["train", "--quiet", "run.yaml", "run.name=a"]
    assert supervise(whole, tmp_path, 5, 0.0, ["cluster.nodes=1", "actor.parallel={pp: 1}"]) == 0
    fewer = [*whole, "cluster.nodes=1", "actor.parallel={pp: 1}", "--attempt"]
    assert made == [[*whole, "--attempt"]] * 2 + [fewer] * 2
    overrides = "cluster.nodes=1 'actor.parallel={pp: 1}'"
    message = f"the run did not find enough devices, and continues with {overrides}: restart 2 of 5, from step 0"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MrlError("a column is missing", where="step 7"), EXIT_FAILED),
        (ConfigError([Problem("run.yaml:1", "", "unknown key", "")]), 2),
        (WorkerDied("rank 0 is gone"), EXIT_LOST),
        (TooFewDevices("6 of 8 nodes have joined", 6, fix="add the others"), EXIT_NO_PLACE),
    ],
)
def test_a_watched_run_leaves_with_what_its_watcher_is_to_do(
    error: MrlError, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(lost: object) -> int:
        raise error

    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    resolved = load_config("configs/laptop-ppo.yaml")
    assert watched("train", argparse.Namespace(attempt=True), resolved, fail) == code
    assert capsys.readouterr().err == f"{error}\n"
    with pytest.raises(type(error)):
        watched("train", argparse.Namespace(attempt=False), resolved, fail)
