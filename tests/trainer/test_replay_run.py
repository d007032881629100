"""A real run that records its steps, replayed: to the bit in its own layout, within rounding in others."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mrl.config.resolved.load import load_config
from mrl.demo.model import make_model
from mrl.plan.record_size import record_size
from mrl.protocol.step_record import StepRecord
from tests.apart import run_mrl, untimed

CONFIG = """\
run: {{name: run, dir: {directory}/runs}}
cluster: {{devices_per_node: 2, device: cpu}}
placement: {{pools: {{all: 2}}, roles: {{actor: all, critic: all}}}}
model: {{path: {model}}}
algorithm: {{advantage: gae, kl: {{where: both, coef: 0.01}}}}
batch: {{prompts_per_step: 4, samples_per_prompt: 4, samples_per_update: 8}}
actor: {{parallel: {{tp: 2}}, dtype: float32, max_tokens_per_device: 128, optimizer: {{lr: 1e-3}}}}
critic: {{dtype: float32, max_tokens_per_device: 128, optimizer: {{lr: 1e-3}}}}
rollout: {{engine: transformers, replicas: 1, max_prompt_tokens: 16, max_response_tokens: 8}}
data: {{train: {{sums: {{dataset: "toy:addition", options: {{part: train}}}}}}}}
reward: {{functions: {{length: {{name: "tests.trainer.rewards:shortness"}}}}, num_workers: 1}}
training: {{steps: 3, save_every: 2, record: {{every: 1, gradients: true, activations: true}}}}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("replay")
    model = make_model(directory / "model", seed=1)
    (directory / "run.yaml").write_text(CONFIG.format(directory=directory, model=model))
    run_mrl("train", str(directory / "run.yaml"), "--quiet")
    return directory / "runs" / "run"


@pytest.mark.slow
@pytest.mark.parametrize(
    "step",
    [pytest.param(3, id="after a checkpoint"), pytest.param(2, id="from the model", marks=pytest.mark.on_demand)],
)
def test_a_replay_in_the_same_layout_is_equal_to_the_bit(step: int, run: Path) -> None:
    """The second step has no checkpoint before it, so the first one is trained again, too."""
    said = run_mrl("replay", str(run), "--step", str(step), "--exact", "--quiet")
    assert f"step {step}: equal, bit for bit" in said
    record = StepRecord.read(run, step)
    assert len(record.facts["ranks"]["actor"]) == 2
    kinds = {part.kind for role, *_, part in record.prints if role == "critic"}
    size = sum(file.stat().st_size for file in record.path.iterdir())
    assert size <= record_size(load_config(str(run / "config.yaml"), []).config) <= 5 * size, (
        "mrl check shows it before"
    )
    assert kinds >= {"weight", "main_weight", "exp_avg", "exp_avg_sq", "gradient", "input", "output"}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp: 1", pytest.param("tp: 1, pp: 2", marks=pytest.mark.on_demand)])
def test_a_replay_in_another_layout_agrees_within_rounding(layout: str, run: Path) -> None:
    said = run_mrl("replay", str(run), "--step", "3", "--quiet", f"actor.parallel={{{layout}}}")
    assert "step 3: equal within rounding" in said
    assert "  actor.parallel.tp: 2 and 1\n" in said
    said = run_mrl("diff", str(run), str(run.with_name("run-replay-3")), "--exact")
    assert "bit for bit" in said, "the replay in the same layout has its own directory"


@pytest.mark.slow
def test_a_step_is_compared_with_transformers_models(run: Path) -> None:
    said = run_mrl("replay", str(run), "--step", "3", "--quiet", "--reference")
    assert "  actor.strategy: megatron and fsdp\n" in said
    assert "step 3: equal within rounding" in said


@pytest.mark.slow
@pytest.mark.on_demand
def test_a_step_of_either_strategy_is_replayed_by_the_other(run: Path) -> None:
    fsdp = ("actor.parallel.tp=1", "actor.strategy=fsdp", "critic.strategy=fsdp")
    run_mrl("train", str(run.parents[1] / "run.yaml"), "--quiet", "run.name=fsdp", *fsdp)
    sharded = run.with_name("fsdp")
    assert "step 3: equal, bit for bit" in run_mrl("replay", str(sharded), "--step", "3", "--exact", "--quiet")
    megatron = ("actor.strategy=megatron", "critic.strategy=megatron")
    assert "step 3: equal within rounding" in run_mrl("replay", str(sharded), "--step", "3", "--quiet", *megatron)


@pytest.mark.slow
@pytest.mark.on_demand
def test_another_loss_is_found(run: Path) -> None:
    said = run_mrl("replay", str(run), "--step", "3", "--quiet", "algorithm.loss.aggregation=token-sum", exit_code=3)
    assert "  algorithm.loss.aggregation: token-mean and token-sum\n" in said
    assert "step 3: the first difference is in phase update 1 of the critic: gradient" in said


@pytest.mark.slow
def test_recorded_samples_train_a_run_without_engines(run: Path) -> None:
    """The figures that do not come from engines are those of the run."""
    config = str(run.parents[1] / "run.yaml")
    said = run_mrl("train", config, "run.name=again", f"training.samples_from={run}", "training.record.every=0")
    assert "3 steps done" in said
    for line, again in zip(untimed(run), untimed(run.with_name("again")), strict=True):
        shared = {name: value for name, value in line.items() if not name.startswith("sync/")}
        assert shared == {name: again.get(name) for name in shared}


@pytest.mark.slow
def test_a_step_whose_checkpoint_is_gone_is_refused(run: Path, tmp_path: Path) -> None:
    pruned = tmp_path / "pruned"
    shutil.copytree(run, pruned)
    shutil.rmtree(pruned / "checkpoints")
    shutil.rmtree(pruned / "record" / "step-000001")
    said = run_mrl("replay", str(pruned), "--step", "3", exit_code=1)
    assert "step 3 cannot be replayed: no checkpoint before it is left, and step 1 between them was not" in said
    assert "training.save_every, training.keep" in said
