"""TensorBoard and Weights & Biases: real files where they are installed, an error that names the extra where not."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from mrl.errors import SetupError
from mrl.observe.trackers import open_trackers


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
