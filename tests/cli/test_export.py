"""`mrl export` beside a run that goes on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mrl.cli.export import export_role
from mrl.config.load import load_config_of
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

    def read(*_: object) -> int:
        if is_removed:
            shutil.rmtree(checkpoint)
        raise error

    monkeypatch.setattr("mrl.trainer.checkpoints.find_checkpoint", lambda *_: checkpoint)
    monkeypatch.setattr("mrl.engine.checkpoint_files.export_checkpoint", read)
    config = load_config_of("sft", LAPTOP_SFT, [f"model.path={model}"]).config
    with pytest.raises(SetupError if is_removed else type(error)) as caught:
        export_role(config, tmp_path, "3", "actor", None, tmp_path / "out")
    assert ("has removed this checkpoint meanwhile" in str(caught.value)) == is_removed
