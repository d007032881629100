"""Whole runs with torch's sharding: the same figures as with Megatron, and each goes on with the other's checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from mrl.demo.model import make_model
from tests.apart import run_mrl, untimed
from tests.trainer.test_ppo import CONFIG

ONE_CUT = ("actor.parallel.tp=1", "rollout.temperature=0.9")
FSDP = (*ONE_CUT, "actor.strategy=fsdp", "critic.strategy=fsdp")
Lines = list[dict[str, Any]]
MISMATCH = "mismatch/log_prob_abs_diff_max"
LEARNED = ("actor/loss", "actor/grad_norm", "actor/kl_loss", "critic/loss", "critic/grad_norm", MISMATCH)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("fsdp")
    path = directory / "run.yaml"
    path.write_text(CONFIG.format(directory=directory / "runs", model=make_model(directory / "model", seed=1)))
    return path


def train(config: Path, name: str, *overrides: str) -> Lines:
    run_mrl("train", str(config), f"run.name={name}", *overrides)
    return untimed(config.parent / "runs" / name)


def assert_same(found: Lines, expected: Lines) -> None:
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    for ours, theirs in zip(found, expected, strict=True):
        names = [name for name in ours if isinstance(ours[name], float) and not name.startswith("sync/")]
        assert {*LEARNED} & {*theirs} <= {*names}
        for name in names:
            assert ours[name] == pytest.approx(theirs[name], rel=2e-3, abs=2e-4), name


def continued(config: Path, source: str, name: str, *overrides: str) -> Lines:
    """Go on with the first checkpoint of another run."""
    runs = config.parent / "runs"
    shutil.copytree(runs / source, runs / name)
    for step in (2, 3):
        shutil.rmtree(runs / name / "checkpoints" / f"step-00000{step}")
    return train(config, name, *overrides)


@pytest.mark.slow
def test_ppo_has_the_figures_of_megatron_and_goes_on_with_its_checkpoint(config: Path) -> None:
    expected = train(config, "megatron", *ONE_CUT)
    found = train(config, "fsdp", *FSDP)
    assert_same(found, expected)
    assert all(line["sync/bytes_between_ranks"] == line["sync/least_bytes"] for line in found)
    assert max(line[MISMATCH] for line in found if MISMATCH in line) < 1e-4, "the engine has the trained weights"
    assert_same(continued(config, "megatron", "to-fsdp", *FSDP), expected)
    assert_same(continued(config, "fsdp", "to-megatron", *ONE_CUT), expected)
