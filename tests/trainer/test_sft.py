"""`mrl sft` like a user runs it: trained, stopped and resumed, on real ranks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from mrl.cli.main import main
from mrl.demo.model import make_model
from mrl.errors import EXIT_STOPPED
from mrl.observe.metrics import read_metrics
from tests.apart import MAIN, ROOT
from tests.trainer.test_ppo import process_with, wait_until

CONFIG = """\
run: {{name: run, dir: {directory}}}
cluster: {{devices_per_node: 2, device: cpu}}
placement: {{pools: {{all: 2}}, roles: {{actor: all}}}}
model: {{path: {model}}}
data:
  train: {{sums: {{dataset: {directory}/train.jsonl, columns: {columns}}}}}
  validation: {{held: {{dataset: {directory}/held.jsonl, columns: {columns}}}}}
batch: {{rows_per_update: 16, max_prompt_tokens: 16, max_response_tokens: 24, messages: talk, loss_on: all}}
actor:
  dtype: float32
  max_tokens_per_device: 256
  optimizer: {{lr: 1e-3}}
  schedule: {{warmup_steps: 2, decay: linear, decay_steps: 40}}
training: {{steps: 40, save_every: 15}}
validation: {{every: 15}}
"""
COLUMNS = "{data_source: null, ability: null, extra_info: null}"
RUNS = ("whole", "resumed")


def write_talks(file: Path, first: int, num: int) -> None:
    """Conversations of two sums each."""
    with file.open("w") as written:
        for number in range(first, first + num):
            a, b = divmod(number, 10)
            texts = [f"{a}+{b}=", f"{a + b}", f"+{b}=", f"{a + 2 * b}"]
            roles = ("user", "assistant") * 2
            talk = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
            written.write(json.dumps({"talk": talk}) + "\n")


def started(config: Path, name: str, *overrides: str) -> subprocess.Popen[str]:
    """Run in a separate process, like a user: the test process may have joined a Ray already."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    return subprocess.Popen(
        [sys.executable, "-c", MAIN, "sft", str(config), f"run.name={name}", *overrides],
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


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories of a complete run, and of a run that was stopped after some updates."""
    directory = tmp_path_factory.mktemp("sft")
    config, model = directory / "sft.yaml", make_model(directory / "initial", seed=1)
    config.write_text(CONFIG.format(directory=directory, model=model, columns=COLUMNS))
    write_talks(directory / "train.jsonl", 0, 60)
    write_talks(directory / "held.jsonl", 60, 21)
    whole = started(config, "whole")
    printed, _ = whole.communicate(timeout=300)
    assert whole.returncode == 0, printed

    run = started(config, "stopped")
    assert run.stdout is not None
    for line in run.stdout:
        if line.startswith("1/40"):
            run.send_signal(signal.SIGTERM)
            break
    printed, _ = run.communicate(timeout=300)
    assert run.returncode == EXIT_STOPPED, printed
    done = last_step(directory / "stopped")
    assert 1 <= done < 40
    assert f"SIGTERM: saving and stopping\nstopped after {done} updates; run the same command to resume\n" in printed
    assert not (directory / "stopped" / "model").exists()
    return directory


def written_by_transformers(model: Path, held: Path) -> list[dict[str, Any]]:
    """Return a model's greedy answers to the first questions of a file, token by token."""
    tokenizer, generator = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    written = []
    for line in held.read_text().splitlines()[:4]:
        question, answer, *_ = json.loads(line)["talk"]
        prompt = tokenizer.apply_chat_template([question], add_generation_prompt=True, tokenize=False)
        ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
        out = generator.generate(ids, do_sample=False, max_new_tokens=24, eos_token_id=tokenizer.eos_token_id)
        said = out[0, ids.shape[1] :].tolist()
        ended = said[-1] == tokenizer.eos_token_id
        written.append(
            {
                "prompt": prompt,
                "response": tokenizer.decode(said[:-1] if ended else said),
                "ground_truth": answer["content"],
                "num_tokens": len(said),
                "truncated": not ended,
            }
        )
    return written


def check_samples(directory: Path, run: str, step: int, model: Path) -> list[dict[str, Any]]:
    """Samples of a run's step are what transformers generates with this model."""
    file = directory / run / "samples" / f"validation-{step:06d}.parquet"
    rows: list[dict[str, Any]] = pq.read_table(file).to_pylist()
    assert [(row.pop("uid"), row.pop("data_source")) for row in rows] == [(f"held/0/{row}", "held") for row in range(4)]
    assert rows == written_by_transformers(model, directory / "held.jsonl")
    return rows


