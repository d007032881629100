"""Trackers in addition to `metrics.jsonl`: they get every finite metric, and their failures never stop the run."""

from __future__ import annotations

import importlib.util
import math
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mrl.config.training import TRACKERS
from mrl.errors import SetupError
from mrl.observe import trackers
from mrl.observe.trackers import TrackerThread, open_trackers


class Service:
    """A service whose behavior depends on the name of the run."""

    def __init__(self, run: str, directory: Path, config: Mapping[str, Any], step: int) -> None:
        if run == "down":
            raise ConnectionError("connection refused")
        self.run, self.taken, self.is_closed = run, config["taken"], config["closed"]
        self.gate: threading.Event = config["gate"]

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.run == "slow":
            self.gate.wait(30)
        if self.run == "raising" and step % 2:
            raise OSError(28, "No space left on device")
        self.taken.append((step, dict(metrics)))

    def close(self) -> None:
        if self.run == "unclosable":
            raise RuntimeError("not now")
        self.is_closed.set()


def begin(run: str, tmp_path: Path) -> tuple[TrackerThread, dict[str, Any]]:
    seen: dict[str, Any] = {"taken": [], "closed": threading.Event(), "gate": threading.Event()}
    (tracker,) = open_trackers([f"{__name__}:Service"], run, tmp_path, seen, 1)
    return tracker, seen


def test_every_finite_figure_arrives_in_order(tmp_path: Path) -> None:
    tracker, seen = begin("well", tmp_path)
    for step in range(1, 51):
        tracker.log(step, {"score": step / 2, "broken": math.nan})
    assert tracker.close() == ""
    assert seen["taken"] == [(step, {"score": step / 2}) for step in range(1, 51)]
    assert seen["closed"].is_set()
    assert tracker.news() == ""


def test_a_service_that_is_down_costs_a_warning(tmp_path: Path) -> None:
    tracker, _ = begin("down", tmp_path)
    for step in (1, 2, 3):
        tracker.log(step, {"score": 0.5})
    name = f"{__name__}:Service"
    why = "it failed to start: ConnectionError: connection refused"
    assert tracker.close() == f"{name}: the metrics of 3 steps were not delivered ({why})"
    assert tracker.news() == f"{name}: {why}; the run continues, and metrics.jsonl has all metrics"
    assert tracker.news() == "", "reported once"


def test_what_a_service_refuses_is_counted(tmp_path: Path) -> None:
    tracker, seen = begin("raising", tmp_path)
    for step in range(1, 6):
        tracker.log(step, {"score": 0.5})
    assert (
        "the metrics of 3 steps were not delivered (step 1 was refused: OSError: [Errno 28] No space" in tracker.close()
    )
    assert [step for step, _ in seen["taken"]] == [2, 4], "the others arrive"
    assert seen["closed"].is_set()


def test_a_slow_service_delays_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "MAX_WAITING", 4)
    tracker, seen = begin("slow", tmp_path)
    began = time.monotonic()
    for step in range(1, 11):
        tracker.log(step, {"score": 0.5})
    said = tracker.close(limit_s=0.2)
    assert time.monotonic() - began < 5
    assert "4 steps are waiting already" in said
    assert "it had not ended after 0.2 s" in said
    num_lost = int(said.partition("the metrics of ")[2].split()[0])
    assert num_lost in (9, 10), "all except the current one, if it has started"
    seen["gate"].set()


def test_only_steps_count_as_lost(tmp_path: Path) -> None:
    """The queue also has the mark that ends it."""
    tracker, seen = begin("slow", tmp_path)
    tracker.log(1, {"score": 0.5})
    while not tracker._queue.empty():
        time.sleep(0.01)
    tracker.log(2, {"score": 0.5})
    assert "the metrics of 1 steps were not delivered" in tracker.close(limit_s=0.1)
    seen["gate"].set()


def test_one_that_does_not_close_is_reported(tmp_path: Path) -> None:
    tracker, seen = begin("unclosable", tmp_path)
    tracker.log(1, {"score": 0.5})
    assert "it failed to close: RuntimeError: not now" in tracker.close()
    assert len(seen["taken"]) == 1


def test_the_known_ones_are_those_of_the_configuration() -> None:
    assert sorted(TRACKERS) == sorted(trackers.KNOWN)


@pytest.mark.parametrize("name", trackers.KNOWN)
def test_a_tracker_that_is_not_installed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None if package == name else find(package))
    with pytest.raises(
        SetupError, match=rf"training\.trackers: {name} is not installed(.|\n)*pip install 'mrl\[{name}"
    ):
        open_trackers([name], "run", tmp_path, {}, 1)


def delivered(name: str, tmp_path: Path) -> None:
    """Log two runs of one name; the second resumes where the first was stopped."""
    for first in (1, 3):
        (tracker,) = open_trackers([name], "run", tmp_path, {"actor": {"lr": 1.0}}, first)
        for step in (first, first + 1):
            tracker.log(step, {"val/score/mean@4": step / 2, "broken": math.nan})
        assert tracker.close() == ""
        assert tracker.news() == ""


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    delivered("tensorboard", tmp_path)
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert found.Tags()["scalars"] == ["val/score/mean@4"]
    assert [(each.step, each.value) for each in found.Scalars("val/score/mean@4")] == [
        (step, step / 2) for step in (1, 2, 3, 4)
    ]


def test_weights_and_biases_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    delivered("wandb", tmp_path)
    assert list((tmp_path / "wandb").glob("offline-run-*/run-run.wandb"))


def test_mlflow_on_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/store")
    delivered("mlflow", tmp_path)
    (figures,) = (tmp_path / "store").rglob("mean_at_4")
    assert [line.split()[1:] for line in figures.read_text().splitlines()] == [
        [f"{step / 2}", f"{step}"] for step in (1, 2, 3, 4)
    ]


def test_swanlab_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("swanlab", reason="the extra swanlab is not installed")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    delivered("swanlab", tmp_path)
    assert list((tmp_path / "swanlab").rglob("*.swanlab"))
