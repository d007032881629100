"""A whole run by a model's name: from an empty cache and the hub's service to two steps, and on from there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mrl.demo.model import make_model
from mrl.observe.metrics import read_metrics
from tests.apart import run_mrl
from tests.hub import commit_of, hub_service

CONFIG = """\
run: {{name: named, dir: {directory}}}
cluster: {{devices_per_node: 1, device: cpu}}
placement: {{pools: {{all: 1}}, roles: {{actor: all}}}}
model: {{path: maker/tiny}}
algorithm: {{advantage: grpo}}
batch: {{prompts_per_step: 4, samples_per_prompt: 2, samples_per_update: 8}}
actor: {{dtype: float32, max_tokens_per_device: 128, optimizer: {{lr: 1e-3}}}}
rollout:
  max_prompt_tokens: 16
  max_response_tokens: 8
  vllm: {{enforce_eager: true, kv_cache_memory_bytes: 67108864}}
sync: {{offload: false}}
data: {{train: {{sums: {{dataset: "toy:addition"}}}}}}
reward: {{functions: {{answer: {{name: digits}}}}, num_workers: 1}}
training: {{steps: 2, save_every: 2}}
"""


@pytest.mark.slow
@pytest.mark.on_demand
def test_a_run_by_name_downloads_trains_and_goes_on_with_its_commit(tmp_path: Path) -> None:
    model = make_model(tmp_path / "made", seed=1)
    config = tmp_path / "named.yaml"
    config.write_text(CONFIG.format(directory=tmp_path))
    run, cache = tmp_path / "named", tmp_path / "cache"
    commit = commit_of("maker/tiny", model)
    with hub_service({"maker/tiny": model}) as hub:
        online = {"HF_HUB_CACHE": str(cache), "HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0"}
        run_mrl("train", str(config), **online)
        assert any(line.startswith("GET /blobs/") for line in hub.asked), hub.asked
    assert [line["step"] for line in read_metrics(run / "metrics.jsonl")] == [1, 2]
    snapshot = cache / "models--maker--tiny" / "snapshots" / commit
    assert json.loads((run / "models.json").read_text()) == {
        "model.path": {"name": "maker/tiny", "revision": commit, "directory": str(snapshot)}
    }
    (cache / "models--maker--tiny" / "refs" / "main").write_text("0" * 40)  # the branch has moved
    offline = {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    said = run_mrl("train", str(config), "training.steps=3", **offline)
    assert "resumed from" in said
    assert "model.path: was" not in said
    assert json.loads((run / "models.json").read_text())["model.path"]["revision"] == commit
    run_mrl("export", str(run), str(tmp_path / "exported"), **offline)
    assert (tmp_path / "exported" / "tokenizer.json").is_file()
