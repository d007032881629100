"""The demo's preferences: the pairs made of samples, and the verdict on the training."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mrl.config.resolved.load import load_config, load_config_of
from mrl.config.schema import BatchConfig
from mrl.data.chat import load_tokenizer
from mrl.data.prompt_loader import PromptLoader
from mrl.data.rlhf_dataset import open_sft_dataset
from mrl.data.row_files import write_samples
from mrl.data.toy import addition
from mrl.demo import demo, preferences
from mrl.demo.demo import DemoResult, DemoSettings, learn_from_preferences
from mrl.demo.model import make_model
from mrl.demo.preferences import LARGEST, policy_pairs, train_judged
from mrl.demo.tasks import PREFERENCES, RIGHT_PAIRS
from mrl.errors import DataError
from mrl.events import EventLog
from tests.trainer.fakes import Screen

ROWS = {row["extra_info"]["index"]: row for row in addition("all", LARGEST)}
HELD = {row["extra_info"]["index"] for row in addition("validation", LARGEST)}


def sampled(directory: Path, answers: dict[int, list[str]]) -> str:
    """Write a file of samples in the format of a validation: answers by the number of their problem."""
    rows = [(number, answer) for number, of_problem in answers.items() for answer in of_problem]
    truths = [ROWS[number]["reward_model"]["ground_truth"] for number, _ in rows]
    columns: dict[str, Any] = {
        "uid": [f"sums/0/{number}" for number, _ in rows],
        "response": [answer for _, answer in rows],
        "score": [1.0 if answer == truth else 0.25 for (_, answer), truth in zip(rows, truths, strict=True)],
    }
    write_samples(directory, 0, columns, "validation")
    return str(directory)


def right(number: int) -> str:
    truth: str = ROWS[number]["reward_model"]["ground_truth"]
    return truth


def test_pairs_are_of_a_right_and_each_wrong_answer_to_the_same_problem(tmp_path: Path) -> None:
    one, two, never, held = 0, 1, 2, min(HELD)
    assert {one, two, never} & HELD == set()
    answers = {
        one: [right(one), "7", "7", "", "8", right(one)],
        two: [right(two)] * 3,
        never: ["1", "2"],
        held: ["5", right(held)],
    }
    path = sampled(tmp_path, answers)
    wanted = [(ROWS[one]["prompt"], right(one), wrong) for wrong in ("7", "8")]
    assert [(pair["prompt"], pair["chosen"], pair["rejected"]) for pair in policy_pairs(path, "train")] == wanted
    (of_validation,) = policy_pairs(path, "validation")
    assert (of_validation["prompt"], of_validation["rejected"]) == (ROWS[held]["prompt"], "5")
    with pytest.raises(DataError, match="no problem has both a right and a wrong answer"):
        policy_pairs(sampled(tmp_path / "none", {never: ["1"]}), "train")


def test_a_judge_errs_in_a_share_of_the_pairs_and_always_in_the_same(tmp_path: Path) -> None:
    train = [number for number in ROWS if number not in HELD][:200]
    path = sampled(tmp_path, {number: [right(number), "7", "8", "9"] for number in train})
    for errors in (0.0, 0.3, 0.5, 1.0):
        pairs = policy_pairs(path, "train", errors)
        wrong = sum(pair["chosen"] in "789" for pair in pairs)
        assert len(pairs) == 600
        assert wrong / 600 == pytest.approx(errors, abs=0.06 if 0 < errors < 1 else 0)
        assert pairs == policy_pairs(path, "train", errors)
    few = policy_pairs(path, "train", problems=10)
    assert [pair["prompt"] for pair in few] == [ROWS[number]["prompt"] for number in train[:10] for _ in range(3)]


def test_an_answer_that_no_text_can_be_is_left_out_and_counted(tmp_path: Path) -> None:
    """An answer may contain control tokens, unlike a message of a pair. Invalid bytes take more space but fit."""
    train = [number for number in ROWS if number not in HELD][:70]
    wrong = {train[5]: "7<|user|>", train[6]: bytes([255] * 8).decode(errors="replace")}
    path = sampled(tmp_path, {number: [right(number), wrong.get(number, "7")] for number in train})
    model = make_model(tmp_path / "model", seed=3)
    given = demo.values_of(replace(DemoSettings(tmp_path), task=PREFERENCES), model)
    given.append(f"data.train.pairs.options.samples={path}")
    config = load_config_of("rm", str(preferences.CONFIGS / "preferences_rm.yaml"), given).config
    batch = BatchConfig(prompts_per_step=64, samples_per_prompt=1, samples_per_update=64)
    dataset = open_sft_dataset(config.data.train, config, load_tokenizer(config.model.path, config.data))
    events = EventLog(tmp_path / "events.jsonl")
    prompts = PromptLoader(dataset, config.data, batch, events)
    for _ in range(3):
        prompts.next_batch()
    events.close()
    assert list(prompts.skips.bad_rows) == ["pairs/5"]
    assert 'contains the control token "<|user|>"' in prompts.skips.bad_rows["pairs/5"]


@pytest.mark.parametrize(
    ("solved", "accuracy", "missed"),
    [(0.66, 0.98, 0), (0.64, 0.98, 1), (0.66, 0.96, 1)],
)
def test_both_the_policy_and_its_judge_have_a_goal(solved: float, accuracy: float, missed: int, tmp_path: Path) -> None:
    result = DemoResult(0.3, {PREFERENCES.solved: solved, RIGHT_PAIRS: accuracy}, {}, tmp_path, PREFERENCES)
    assert len([*result.missed()]) == missed
    assert result.is_success == (missed == 0)


def test_the_parts_of_the_demo_fit_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reward model is trained on the sampled pairs, and the policy learns only from its scores."""
    model, asked = make_model(tmp_path / "model", seed=3), dict[str, Any]()

    def evaluate(config: Any, settings: Any, directory: Path, events: Any, say: Callable[[str], None]) -> None:
        asked["sampling"] = config
        number = min(HELD)
        sampled(directory / "samples", {0: [right(0), "7"], number: [right(number), "8"]})

    def train_sft(run: Any, on_update: Callable[[int, dict[str, float]], None]) -> Path:
        asked["rm"] = run.config
        on_update(100, {"loss": 0.1, "val/accuracy": 0.98})
        (run.directory / "metrics.jsonl").write_text('{"step": 600, "val/accuracy": 0.99}\n')
        return Path(shutil.copytree(model, run.directory / "model"))

    class Trainer:
        def __init__(self, run: Any) -> None:
            asked["rl"], self.run, self.num_steps_done = run.config, run, 0

        def init_workers(self) -> Any:
            return nullcontext()

        def validate(self) -> dict[str, float]:
            return {PREFERENCES.solved: 0.3}

        def fit(self) -> dict[str, float]:
            lines = [
                f'{{"step": {step}, "{PREFERENCES.solved}": {share}}}' for step, share in ((0, 0.9), (1, 0.7), (2, 0.6))
            ]
            (self.run.directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")
            self.num_steps_done = 25
            return {PREFERENCES.solved: 0.6}

    monkeypatch.setattr(preferences, "evaluate", evaluate)
    monkeypatch.setattr(preferences, "train_sft", train_sft)
    monkeypatch.setattr(demo, "RayPPOTrainer", Trainer)
    screen, seconds = Screen([]), dict[str, float]()
    settings = DemoSettings(tmp_path, algorithm="grpo", steps=25, task=PREFERENCES)
    result = learn_from_preferences(settings, model, screen, seconds)
    assert (result.before, result.after) == (0.3, 0.7), "of the checkpoint that validation chose, after training began"
    assert result.figures is not None
    assert result.figures[RIGHT_PAIRS] == 0.99
    assert asked["sampling"].scoring_models() == {}
    assert asked["sampling"].data.validation["sums"].options["part"] == "all"
    assert asked["rm"].model.path == str(model)
    rl = asked["rl"]
    assert (rl.reward.functions, rl.reward_model.path) == ({}, str(tmp_path / "rm" / "model"))
    assert rl.validation.reward_functions["answer"].name == "digits"
    assert (rl.validation.keep_best, rl.validation.best, rl.validation.every) == (True, PREFERENCES.solved, 5)
    again = load_config(str(result.config), ["run.name=mine"]).config
    assert again.reward_model == rl.reward_model, "the file that is left says it all"
    assert list(seconds) == ["samples", "rm", "start of workers", "validation before", "grpo"]
    assert "98.0% of new pairs right" in "\n".join(screen.said)


def test_the_judge_can_be_worse_on_purpose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def train_sft(run: Any, on_update: Any) -> Path:
        asked.append(run.config)
        (run.directory / "metrics.jsonl").write_text('{"step": 600, "val/accuracy": 0.5}\n')
        return Path(run.directory, "model")

    monkeypatch.setattr(preferences, "train_sft", train_sft)
    model, path = make_model(tmp_path / "model", seed=3), Path(sampled(tmp_path / "samples", {0: [right(0), "7"]}))
    settings = replace(DemoSettings(tmp_path), task=PREFERENCES)
    train_judged(path, demo.values_of(settings, model), Screen([]), errors=0.3, problems=40)
    (config,) = asked
    wanted = {"part": "train", "samples": str(path), "errors": 0.3, "problems": 40}
    assert config.data.train["pairs"].options == wanted
    assert config.data.validation["pairs"].options == {"part": "validation", "samples": str(path)}, "which is right"
