"""Distillation, whole: a student that has learned nothing comes near to a teacher that `mrl sft` made, by what the
student itself writes and without rewards; and the same run resumed is the same to the bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mrl.data.chat import load_tokenizer
from mrl.demo.model import make_model
from mrl.events import Warned, read_events
from tests.apart import run_mrl, untimed
from tests.data.two_tokenizers import byte_level

TEACHER = """\
run: {{name: teacher, dir: {directory}}}
cluster: {{devices_per_node: 2, device: cpu}}
placement: {{pools: {{all: 2}}, roles: {{actor: all}}}}
model: {{path: {directory}/fresh-teacher}}
data: {{train: {{sums: {{dataset: "toy:addition", options: {{part: train, largest: 19}}}}}}}}
batch: {{rows_per_update: 64, max_prompt_tokens: 16, max_response_tokens: 8}}
actor: {{dtype: float32, max_tokens_per_device: 2048, optimizer: {{lr: 3e-3, weight_decay: 0.0}}}}
training: {{steps: 60}}
"""
STUDENT = """\
run: {{name: student, dir: {directory}}}
cluster: {{devices_per_node: 2, device: cpu}}
placement: {{pools: {{all: 2}}, roles: {{actor: all, teacher: all}}}}
model: {{path: {directory}/fresh-student}}
teacher: {{path: {directory}/teacher/model, dtype: float32, max_tokens_per_device: 256}}
algorithm: {{advantage: reinforce_plus_plus}}
batch: {{prompts_per_step: 64, samples_per_prompt: 1, samples_per_update: 32}}
actor:
  dtype: float32
  max_tokens_per_device: 256
  optimizer: {{lr: 3e-3, weight_decay: 0.0}}
rollout:
  replicas: 1
  max_prompt_tokens: 16
  max_response_tokens: 8
  vllm: {{enforce_eager: true, kv_cache_memory_bytes: 67108864}}
data:
  train: {{sums: {{dataset: "toy:addition", options: {{part: train, largest: 19}}}}}}
  validation: {{sums: {{dataset: "toy:addition", options: {{part: validation, largest: 19}}}}}}
