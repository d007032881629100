"""`metrics.jsonl` and the trackers beside it."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from mrl.errors import MrlError, SetupError
from mrl.observe.metrics import MetricsFile, open_trackers, read_metrics


def test_lines_come_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 1)
    file.write(1, {"a": 1.5})
    file.write(2, {"a": math.nan, "b": math.inf})
    assert read_metrics(path) == [{"step": 1, "a": 1.5}, {"step": 2, "a": None, "b": None}]
    assert path.stat().st_mode & 0o077 == 0


def test_a_resumed_run_writes_its_steps_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 1)
    for step in (1, 2, 3):
        file.write(step, {"a": step})
    MetricsFile(path, 2).write(2, {"a": 20})
    assert [(line["step"], line["a"]) for line in read_metrics(path)] == [(1, 1), (2, 20)]


def test_a_line_cut_short_by_a_crash_is_left_out_and_a_bad_one_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "a"')
    assert read_metrics(path) == [{"step": 1}]
    path.write_text('{"step": 1}\nnonsense\n')
    with pytest.raises(MrlError, match=r"metrics\.jsonl:2: not a line of metrics"):
        read_metrics(path)


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_tracker_that_is_not_installed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(SetupError, match=rf"training\.tracker: {name} is not installed(.|\n)*pip install 'mrl\[{name}"):
        open_trackers(name, "run", tmp_path, {}, 1)


def test_tensorboard_gets_every_finite_figure(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tracker,) = open_trackers("tensorboard", "run", tmp_path, {}, 1)
    for step in (1, 2):
        tracker.log(step, {"score": step / 2, "broken": math.nan})
    tracker.close()
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert found.Tags()["scalars"] == ["score"]
    assert [(each.step, each.value) for each in found.Scalars("score")] == [(1, 0.5), (2, 1.0)]


def test_weights_and_biases_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    (tracker,) = open_trackers("wandb", "run", tmp_path, {"actor": {"lr": 1.0}}, 1)
    tracker.log(1, {"score": 0.5, "broken": math.nan})
    tracker.close()
    assert list((tmp_path / "wandb").glob("offline-run-*/run-run.wandb"))
