"""Manifests of checkpoints, of a role and of a run, with any damage: rejected, or read as they were saved."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch

from mrl.engine.checkpoint_files import MANIFEST, SavedFiles
from mrl.errors import CheckpointError, EngineError
from mrl.trainer.checkpoints import find_checkpoint
from tests.engine.test_checkpoint_files import FACTS, WHOLE, write
from tests.fuzzing import changed, damaged, rounds


def test_damaged_manifests_of_a_role(tmp_path: Path) -> None:
    whole = (write(tmp_path, **FACTS) / MANIFEST).read_bytes()
    refused = 0
    for chance in rounds("role manifest"):
        for _ in range(10):
            content = json.dumps(changed(json.loads(whole), chance)).encode()
            (tmp_path / MANIFEST).write_bytes(content if chance.random() < 0.7 else damaged(whole, chance))
            try:
                saved = SavedFiles(tmp_path)
                saved.check_manifest()
                saved.check_model({"w": (6, 4)})
                saved.check_files(0, 1)
                view = torch.zeros(6, 4)
                saved.read("w", ((0, 6), (0, 4)), {"param": view})
                assert torch.equal(view, WHOLE)
            except EngineError:
                refused += 1
    assert refused


def test_damaged_manifests_of_a_run(tmp_path: Path) -> None:
    """Includes damage by someone who recomputes the hash."""
    checkpoint = tmp_path / "step-000003"
    (checkpoint / "actor").mkdir(parents=True)
    (checkpoint / "actor" / MANIFEST).write_text("{}")
    digest = hashlib.sha256(b"{}").hexdigest()
    good = {"format": "mrl-run-2", "step": 3, "roles": {"actor": digest}, "state": {"a": [1]}}
    refused = 0
    for chance in rounds("run manifest"):
        value = changed(good, chance)
        if isinstance(value, dict):
            value["sha256"] = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
        content = json.dumps(value).encode()
        (checkpoint / MANIFEST).write_bytes(content if chance.random() < 0.7 else damaged(content, chance))
        try:
            find_checkpoint(tmp_path, "latest")
        except CheckpointError:
            refused += 1
    assert refused
