"""Scripts and YAML files of verl become configurations, and no key disappears without a word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mrl.cli.main import main
from mrl.config.resolved.load import load_config
from mrl.config.values import KeyPath
from mrl.config.verl_import import Imported, import_verl
from mrl.config.verl_script import read_verl
from mrl.errors import ConfigError

SCRIPT = """\
set -x
# algorithm.gamma=0.5 in a comment counts for nothing
export MODEL=${MODEL:-Qwen/Qwen2-7B-Instruct}
prompt=$((1024 * 2))
response=$((prompt + 1024))
files="['$HOME/a/train.parquet', '$HOME/b/train.parquet']"
python3 -m verl.trainer.main_ppo --config-path=config \\
    algorithm.adv_estimator=grpo \\
    algorithm.norm_adv_by_std_in_grpo=False \\
    data.train_files="$files" \\
    data.val_files=$HOME/a/test.parquet \\
    data.train_batch_size=512 \\
    data.max_prompt_length=${prompt} \\
    data.max_response_length=$response \\
    actor_rollout_ref.model.path="$MODEL" \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \\
    actor_rollout_ref.actor.clip_ratio=0.1 \\
    actor_rollout_ref.model.enable_gradient_checkpointing=True \\
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \\
    +actor_rollout_ref.actor.megatron.override_ddp_config.overlap_grad_reduce=True \\
    actor_rollout_ref.ref.megatron.tensor_model_parallel_size=4 \\
    actor_rollout_ref.rollout.n=8 \\
    actor_rollout_ref.rollout.n_agent=4 \\
    critic.optim.lr=1e-5 \\
    reward_model.model.path=org/scorer \\
    trainer.default_local_dir=$(date +%s) \\
    trainer.nnodes=2 \\
    trainer.logger='["console","wandb"]' \\
    trainer.total_epochs=15 \\
    trainer.frobnicate=1 $@
"""


def imported(text: str = SCRIPT, name: str = "run.sh") -> Imported:
    return import_verl(read_verl(text, name))


def test_a_script_becomes_a_configuration() -> None:
    values = imported().values
    home = "${oc.env:HOME}"
    assert values["data"]["train"] == {
        "part0": {"dataset": f"{home}/a/train.parquet"},
        "part1": {"dataset": f"{home}/b/train.parquet"},
    }
    assert values["data"]["validation"] == {"main": {"dataset": f"{home}/a/test.parquet"}}
    assert values["algorithm"] == {"advantage": "dr_grpo", "loss": {"clip_low": 0.1, "clip_high": 0.1}}
    assert values["batch"] == {"samples_per_prompt": 8, "prompts_per_step": 512, "samples_per_update": 1024}
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    assert values["actor"] == {
        "optimizer": {"lr": 1e-6},
        "megatron": recompute,
        "ddp": {"overlap_grad_reduce": True},
        "parallel": {"tp": 2},
        "max_tokens_per_device": 4 * (2048 + 3072),
    }
    cluster = {"nodes": 2, "device": "gpu", "devices_per_node": 8, "ray_address": "auto"}
    assert values["cluster"] == cluster, "several nodes have a Ray to join"
    assert values["placement"] == {"pools": {"all": 16}, "roles": {"actor": "all"}}
    assert "critic" not in values
    assert "reward_model" not in values


def test_each_key_is_in_one_part_of_the_report() -> None:
    made = imported()
    parts = [made.taken, made.changed, made.left_out, made.unknown]
    reported = [report.key for part in parts for report in part]
    assert set(reported) >= {".".join(path) for path in read_verl(SCRIPT, "run.sh")}
    reasons = {report.key: report.remark for report in made.left_out}
    assert reasons["critic.optim.lr"] == "adv_estimator=grpo has no critic"
    assert reasons["reward_model.model.path"] == "reward_model.enable is not true"
    assert reasons["trainer.default_local_dir"] == "the script computes its value: set it by hand"
    assert reasons["actor_rollout_ref.rollout.n_agent"] == "another key has set batch.samples_per_prompt to 8"
    assert "layout" in reasons["actor_rollout_ref.ref.megatron.tensor_model_parallel_size"]
    assert [report.key for report in made.unknown] == ["trainer.frobnicate"]
    assert {report.key: report.remark for report in made.changed}["actor_rollout_ref.actor.ppo_mini_batch_size"] == (
        "which is ppo_mini_batch_size 128 x rollout.n 8"
    )


def test_a_yaml_file_may_refer_to_its_own_keys() -> None:
    text = (
        "data: {train_batch_size: 64}\nactor_rollout_ref: {actor: {ppo_mini_batch_size: '${data.train_batch_size}'}}\n"
    )
    made = imported(text, "run.yaml")
    assert made.values["batch"] == {"prompts_per_step": 64, "samples_per_update": 64, "samples_per_prompt": 1}


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("a.b=$((7 / 2))", 3),
        ("a.b=$((X * (1 + 2)))", 12),
        ("a.b=$((open('f')))", "$((open(f)))"),
        ("a.b=1e-6", 1e-6),
        ("a.b=null", None),
        ("a.b='[\"x\",2]'", ["x", 2]),
        ("++a.b=True", True),
        ("a.b=${Y}_z", "${oc.env:Y}_z"),
        ("a.b=`id`", "`id`"),
    ],
)
def test_values_are_read_and_never_executed(word: str, expected: Any) -> None:
    path: KeyPath = ("a", "b")
    assert read_verl(f"X=4\nrun {word}\n", "run.sh") == {path: expected}


def test_a_file_without_keys_is_refused() -> None:
    for text, name in (("echo hello\n", "run.sh"), ("- 1\n", "run.yaml"), ("a: [\n", "run.yaml")):
        with pytest.raises(ConfigError, match=name):
            read_verl(text, name)


def test_the_command_writes_what_loads_or_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    script, output = tmp_path / "run.sh", tmp_path / "run.yaml"
    script.write_text(SCRIPT.replace("trainer.nnodes=2", "trainer.nnodes=1"))
    assert main(["import", "verl", str(script), "-o", str(output)]) == 1
    assert "training.steps: is required and missing" in capsys.readouterr().out
    assert main(["import", "verl", str(script), "-o", str(output)]) == 2
    assert f"{output} exists" in capsys.readouterr().err
    output.unlink()
    assert main(["import", "verl", str(script), "-o", str(output), "training.steps=9", "run.name=seven"]) == 0
    text = capsys.readouterr().out
    batch = [line.split()[-2:] for line in text.splitlines() if " per step " in line or "per optimizer step " in line]
    assert batch == [[number, number] for number in ("512", "4096", "1024", "4", "1")], "verl's and mrl's"
    config = load_config(str(output), []).config
    assert (config.run.name, config.training.steps, config.actor.parallel.tp) == ("seven", 9, 2)
