"""Manifests of a run's checkpoints with any damage: rejected, or read as they were saved."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from mrl.engine.checkpoint_files import MANIFEST
from mrl.errors import CheckpointError
from mrl.trainer.checkpoints import find_checkpoint
from tests.fuzzing import changed, damaged, rounds


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
