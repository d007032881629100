"""`mrl eval` before anything starts: measurements, their settings, and refused settings."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mrl.cli import eval as verb
from mrl.config.resolved.load import load_config
from mrl.errors import CheckpointError, ConfigError, SetupError

CONFIG = """\
run: {name: it, dir: runs}
cluster: {devices_per_node: 2, device: cpu}
placement: {pools: {all: 2}, roles: {actor: all}}
model: {path: model}
algorithm: {advantage: grpo}
batch: {prompts_per_step: 8, samples_per_prompt: 4, samples_per_update: 16}
actor: {max_tokens_per_device: 128}
rollout: {max_prompt_tokens: 16, max_response_tokens: 8}
data: {train: {sums: {dataset: "toy:addition"}}, validation: {held: {dataset: "toy:addition"}}}
reward: {functions: {right: {name: digits}}}
training: {steps: 3}
validation: {every: 5, samples_per_prompt: 4, temperature: 0.6, top_k: 20, keep_best: true}
"""


@pytest.fixture
def parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., argparse.Namespace]:
    """Return the parsed arguments of a command line, in a directory with a configuration."""
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(CONFIG)
    Path("model").mkdir()
    sizes = {"num_hidden_layers": 6, "num_attention_heads": 12, "num_key_value_heads": 2}
    Path("model", "config.json").write_text(json.dumps(sizes))

    def parse(*words: str) -> argparse.Namespace:
        parser = argparse.ArgumentParser()
        verb.add_arguments(parser)
        return parser.parse_intermixed_args(words)

    return parse


def sampling(arguments: argparse.Namespace) -> list[tuple[Any, ...]]:
    """Return the sampling settings of each measurement."""
    file, given = verb._source(arguments, is_run=False)
    sections = [load_config(file, [*given, *each]).config.validation for each in verb._choices(arguments)]
    return [(each.greedy, each.temperature, each.top_k, each.samples_per_prompt, each.k) for each in sections]


def test_without_a_word_it_is_the_runs_own_validation(parsed: Callable[..., argparse.Namespace]) -> None:
    assert sampling(parsed("run.yaml")) == [(False, 0.6, 20, 4, [])]


def test_temperatures_and_k_are_measured_one_by_one(parsed: Callable[..., argparse.Namespace]) -> None:
    """At temperature 0 there is one response for any k; an override applies to all measurements."""
    settings = sampling(parsed("run.yaml", "--temperatures", "0,0.5,1", "--k", "8,1", "validation.top_k=7"))
    assert settings == [(True, 1.0, 0, 1, []), (False, 0.5, 7, 8, [8, 1]), (False, 1.0, 7, 8, [8, 1])]


def test_a_model_is_measured_by_a_configuration(parsed: Callable[..., argparse.Namespace]) -> None:
    file, given = verb._source(parsed("model", "--config", "run.yaml", "training.seed=3"), is_run=False)
    config = load_config(file, given).config
    assert (config.model.path, config.training.seed) == ("model", 3)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["model"], "model is a model without a configuration to evaluate it with"),
        (["run.yaml", "--config", "run.yaml"], "--config is only for a model, but run.yaml has its own configuration"),
        (["run.yaml", "--checkpoint", "best"], "--checkpoint needs a run, but run.yaml is not a run"),
        (["run.yaml", "--temperatures", "warm"], '--temperatures "warm" is not a list of numbers'),
    ],
)
def test_what_cannot_be_meant_is_said(words: list[str], what: str, parsed: Callable[..., argparse.Namespace]) -> None:
    with pytest.raises(SetupError) as caught:
        sampling(parsed(*words))
    assert caught.value.what == what


def test_it_needs_prompts_and_a_reward_for_validation(parsed: Callable[..., argparse.Namespace]) -> None:
    with pytest.raises(ConfigError, match=r"data\.validation has no source"):
        sampling(parsed("run.yaml", "data.validation.held=null"))


def test_adapters_of_another_model_are_refused_before_anything_is_measured(
    parsed: Callable[..., argparse.Namespace],
) -> None:
    Path("adapter").mkdir()
    held = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "base_model_name_or_path": "maker/other"}
    Path("adapter", "adapter_config.json").write_text(json.dumps(held))
    Path("adapter", "adapter_model.safetensors").touch()
    resolved = load_config("run.yaml", [])
    with pytest.raises(SetupError, match="adapter belongs to the model maker/other, not to model"):
        verb._merge(resolved, "adapter", Path("out"))
    Path("runs", "it").mkdir(parents=True)
    Path("runs", "it", "config.yaml").write_text(CONFIG)
    with pytest.raises(SetupError, match="--adapter needs a model or a configuration, but runs/it is a run"):
        verb.run(parsed("runs/it", "--adapter", "adapter"))


@pytest.mark.needs
def test_a_run_without_a_checkpoint_leaves_nothing_behind(parsed: Callable[..., argparse.Namespace]) -> None:
    run = Path("runs", "it")
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text(CONFIG)
    with pytest.raises(CheckpointError, match='no checkpoint "latest"'):
        verb.run(parsed(str(run)))
    assert list(Path("runs").iterdir()) == [run]


def test_the_logs_of_what_failed_stay(tmp_path: Path) -> None:
    def work() -> None:
        with verb._private_directory(tmp_path / "runs") as directory:
            (directory / "model").mkdir()
            (directory / "logs" / "rank-0.log").write_text("it died")
            raise SetupError("a worker died")

    with pytest.raises(SetupError):
        work()
    (directory,) = (tmp_path / "runs").iterdir()
    assert [path.name for path in directory.rglob("*")] == ["logs", "rank-0.log"]


def test_the_table_has_a_row_for_each_temperature_and_source() -> None:
    sampled = {"val/a/b/prompts": 2.0, "val/a/b/score/mean@8": 0.25, "val/prompts": 2.0, "val/score/mean@8": 0.25}
    sampled |= {"val/score/mean@8/low": 0.125, "val/score/mean@8/high": 0.5}
    greedy = {"val/a/b/prompts": 2.0, "val/a/b/score/mean@1": 0.5, "val/prompts": 2.0, "val/score/mean@1": 0.5}
    results = [
        {"sampling": {"greedy": False, "temperature": 0.6}, "figures": sampled},
        {"sampling": {"greedy": True, "temperature": 1.0}, "figures": greedy},
    ]
    assert list(verb._table(results)) == [
        ["temperature", "source", "prompts", "score/mean@8", "score/mean@1"],
        ["0.6", "a/b", "2", "0.25", "-"],
        ["0.6", "all", "2", "0.25 (0.125 to 0.5)", "-"],
        ["greedy", "a/b", "2", "-", "0.5"],
        ["greedy", "all", "2", "-", "0.5"],
    ]


@pytest.mark.parametrize(("output", "why"), [("none/eval.json", "No such file"), ("model", "Is a directory")])
def test_figures_that_cannot_be_written_are_refused_before_anything_is_measured(
    output: str, why: str, parsed: Callable[..., argparse.Namespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verb, "_evaluate", lambda *_: pytest.fail("it is measured"))
    with pytest.raises(SetupError) as caught:
        verb.run(parsed("run.yaml", "--output", output))
    assert str(caught.value).startswith(f"{output}: cannot write the metrics: {why}")
    assert "fix: --output FILE" in str(caught.value)


def test_each_setting_stands_by_its_own_figures(
    parsed: Callable[..., argparse.Namespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file gets the same numbers as the screen. An existing file is replaced only at the end."""
    Path("eval.json").write_text("old")

    def evaluate(chosen: Any, directory: Path, model: Path | None) -> list[dict[str, float]]:
        assert Path("eval.json").read_text() == "old"
        return [{"val/score/mean@1": float(each.config.validation.temperature)} for each in chosen]

    monkeypatch.setattr(verb, "_evaluate", evaluate)
    assert verb.run(parsed("run.yaml", "--temperatures", "0.5,0,2", "--k", "1,4")) == 0
    results = json.loads(Path("eval.json").read_text())["results"]
    found = [(each["sampling"]["greedy"], each["sampling"]["temperature"], each["figures"]) for each in results]
    assert found == [(greedy, at, {"val/score/mean@1": at}) for greedy, at in ((False, 0.5), (True, 1.0), (False, 2.0))]
    assert [each["sampling"]["samples_per_prompt"] for each in results] == [4, 1, 4]
