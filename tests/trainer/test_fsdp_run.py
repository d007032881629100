"""Whole runs with torch's sharding: the same figures as with Megatron, and each continues the other's checkpoint."""

from __future__ import annotations

import json
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
    """Continue the first checkpoint of another run."""
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


def open_model(family: str, directory: Path) -> Path:
    """Make a tiny model of a family without a table, with the tokenizer of the demo's model."""
    from tests.fsdp.open_models import make_open  # loads transformers

    demo = make_model(directory / "demo", seed=1)
    vocab = json.loads((Path(demo) / "config.json").read_text())["vocab_size"]
    made = make_open(family, directory / family, vocab_size=vocab)
    for path in Path(demo).iterdir():
        if path.name not in ("config.json", "model.safetensors", "generation_config.json"):
            shutil.copyfile(path, made / path.name)
    return made


GRPO = (
    "placement.roles.critic=null",
    "critic=null",
    "algorithm={advantage: grpo, kl: {where: loss, coef: 0.01}}",
    *ONE_CUT,
    "actor.strategy=fsdp",
)


@pytest.mark.slow
@pytest.mark.on_demand
@pytest.mark.parametrize(
    ("family", "engine"),
    [
        ("gemma3_text", "vllm"), ("olmo3", "vllm"), ("granite", "vllm"), ("gpt_neox", "vllm"),
        ("hunyuan_v1_moe", "transformers"), ("cohere2", "transformers"), ("apertus", "transformers"),
        ("deepseek_v2", "transformers"),
    ],
)  # fmt: skip
def test_grpo_and_sft_of_a_model_without_a_table(family: str, engine: str, tmp_path: Path) -> None:
    model = open_model(family, tmp_path)
    config = tmp_path / "run.yaml"
    config.write_text(CONFIG.format(directory=tmp_path / "runs", model=model))
    options = ["rollout.engine=transformers", "rollout.vllm={}"] if engine == "transformers" else []
    run_mrl("train", str(config), *GRPO, *options)
    lines = untimed(tmp_path / "runs" / "small")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert max(line[MISMATCH] for line in lines if MISMATCH in line) < 1e-3, "the engine has the trained weights"
    assert lines[0]["actor/kl_loss"] == pytest.approx(0, abs=1e-5)
    assert lines[-1]["actor/kl_loss"] > 1e-7, "the weights change"
