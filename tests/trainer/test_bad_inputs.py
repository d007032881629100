"""Errors of `mrl train` for runs that cannot work: before it requests a device, in one message, without a traceback.

Each case takes a run that would work and breaks one thing.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mrl.cli.main import main
from mrl.controller import cluster
from mrl.demo.model import make_model
from mrl.errors import PlacementError
from mrl.trainer import nodes
from tests.trainer.test_ppo import CONFIG

REACHED = "everything before the machines is in order"
Break = Callable[[], None]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("bad-inputs") / "model", seed=1)


@pytest.fixture(autouse=True)
def run_that_would_work(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(made, "model")
    Path("run.yaml").write_text(CONFIG.format(directory="runs", model="model"))

    def nobody_gets_here(*_: object) -> None:
        raise PlacementError(REACHED)

    monkeypatch.setattr(nodes, "ray_cluster", nobody_gets_here)
    monkeypatch.setattr(cluster, "ray_cluster_soon", lambda _: nullcontext())


def write(path: str, text: str | bytes) -> Break:
    def change() -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(text.encode() if isinstance(text, str) else text)

    return change


def json_with(path: str, **changes: object) -> Break:
    def change() -> None:
        values = json.loads(Path(path).read_text()) | changes
        Path(path).write_text(json.dumps({key: value for key, value in values.items() if value is not None}))

    return change


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Break:
    def apply() -> None:
        tensors = load_file("model/model.safetensors")
        change(tensors)
        save_file(tensors, "model/model.safetensors", {"format": "pt"})

    return apply


def remove(path: str) -> Break:
    return lambda: shutil.rmtree(path) if Path(path).is_dir() else Path(path).unlink()


def cut_short() -> None:
    path = Path("model/model.safetensors")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def scorer(change: Callable[[dict[str, torch.Tensor]], object] = lambda tensors: None, *others: Break) -> Break:
    """A reward model made from the policy, with these changes."""

    def make() -> None:
        shutil.copytree("model", "scorer")
        tensors = load_file("scorer/model.safetensors")
        del tensors[HEAD]
        tensors["score.weight"] = torch.ones(1, len(tensors[NORM]))
        change(tensors)
        save_file(tensors, "scorer/model.safetensors", {"format": "pt"})
        for other in others:
            other()

    return make


def tokens_swapped() -> None:
    path = Path("scorer/tokenizer.json")
    values = json.loads(path.read_text())
    vocab = values["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path.write_text(json.dumps(values))


def nothing() -> None:
    """The overrides alone make the case."""


HEAD, NORM = "lm_head.weight", "model.norm.weight"
SOURCE = "data.train={sums: null, mine: {dataset: rows.jsonl, columns: {ability: null, extra_info: null}}}"
REWARD_MODEL = ["reward_model={path: scorer, max_tokens_per_device: 64}", "placement.roles.reward_model=all"]
CASES: dict[str, tuple[Break, list[str], str]] = {
    "a run that would work": (nothing, [], REACHED),
    "no model directory": (remove("model"), [], 'model is not a directory, and "model" is not a name on the hub'),
    "no config.json": (remove("model/config.json"), [], "model/config.json"),
    "config.json is no JSON": (write("model/config.json", "{"), [], "is not JSON"),
    "another family": (json_with("model/config.json", model_type="gpt2"), [], "gpt2"),
    "a layer too many": (
        json_with("model/config.json", num_hidden_layers=3, layer_types=None),
        [],
        "tensors are not those of a qwen3",
    ),
    "weights cut short": (cut_short, [], "model.safetensors"),
    "a tensor is missing": (weights(lambda tensors: tensors.pop(NORM)), [], f"{NORM} is missing"),
    "tokenizer.json is no JSON": (write("model/tokenizer.json", "{"), [], "tokenizer.json: not JSON"),
    "no tokenizer": (remove("model/tokenizer.json"), [], "tokenizer"),
    "a broken chat template": (write("model/chat_template.jinja", "{% for %}"), [], "chat template"),
    "no data file": (nothing, [SOURCE], "rows.jsonl"),
    "an unknown reward": (nothing, ["reward.functions.answer.name=gsm9k"], "gsm8k"),
    "a reward option that does not exist": (
        nothing,
        ["reward.functions.answer={name: gsm8k, options: {strict: 1}}"],
        "strict",
    ),
    "a reward model that works": (scorer(), REWARD_MODEL, REACHED),
    "a reward model without a head": (scorer(lambda t: t.pop("score.weight")), REWARD_MODEL, "score.weight is missing"),
    "a reward model of other tokens": (scorer(lambda t: None, tokens_swapped), REWARD_MODEL, REACHED),
    "a reward model of other tokens without a template": (
        scorer(lambda t: None, tokens_swapped, remove("scorer/chat_template.jinja")),
        REWARD_MODEL,
        "the tokenizer has no chat template",
    ),
    "run.dir under a file": (write("runs", ""), [], "runs"),
    "something else in the run directory": (write("runs/small/thesis.txt", "x"), [], "this directory is not empty"),
    "a checkpoint without a manifest": (write("runs/small/checkpoints/step-000003/x", ""), [], REACHED),
}


@pytest.mark.parametrize("case", CASES)
def test_what_it_says(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    change, overrides, message = CASES[case]
    change()
    capsys.readouterr()
    assert main(["train", "run.yaml", "--quiet", *overrides]) in (1, 2)
    said = capsys.readouterr().err
    assert message in said, said
    assert "Traceback" not in said
    assert (REACHED in said) == (message == REACHED), said


def test_two_processes_in_one_run(capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs/small").mkdir(parents=True)
    lock = os.open("runs/small/.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        assert main(["train", "run.yaml", "--quiet"]) == 2
    finally:
        os.close(lock)
    assert "another process is running this run" in capsys.readouterr().err