def last_step(run: Path) -> int:
    return int(read_metrics(run / "metrics.jsonl")[-1]["step"])


def go_on(directory: Path, name: str, *overrides: str) -> None:
    """Resume a copy of the run that was stopped."""
    shutil.copytree(directory / "stopped", directory / name)
    done = last_step(directory / name)
    resumed = started(directory / "sft.yaml", name, *overrides)
    printed, _ = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, printed
    assert f"resumed from {directory / name / 'checkpoints' / f'step-{done:06d}'}" in printed


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_to_the_same_model(stopped: Path) -> None:
    go_on(stopped, "resumed")
    figures, files, model = state_of(stopped / "resumed")
    expected_figures, expected_files, expected_model = state_of(stopped / "whole")
    assert figures == expected_figures
    assert files == expected_files
    assert model.keys() == expected_model.keys()
    assert all(bool((model[name] == tensor).all()) for name, tensor in expected_model.items())
    measured = {line["step"]: line["val/loss"] for line in figures if "val/loss" in line}
    assert measured.keys() == {0, 15, 30, 40}
    assert measured[40] < 0.7 * measured[0]
    samples = [{file.name: file.read_bytes() for file in (stopped / name / "samples").iterdir()} for name in RUNS]
    assert samples[0] == samples[1], "a resumed run writes what the whole one did, and nothing twice"
    assert samples[0].keys() == {f"validation-{step:06d}.parquet" for step in measured}
    before, after = (
        check_samples(stopped, "whole", step, model)
        for step, model in ((0, stopped / "initial"), (40, stopped / "whole" / "model"))
    )
    assert any(row["truncated"] for row in before)
    assert not any(row["truncated"] for row in after), "the model has learnt where an answer ends"
    assert main(["export", str(stopped / "whole"), str(stopped / "exported")]) == 0
    exported = load_file(stopped / "exported" / "model.safetensors")
    assert all(bool((exported[name] == tensor).all()) for name, tensor in expected_model.items())
    assert main(["export", str(stopped / "whole"), str(stopped / "before"), "--checkpoint=30"]) == 0
    exported = load_file(stopped / "before" / "model.safetensors")
    assert any(bool((exported[name] != tensor).any()) for name, tensor in expected_model.items())


@pytest.mark.slow
@pytest.mark.on_demand
def test_a_run_that_loses_a_rank_starts_itself_again(stopped: Path) -> None:
    run = started(stopped / "sft.yaml", "disturbed", "training.max_restarts=1")
    wait_until((stopped / "disturbed" / "checkpoints" / "step-000015").exists)
    os.kill(process_with(stopped / "disturbed" / "logs", "actor"), signal.SIGKILL)
    printed, _ = run.communicate(timeout=300)
    assert run.returncode == 0, printed
    assert "the run lost a worker or a node: restart 1 of 1, from step " in printed
    figures, files, _ = state_of(stopped / "disturbed")
    assert (figures, files) == state_of(stopped / "whole")[:2]


@pytest.mark.slow
@pytest.mark.on_demand
@pytest.mark.parametrize("parallel", ["{tp: 2, sequence_parallel: true}", "{pp: 2}", "{cp: 2}"])
def test_a_run_goes_on_in_another_layout(parallel: str, stopped: Path) -> None:
    """From two data-parallel ranks: the same rows, and what sums in another order make of them."""
    name = "in-" + "".join(letter for letter in parallel if letter.isalnum())
    go_on(stopped, name, f"actor.parallel={parallel}")
    figures, _, model = state_of(stopped / name)
    expected_figures, _, expected_model = state_of(stopped / "whole")
    for line, expected in zip(figures, expected_figures, strict=True):
        for figure in ("loss", "grad_norm", "val/loss", "val/held/loss"):
            assert (figure in line) == (figure in expected), figure
            if figure in line:
                assert line[figure] == pytest.approx(expected[figure], rel=2e-3, abs=1e-4), (figure, line["step"])
    for key, tensor in expected_model.items():
        assert float((model[key] - tensor).abs().max()) < 1e-3, key
    check_samples(stopped, name, 40, stopped / name / "model")
