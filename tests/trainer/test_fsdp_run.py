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
from tests.trainer.test_ranked_run import CONFIG as RANKED
from tests.trainer.test_ranked_run import KINDS

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
        assert names
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
def test_ppo_has_the_figures_of_megatron(config: Path) -> None:
    expected = train(config, "megatron", *ONE_CUT)
    found = train(config, "fsdp", *FSDP)
    assert_same(found, expected)
    assert all(line["sync/bytes_between_ranks"] == line["sync/least_bytes"] for line in found)
    assert max(line[MISMATCH] for line in found if MISMATCH in line) < 1e-4, "the engine has the trained weights"


@pytest.mark.slow
@pytest.mark.on_demand
def test_each_strategy_continues_the_run_of_the_other(config: Path) -> None:
    train(config, "first-megatron", *ONE_CUT)
    train(config, "first-fsdp", *FSDP)
    expected = untimed(config.parent / "runs" / "first-megatron")
    assert_same(continued(config, "first-megatron", "to-fsdp", *FSDP), expected)
    assert_same(continued(config, "first-fsdp", "to-megatron", *ONE_CUT), expected)


WITH_VLLM = ("gemma3_text", "olmo3", "granite", "gpt_neox")


def open_model(family: str, directory: Path) -> Path:
    """Make a tiny model of a family without a table, with the tokenizer of the demo's model."""
    from tests.fsdp.open_models import make_open  # loads transformers

    demo = make_model(directory / "demo", seed=1)
    vocab = json.loads((Path(demo) / "config.json").read_text())["vocab_size"]
    kernel = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    own = kernel if family in WITH_VLLM else {}  # vLLM's kernels for CPUs take no smaller heads
    made = make_open(family, directory / family, vocab_size=vocab, **own)
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
@pytest.mark.parametrize("family", [*WITH_VLLM, "hunyuan_v1_moe", "cohere2", "apertus", "deepseek_v2"])
def test_grpo_of_a_model_without_a_table(family: str, tmp_path: Path) -> None:
    model = open_model(family, tmp_path)
    config = tmp_path / "run.yaml"
    config.write_text(CONFIG.format(directory=tmp_path / "runs", model=model))
    options = [] if family in WITH_VLLM else ["rollout.engine=transformers"]
    run_mrl("train", str(config), *GRPO, *options)
    lines = untimed(tmp_path / "runs" / "small")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert max(line[MISMATCH] for line in lines if MISMATCH in line) < 1e-3, "the engine has the trained weights"
    assert lines[-1]["actor/kl_loss"] > 1e-7, "the weights change"


@pytest.mark.slow
@pytest.mark.on_demand
@pytest.mark.parametrize("sync", ["adapters", "merged"])
def test_adapters_have_the_figures_of_megatron(config: Path, sync: str) -> None:
    lora = (*GRPO, f"actor.lora={{rank: 4, alpha: 8, sync: {sync}}}", "actor.optimizer.lr=1e-2", "sync.offload=false")
    expected = train(config, f"lora-megatron-{sync}", *lora, "actor.strategy=megatron")
    found = train(config, f"lora-fsdp-{sync}", *lora)
    assert_same(found, expected)
    assert max(line[MISMATCH] for line in found if MISMATCH in line) < 1e-4, "the engine has the trained adapters"
    assert found[2]["actor/kl_loss"] > 1e-6 > found[0]["actor/kl_loss"], "the reference is the model without adapters"
    if sync == "adapters":
        assert [line["sync/bytes_between_ranks"] > 0 for line in found] == [True, False, False]


@pytest.mark.slow
@pytest.mark.on_demand
@pytest.mark.parametrize("kind", ["sft", "rm", "dpo"])
def test_supervised_training_has_the_figures_of_megatron(kind: str, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    text = RANKED.format(directory=tmp_path, model=make_model(tmp_path / "model", seed=1))
    if kind == "sft":
        text = text.replace(", pairs: 2", "").replace(", pairs: 1", "").replace(", keep_best: true", "")
    config.write_text(text + KINDS.get(kind, ""))
    found = {}
    for strategy in ("megatron", "fsdp"):
        options = ("actor.parallel.tp=1", f"actor.strategy={strategy}", f"run.name={strategy}")
        run_mrl(kind, str(config), *options)
        found[strategy] = untimed(tmp_path / strategy)
        assert (tmp_path / strategy / "model" / "model.safetensors").exists()
    assert_same(found["fsdp"], found["megatron"])
