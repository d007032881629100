"""`mrl sft` as a user runs it: trained, stopped and gone on with, on real ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from mrl.demo.model import make_model
from mrl.errors import EXIT_STOPPED
from mrl.observe.metrics import read_metrics

CONFIG = """\
run: {{name: run, dir: {directory}}}
cluster: {{devices_per_node: 2, device: cpu}}
placement: {{pools: {{all: 2}}, roles: {{actor: all}}}}
model: {{path: {model}}}
data: {{train: {{sums: {{dataset: "toy:addition", options: {{part: train}}}}}}}}
batch: {{rows_per_update: 16, max_prompt_tokens: 16, max_response_tokens: 8}}
actor:
  dtype: float32
  max_tokens_per_device: 256
  optimizer: {{lr: 1e-3}}
  schedule: {{warmup_steps: 2, decay: linear, decay_steps: 40}}
training: {{steps: 40, save_every: 15}}
"""
ROOT = Path(__file__).resolve().parents[2]
MAIN = "import sys; from mrl.cli.main import main; sys.exit(main())"


def started(config: Path, name: str) -> subprocess.Popen[str]:
    """A process of its own, as for a user: the one that runs the tests may hold a Ray already."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    return subprocess.Popen(
        [sys.executable, "-c", MAIN, "sft", str(config), f"run.name={name}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT)},
    )


def state_of(run: Path) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]:
    """All that a run has learnt: figures, hashes of the last checkpoint's files, the model."""
    manifest = json.loads((run / "checkpoints" / "step-000040" / "actor" / "manifest.json").read_text())
    return read_metrics(run / "metrics.jsonl"), manifest["files"], load_file(run / "model" / "model.safetensors")


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_to_the_same_model(tmp_path: Path) -> None:
    config = tmp_path / "sft.yaml"
    config.write_text(CONFIG.format(directory=tmp_path, model=make_model(tmp_path / "initial", seed=1)))
    whole = started(config, "whole")
    printed, _ = whole.communicate(timeout=300)
    assert whole.returncode == 0, printed

    stopped = started(config, "stopped")
    assert stopped.stdout is not None
    for line in stopped.stdout:
        if line.startswith("1/40"):
            stopped.send_signal(signal.SIGTERM)
            break
    printed, _ = stopped.communicate(timeout=300)
    assert stopped.returncode == EXIT_STOPPED, printed
    done = len(read_metrics(tmp_path / "stopped" / "metrics.jsonl"))
    assert 1 <= done < 40
    assert f"SIGTERM: saving and stopping\nstopped after {done} updates; the same command goes on\n" in printed
    assert not (tmp_path / "stopped" / "model").exists()

    resumed = started(config, "stopped")
    printed, _ = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, printed
    assert f"resumed from {tmp_path / 'stopped' / 'checkpoints' / f'step-{done:06d}'}" in printed
    figures, files, model = state_of(tmp_path / "stopped")
    expected_figures, expected_files, expected_model = state_of(tmp_path / "whole")
    assert figures == expected_figures
    assert files == expected_files
    assert model.keys() == expected_model.keys()
    assert all(bool((model[name] == tensor).all()) for name, tensor in expected_model.items())
