"""Runs of a tiny model, over several hosts and on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mrl.demo.model import make_model
from tests.apart import run_mrl, untimed
from tests.hosts.hosts import Host, hosts, ray_on, why_not
from tests.launch.conftest import place as place  # the fixture

TRAINED = {"dtype": "float32", "max_tokens_per_device": 128, "optimizer": {"lr": 1e-3}}


@pytest.fixture(autouse=True)
def _hosts_can_be_had() -> None:
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "model", seed=1)


def write_run(path: Path, model: Path, placement: dict[str, Any], **own: Any) -> Path:
    """Write the configuration of a GRPO run: two steps of two updates each, on four devices, two per host."""
    run = {
        "run": {"name": path.stem, "dir": str(path.parent / "runs")},
        "cluster": {"nodes": 1, "devices_per_node": 4, "device": "cpu"},
        "placement": placement,
        "model": {"path": str(model)},
        "algorithm": {"advantage": "grpo", "kl": {"where": "loss", "coef": 0.01}},
        "batch": {"prompts_per_step": 4, "samples_per_prompt": 4, "samples_per_update": 8},
        "rollout": {
            "max_prompt_tokens": 16,
            "max_response_tokens": 8,
            "vllm": {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 26},
        },
        "data": {"train": {"sums": {"dataset": "toy:addition", "options": {"part": "train"}}}},
        "reward": {"functions": {"length": {"name": "tests.trainer.rewards:chance"}}, "num_workers": 1},
        "deadlines": {"call_s": 150},
        "training": {"steps": 2},
    }
    path.write_text(json.dumps(run | own))
    return path


def over_both(address: str) -> str:
    """Return the override for a cluster of two hosts."""
    return f"cluster={{nodes: 2, devices_per_node: 2, ray_address: '{address}'}}"


def metrics_alone(config: Path, *overrides: str) -> list[dict[str, Any]]:
    """Return the metrics of the same run on this machine alone."""
    run_mrl("train", str(config), "run.name=alone", *overrides, "--quiet")
    return untimed(config.parent / "runs" / "alone")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Host, str]]:
    """Start Ray on two hosts, two devices each, with different interface names. Yield the head and Ray's address."""
    if reason := why_not():
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("hosts")
    with hosts(["eth0", "ens7"]) as both, ray_on(both, directory, "--num-cpus=2") as address:
        yield both[0], address
