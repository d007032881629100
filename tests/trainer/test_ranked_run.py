"""Whole runs of `mrl rm` and `mrl dpo`: resumed runs equal whole ones, and exported models give the same scores."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from mrl.data.toy import addition
from mrl.demo.model import make_model
from tests.apart import run_mrl, untimed

CONFIG = """\
run: {{name: run, dir: {directory}}}
cluster: {{devices_per_node: 2, device: cpu}}
placement: {{pools: {{all: 2}}, roles: {{actor: all}}}}
model: {{path: {model}}}
data:
  train: {{sums: {{dataset: "toy:addition", options: {{part: train, pairs: 2}}, columns: {{ability: null}}}}}}
  validation:
    sums: {{dataset: "toy:addition", options: {{part: validation, largest: 39, pairs: 1}}, columns: {{ability: null}}}}
batch: {{rows_per_update: 16, max_prompt_tokens: 16, max_response_tokens: 8}}
actor: {{parallel: {{tp: 2}}, dtype: float32, max_tokens_per_device: 256, optimizer: {{lr: 1e-3}}}}
training: {{steps: 4, save_every: 2, keep: 9}}
validation: {{every: 2, keep_best: true}}
"""
KINDS = {
    "rm": "reward: {centering: 0.01}\n",
    "dpo": "preference: {loss: conservative, smoothing: 0.1, sft_weight: 0.2}\n",
    "kto": "preference: {loss: kto, beta: 0.5, undesirable_weight: 0.8}\n",
    "once": "preference: {loss: conservative, smoothing: 0.1, sft_weight: 0.2, reference: once}\n",
}
of_each_kind = pytest.mark.parametrize(
    "kind", ["dpo", *(pytest.param(kind, marks=pytest.mark.on_demand) for kind in ("rm", "kto", "once"))]
)
VERBS = {"rm": "rm", "dpo": "dpo", "kto": "dpo", "once": "dpo"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ranked")
    text = CONFIG.format(directory=directory, model=make_model(directory / "model", seed=1))
    for kind, section in KINDS.items():
        (directory / f"{kind}.yaml").write_text(text + section)
    return directory


def trained(directory: Path, kind: str) -> Path:
    """Return the run of a kind, which is trained when a test first needs it."""
    run = directory / kind
    if not run.exists():
        run_mrl(VERBS[kind], str(directory / f"{kind}.yaml"), f"run.name={kind}", "training.record.every=1")
    return run


@pytest.mark.slow
@of_each_kind
def test_a_run_and_the_same_run_resumed(directory: Path, kind: str) -> None:
    """To the bit, with the reference of a policy that has moved: that is the model before training."""
    config, whole = str(directory / f"{kind}.yaml"), untimed(trained(directory, kind))
    assert [line["step"] for line in whole] == [0, 1, 2, 3, 4]
    again = directory / f"{kind}-again"
    shutil.copytree(directory / kind, again)
    shutil.rmtree(again / "checkpoints" / "step-000004")
    shutil.rmtree(again / "model")
    (again / "checkpoints" / "best").write_text("step-000002")
    printed = run_mrl(VERBS[kind], config, f"run.name={kind}-again")
    assert f"resumed from {again / 'checkpoints' / 'step-000002'}" in printed
    assert untimed(directory / f"{kind}-again") == whole
    assert whole[0]["val/accuracy"] == 0.5, "nothing is preferred yet"
    assert whole[1]["accuracy"] == 0.5
    assert whole[-1]["val/loss"] != whole[2]["val/loss"]
    assert "prompts with their responses" not in printed, "a reference that is computed once is not computed twice"


@pytest.mark.slow
@pytest.mark.on_demand
@of_each_kind
def test_a_recorded_update_is_made_again_in_two_layouts(directory: Path, kind: str) -> None:
    """From the checkpoint of step 2: to the bit in the layout of the run, within rounding in another."""
    run = str(trained(directory, kind))
    printed = run_mrl("replay", run, "--step", "4", "--exact")
    assert "step 4: equal, bit for bit" in printed
    other = run_mrl("replay", run, "--step", "4", "actor.parallel.tp=1")
    assert "step 4: equal within rounding" in other
    wrong = run_mrl("replay", run, "--step", "3", "actor.optimizer.lr=2e-3", exit_code=3)
    assert "the first difference is in phase update 1 of the actor: lr" in wrong


@pytest.mark.slow
@pytest.mark.on_demand
def test_a_reference_that_is_computed_once_is_the_one_in_place(directory: Path) -> None:
    """To the bit, in training and in validation."""
    assert untimed(trained(directory, "once")) == untimed(trained(directory, "dpo"))
    once, in_place = ((directory / kind / "model" / "model.safetensors").read_bytes() for kind in ("once", "dpo"))
    assert once == in_place
    assert (directory / "once" / "reference.bin").stat().st_mode & 0o777 == 0o600
    assert not (directory / "dpo" / "reference.bin").exists()


def held_pairs() -> list[tuple[str, str, str]]:
    rows = addition("validation", largest=39, pairs=1)
    return [
        (row["prompt"][0]["content"], row["chosen"], row["rejected"]) for row in (rows[at] for at in range(len(rows)))
    ]


@pytest.mark.slow
def test_an_exported_reward_model_says_elsewhere_what_it_said_here(directory: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(trained(directory, "rm") / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(directory / "rm" / "model")
    assert model.config.pad_token_id is not None
    assert model.config.pad_token_id != tokenizer.eos_token_id
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}], tokenize=False
        )
        for prompt, *answers in held_pairs()
        for answer in answers
    ]
    # The template adds a line break after the end of a turn, which no message contains.
    ids = [tokenizer(text.rstrip("\n"), add_special_tokens=False)["input_ids"] for text in texts]
    assert all(each[-1] == tokenizer.eos_token_id for each in ids)
    padded = tokenizer.pad({"input_ids": ids}, padding_side="right", return_tensors="pt")
    with torch.no_grad():
        scores = model(**padded).logits[:, 0].tolist()
    gaps = np.asarray(scores[::2]) - np.asarray(scores[1::2])
    last = untimed(directory / "rm")[-1]
    assert last["val/margin"] == pytest.approx(float(gaps.mean()), abs=1e-5)
    assert last["val/accuracy"] == pytest.approx(float((gaps > 0).mean()), abs=1e-9)
    assert last["val/score/std"] == pytest.approx(float(np.std(scores)), abs=1e-5)
    assert len(scores) > 100


def moved_by(trained: Path, before: Path) -> Callable[[str, str], float]:
    """Return a function of prompt and answer: by how much its log-prob has changed, by the models of transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (trained, before)]
    tokenizer = AutoTokenizer.from_pretrained(before)

    def moved(prompt: str, answer: str) -> float:
        messages = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        begin = tokenizer(text, add_special_tokens=False)["input_ids"]
        end = [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        sums = []
        for model in models:
            with torch.no_grad():
                of_next = model(torch.tensor([begin + end])).logits[0, :-1].log_softmax(-1)[-len(end) :]
            sums.append(float(of_next.gather(1, torch.tensor(end)[:, None]).sum()))
        return sums[0] - sums[1]

    return moved


@pytest.mark.slow
def test_what_a_policy_prefers_is_what_transformers_says(directory: Path) -> None:
    moved = moved_by(trained(directory, "dpo") / "model", directory / "model")
    gaps = [0.1 * (moved(prompt, chosen) - moved(prompt, rejected)) for prompt, chosen, rejected in held_pairs()]
    last = untimed(directory / "dpo")[-1]
    assert last["val/margin"] == pytest.approx(float(np.mean(gaps)), abs=1e-5)
    assert last["val/accuracy"] == pytest.approx(float(np.mean(np.asarray(gaps) > 0)), abs=1e-9)


@pytest.mark.slow
@pytest.mark.on_demand
def test_what_a_policy_learned_from_labels_is_what_transformers_says(directory: Path) -> None:
    """The loss of each response, and the baseline of each prompt with the response to the next one."""
    moved, metrics = moved_by(trained(directory, "kto") / "model", directory / "model"), untimed(directory / "kto")
    answers = [(prompt, answer, answer == good) for prompt, good, bad in held_pairs() for answer in (good, bad)]
    nexts = [answers[(number // 2 * 2 + 2) % len(answers)][1] for number in range(len(answers))]
    baseline = max(0.0, float(np.mean([moved(row[0], other) for row, other in zip(answers, nexts, strict=True)])))
    ratios = np.array([moved(prompt, answer) for prompt, answer, _ in answers])
    signs, weights = np.array([(1, 1.0) if is_good else (-1, 0.8) for *_, is_good in answers]).T
    losses = weights / (1 + np.exp(0.5 * signs * (ratios - baseline)))
    assert metrics[1]["kl_baseline"] == 0, "the policy has not moved before its first update"
    assert metrics[1]["loss"] == pytest.approx(0.45)
    assert metrics[-1]["val/kl_baseline"] == pytest.approx(baseline, abs=1e-5)
    assert metrics[-1]["val/loss"] == pytest.approx(float(losses.mean()), abs=1e-5)
    assert metrics[-1]["val/accuracy"] == pytest.approx(float(np.mean(signs * (ratios - baseline) > 0)), abs=1e-9)
