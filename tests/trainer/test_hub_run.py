"""A whole run by a model's name: from an empty cache and the hub's service to two steps, and on from there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mrl.demo.model import make_model
from mrl.observe.metrics import read_metrics
from tests.apart import run_mrl
from tests.hub import commit_of, hub_service
from tests.trainer.test_ppo import CONFIG

SMALL = ("run.name=named", "batch={prompts_per_step: 4, samples_per_prompt: 2, samples_per_update: 8}")


@pytest.mark.slow
@pytest.mark.on_demand
def test_a_run_by_name_downloads_trains_and_goes_on_with_its_commit(tmp_path: Path) -> None:
    model = make_model(tmp_path / "made", seed=1)
    config = tmp_path / "named.yaml"
    config.write_text(CONFIG.format(directory=tmp_path, model="maker/tiny"))
    run, cache = tmp_path / "named", tmp_path / "cache"
    commit = commit_of("maker/tiny", model)
    with hub_service({"maker/tiny": model}) as hub:
        online = {"HF_HUB_CACHE": str(cache), "HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0"}
        run_mrl("train", str(config), *SMALL, "training.steps=2", **online)
        assert any(line.startswith("GET /blobs/") for line in hub.asked), hub.asked
    assert [line["step"] for line in read_metrics(run / "metrics.jsonl")] == [1, 2]
    snapshot = cache / "models--maker--tiny" / "snapshots" / commit
    assert json.loads((run / "models.json").read_text()) == {
        "model.path": {"name": "maker/tiny", "revision": commit, "directory": str(snapshot)}
    }
    (cache / "models--maker--tiny" / "refs" / "main").write_text("0" * 40)  # the branch has moved
    offline = {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    said = run_mrl("train", str(config), *SMALL, **offline)
    assert "resumed from" in said
    assert "model.path: was" not in said
    assert json.loads((run / "models.json").read_text())["model.path"]["revision"] == commit
    run_mrl("export", str(run), str(tmp_path / "exported"), **offline)
    assert (tmp_path / "exported" / "tokenizer.json").is_file()
