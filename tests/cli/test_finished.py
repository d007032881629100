"""A command whose run has done all steps reports this at once and does not start Ray."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mrl.cli.main import main
from mrl.config.resolved.run_directory import CHECKPOINTS
from mrl.events import EventLog
from mrl.trainer.checkpoints import CheckpointManager

pytestmark = pytest.mark.needs
ROOT = Path(__file__).parents[2]


class Started(Exception):
    """Raised when the command continues."""


def saved(run: Path, shown: str, step: int) -> Path:
    """Create the files of a run with this checkpoint, and return its directory."""
    run.mkdir()
    (run / "config.yaml").write_text(shown)
    directories: list[Path] = []
    group = SimpleNamespace(begin_checkpoint=lambda path: directories.append(Path(path)))
    group.finish_checkpoint = lambda: (directories[-1].mkdir(), (directories[-1] / "manifest.json").touch())
    roles: Any = {"actor": SimpleNamespace(group=group)}
    checkpoints = CheckpointManager(run / CHECKPOINTS, 1, EventLog(run / "events.jsonl"))
    checkpoints.begin(step, roles, {}, False)
    checkpoints.finish()
    return run / CHECKPOINTS / f"step-{step:06d}"


@pytest.mark.parametrize("verb", ["train", "sft"])
def test_a_run_whose_steps_are_done(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def go_on(*arguments: object) -> int:
        raise Started

    monkeypatch.setattr(f"mrl.cli.{verb}.watched", go_on)
    preset = {"train": "ppo", "sft": "sft"}[verb]
    command = [str(ROOT / "configs" / f"laptop-{preset}.yaml"), f"run.dir={tmp_path}", "run.name=done"]
    command += ["training.steps=5", *(["training.epochs=null"] if verb == "sft" else [])]
    assert main(["show", *command]) == 0
    checkpoint = saved(tmp_path / "done", capsys.readouterr().out, 5)
    message = f"all 5 steps are done; the newest checkpoint is {checkpoint}\n"
    if verb == "sft":
        with pytest.raises(Started):  # its model is missing
            main([verb, *command])
        model = tmp_path / "done" / "model"
        model.mkdir()
        message = f"all 5 steps are done; the model is in {model}\n"
    assert main([verb, *command]) == 0
    assert capsys.readouterr().out == message
    if verb == "sft":
        os.utime(model, (1, 1))  # from a time when the run was shorter
        with pytest.raises(Started):
            main([verb, *command])
        return
    for more in ("training.steps=6", "training.resume=never"):
        with pytest.raises(Started):
            main([verb, *command, more])
    (checkpoint / "manifest.json").write_text("{")
    assert main([verb, *command]) == 1
    assert "the newest checkpoint is damaged" in capsys.readouterr().err
