"""`mrl export` while the run is still running."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from mrl.cli.export import ExportForm, export_role
from mrl.cli.main import main
from mrl.config.resolved.load import load_config_of
from mrl.demo.model import make_model
from mrl.errors import EngineError, SetupError

pytestmark = pytest.mark.needs
LAPTOP_SFT = str(Path(__file__).parents[2] / "configs" / "laptop-sft.yaml")


@pytest.mark.parametrize("is_removed", [True, False])
@pytest.mark.parametrize("error", [FileNotFoundError(2, "No such file"), EngineError("is missing", where="a file")])
def test_a_checkpoint_that_is_removed_while_it_is_read(
    error: Exception, is_removed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, model = tmp_path / "step-000003", tmp_path / "model"
    checkpoint.mkdir()
    model.mkdir()
    (model / "config.json").write_text("{}")

    def read(*_: object, **__: object) -> int:
        if is_removed:
            shutil.rmtree(checkpoint)
        raise error

    monkeypatch.setattr("mrl.trainer.checkpoints.find_checkpoint", lambda *_: checkpoint)
    monkeypatch.setattr("mrl.engine.checkpoint_files.export_checkpoint", read)
    config = load_config_of("sft", LAPTOP_SFT, [f"model.path={model}"]).config
    with pytest.raises(SetupError if is_removed or isinstance(error, OSError) else type(error)) as caught:
        export_role(config, tmp_path, "3", "actor", ExportForm(), tmp_path / "out")
    assert ("which is still running, has removed this checkpoint" in str(caught.value)) == is_removed


def test_a_place_where_nothing_can_be_written_is_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real writer of models runs. It would read the checkpoint only later."""
    from mrl.models.families import read_spec
    from mrl.models.hf_writer import HfWriter

    model = make_model(tmp_path / "model", seed=1)
    (tmp_path / "checkpoints" / "step-000003").mkdir(parents=True)
    (tmp_path / "file").touch()
    (tmp_path / "config.yaml").write_text(f"extends: {LAPTOP_SFT}\nmodel: {{path: {model}}}\n")

    def export(saved: Path, source: Path, head: str, dtype: torch.dtype, target: Path, **_: bool) -> int:
        with HfWriter(target, read_spec(source), source, "lm", dtype):
            raise AssertionError("nothing can be written there")

    monkeypatch.setattr("mrl.trainer.checkpoints.find_checkpoint", lambda *_: tmp_path / "checkpoints" / "step-000003")
    monkeypatch.setattr("mrl.engine.checkpoint_files.export_checkpoint", export)
    assert main(["export", str(tmp_path), str(tmp_path / "file" / "out")]) == 1
    shown = capsys.readouterr().err
    assert "cannot export the model: Not a directory" in shown
    assert "fix: choose an OUT that you can write to, with enough free space" in shown
    assert "Traceback" not in shown