training: {{steps: 16, save_every: 8, keep: 9}}
validation: {{every: 4, reward_functions: {{digits: {{name: digits}}}}, best_metric: val/teacher_kl, best_mode: min}}
"""
LAYOUTS = {
    "full": ("actor.parallel.tp=2", "teacher.parallel.pp=2", "algorithm.distillation.form=full"),
    "top_k": ("teacher.parallel.tp=2", "algorithm.distillation={form: top_k, top_k: 8, beta: 0.0}"),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("distill")
    make_model(directory / "fresh-teacher", seed=1)
    make_model(directory / "fresh-student", seed=2, num_layers=1)
    for name, text in (("teacher", TEACHER), ("student", STUDENT)):
        (directory / f"{name}.yaml").write_text(text.format(directory=directory))
    run_mrl("sft", str(directory / "teacher.yaml"))
    return directory


def train(directory: Path, name: str, *overrides: str) -> list[dict[str, Any]]:
    run_mrl("train", str(directory / "student.yaml"), f"run.name={name}", *overrides)
    return untimed(directory / name)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["full", "top_k"])
@pytest.mark.on_demand
def test_a_student_comes_near_to_its_teacher(directory: Path, form: str) -> None:
    lines = train(directory, form, *LAYOUTS[form])
    apart = [line["val/teacher_kl"] for line in lines if "val/teacher_kl" in line]
    assert len(apart) == 5
    assert apart[0] > 2.0, "it starts far from the teacher"
    assert apart[-1] < 0.8 * apart[0]
    losses = [line["actor/distill_loss"] for line in lines[1:]]
    assert sum(losses[-4:]) / 4 < 0.7 * losses[0]
    assert all(line["actor/taught_share"] == 1.0 for line in lines[1:]), "nothing else is learned from"
    assert all(line["critic/score/mean"] == 0.0 for line in lines[1:])
    mass = [line["actor/teacher_mass"] for line in lines[1:]]
    assert mass[-1] == pytest.approx(1.0, abs=1e-6) if form == "full" else mass[-1] > mass[0]

    again = directory / f"{form}-again"
    shutil.copytree(directory / form, again)
    shutil.rmtree(again / "checkpoints" / "step-000016")
    assert train(directory, f"{form}-again", *LAYOUTS[form]) == lines
    assert (again / "checkpoints" / "step-000016").is_dir()


@pytest.mark.slow
@pytest.mark.on_demand
def test_a_student_comes_near_to_a_teacher_with_another_tokenizer(directory: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sums = [f"{a}+{b}={a + b}" for a in range(20) for b in range(20)]
    foreign = byte_level(directory / "fresh-foreign", 300, words=False, texts=sums)
    shape = Qwen3Config.from_pretrained(directory / "fresh-teacher").to_dict()
    torch.manual_seed(3)
    config = Qwen3Config(**(shape | {"vocab_size": len(load_tokenizer(str(foreign)))}))
    Qwen3ForCausalLM(config).save_pretrained(foreign)
    of_teacher = (f"model.path={foreign}", "run.name=foreign-teacher", "batch.max_prompt_tokens=32")
    run_mrl("sft", str(directory / "teacher.yaml"), *of_teacher)
    text = (f"model.path={directory}/fresh-student", "run.name=half-student", "training.steps=12")
    run_mrl("sft", str(directory / "teacher.yaml"), *text)  # bytes of a random model are no text
    taught = (f"model.path={directory}/half-student/model", "algorithm.distillation.form=advantage")
    taught += (f"teacher.path={directory}/foreign-teacher/model",)
    lines = train(directory, "foreign", *taught)
    apart, untaught = ([line[name] for line in lines[1:]] for name in ("actor/teacher_kl", "teacher/untaught_share"))
    assert sum(apart[-4:]) < 0.7 * sum(apart[:4]), apart
    assert sum(untaught[-4:]) < 0.7 * sum(untaught[:4]), "the policy does not escape to samples without a teacher"
    assert all(0 < line["teacher/spans_per_token"] <= line["teacher/tokens_per_token"] <= 1 for line in lines[1:])
    warned = [record.event for record in read_events(directory / "foreign" / "events.jsonl")]
    reported = [event for event in warned if isinstance(event, Warned) and event.about == "teacher"]
    assert len(reported) == 1
    assert "reads texts" in reported[0].message
    again = directory / "foreign-again"
    shutil.copytree(directory / "foreign", again)
    shutil.rmtree(again / "checkpoints" / "step-000016")
    assert train(directory, "foreign-again", *taught) == lines


@pytest.mark.slow
@pytest.mark.on_demand
def test_a_teacher_beside_rewards_is_a_share_of_what_is_learned(directory: Path) -> None:
    lines = train(
        directory,
        "beside",
        "algorithm={advantage: grpo, distillation: {form: advantage, coef: 0.1}}",
        'reward.functions={short: {name: "tests.trainer.rewards:shortness"}}',
        "batch={prompts_per_step: 8, samples_per_prompt: 4, samples_per_update: 16}",
        "training.steps=2",
        "validation={every: 0, best_metric: null, best_mode: max}",
    )
    assert [line["step"] for line in lines] == [1, 2]
    assert all(0.0 < line["actor/taught_share"] < 1.0 for line in lines)
    assert all("actor/distill_loss" not in line for line in lines)


@pytest.mark.slow
@pytest.mark.on_demand
def test_two_teachers_of_one_model_teach_what_it_teaches(directory: Path) -> None:
    data = [
        f'data.train.{name}={{dataset: "toy:addition", columns: {{data_source: null}}, '
        f"options: {{part: train, largest: {largest}}}}}"
        for name, largest in (("sums", 19), ("others", 18))
    ]
    shorter = ["training.steps=3", *LAYOUTS["top_k"], *data]
    one = train(directory, "one", *shorter)
    more = f"{{path: {directory}/teacher/model, dtype: float32, max_tokens_per_device: 256, sources: [others]}}"
    two = train(directory, "two", f"teachers.other={more}", "placement.roles={teachers.other: all}", *shorter)
    assert len(one) == len(two) == 4
    for line, of_two in zip(one, two, strict=True):
        shares = [of_two.pop(f"{role}/share", None) for role in ("teacher", "teachers.other")]
        assert all(0.2 < share < 0.8 for share in shares) if line["step"] else shares == [None, None]
        assert of_two == pytest.approx(line, rel=1e-4, abs=1e-6)


@pytest.mark.slow
@pytest.mark.on_demand
def test_a_policy_that_teaches_itself_comes_near_to_what_it_says_with_the_answer(directory: Path) -> None:
    own = ("teacher=null", "placement.roles.teacher=null", "actor.parallel.tp=2", "training={steps: 8, save_every: 4}")
    own += (f"model.path={directory}/teacher/model",)
    own += ("algorithm.distillation={form: top_k, top_k: 8, context: 'It is {ground_truth}. {prompt}'}",)
    own += ("algorithm.distillation.context_tokens=32",)
    lines = train(directory, "own", *own)
    losses = [line["actor/distill_loss"] for line in lines[1:]]
    assert 0 < losses[-1] < 0.7 * losses[0], losses
    assert len([line for line in lines if "val/teacher_kl" in line]) == 3
    again = directory / "own-again"
    shutil.copytree(directory / "own", again)
    shutil.rmtree(again / "checkpoints" / "step-000008")
    assert train(directory, "own-again", *own) == lines


@pytest.mark.slow
@pytest.mark.on_demand
def test_a_policy_learns_from_what_it_says_after_its_own_successes(directory: Path) -> None:
    own = ["teacher=null", "placement.roles.teacher=null", f"model.path={directory}/teacher/model"]
    context = "{form: top_k, top_k: 8, reward_coef: 0, success_at: 1, context: 'It is {success}. {prompt}'}"
    own += [f"algorithm={{advantage: grpo, distillation: {context}}}", "algorithm.distillation.context_tokens=32"]
    own += ["reward.functions={digits: {name: digits}}", "training={steps: 3, save_every: 3}"]
    own += ["batch={prompts_per_step: 16, samples_per_prompt: 8, samples_per_update: 64}"]
    lines = train(directory, "successes", *own, "validation={every: 0, best_metric: null, best_mode: max}")
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        reasons = [line[f"teacher/untaught/{reason}"] for reason in ("no_success", "too_long", "control_token")]
        assert line["teacher/untaught_share"] == sum(reasons) / 128
        assert 0.0 < line["actor/taught_tokens"] < 1.0
        assert line["actor/taught_share"] == 1.0, "nothing is learned from the rewards"
        assert line["actor/grad_norm"] > 0.0
