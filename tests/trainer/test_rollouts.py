"""`mrl rollout`: samples without training, and the files that `mrl sft`, `mrl dpo` and `mrl rm` read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from mrl.cli import rollout
from mrl.cli.main import main
from mrl.config.data import ColumnsConfig
from mrl.config.reward import RewardConfig, RewardFunctionConfig
from mrl.config.schema import PlacementConfig
from mrl.config.sft import SftBatchConfig
from mrl.data.learned_rows import read_answered, read_ranked
from mrl.rewards.outcome import Failure, Outcome, Score
from mrl.rewards.sample import Sample
from mrl.rollout.requests import GenerationRequest, Sampling
from mrl.trainer import evaluation, rollouts
from mrl.trainer.rollouts import best_rows, pairs
from tests.trainer.fakes import END, Hybrid, Rewards, Tokenizer, make_config, resolved
from tests.trainer.test_validation import Rows


def row(uid: str, score: float, response: str, *, truncated: bool = False) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"question {uid}"}]
    return {
        "uid": uid,
        "score": score,
        "response": response,
        "truncated": truncated,
        "messages": messages,
        "data_source": "sums",
    }


ROWS = [
    row("a", 0.0, "no"),
    row("a", 1.0, "yes"),
    row("a", 1.0, "yes, too"),
    row("b", 0.5, "half"),
    row("b", 0.5, "other half"),
    row("c", 1.0, "cut off", truncated=True),
    row("c", 0.9, "   "),
    row("d", 0.25, "low"),
    row("d", 0.0, "lower"),
]


def test_the_best_sample_of_each_prompt_is_kept_above_a_score() -> None:
    kept = best_rows(ROWS, 0.5)
    assert [(best["prompt"][0]["content"], best["reward_model"]["ground_truth"]) for best in kept] == [
        ("question a", "yes"),
        ("question b", "half"),
    ]
    assert len(best_rows(ROWS, 0.0)) == 3, "what was cut off or blank is no answer"


def test_pairs_have_the_best_and_the_worst_sample() -> None:
    found = [(pair["chosen"], pair["rejected"], pair["margin"]) for pair in pairs(ROWS, 0.0)]
    assert found == [("yes", "no", 1.0), ("low", "lower", 0.25)]
    assert [pair["chosen"] for pair in pairs(ROWS, 0.25)] == ["yes"]


@contextmanager
def nothing(*_: Any, **__: Any) -> Iterator[Any]:
    yield {}


class Engines(Hybrid):
    def close(self) -> None:
        self.journal.append("closed")


class Scores(Rewards):
    def __enter__(self) -> Scores:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def score(sample: Sample) -> Outcome:
    """The number of the sample; the third sample of the first prompt fails."""
    number = int(sample.response)
    return Failure("raised", "no reward", 0.0) if number == 2 else Score(number / 10, {}, 0.0)


@pytest.fixture
def hybrid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engines:
    """Engines and rewards are fakes: sample k of prompt n says 10 x n + k."""

    def answer(request: GenerationRequest, sampling: Sampling) -> list[int]:
        assert sampling.temperature == 0.7
        return [10 * (int(request.prompt_ids[0]) - 10) + int(request.key) % 4, END]

    engines, rewards = Engines([], answer), Scores(score)
    stand_ins: dict[str, Any] = {
        "HybridEngine": lambda *_, **__: engines,
        "manager_class": lambda reward: lambda *_, **__: rewards,
        "load_tokenizer": lambda *_, **__: Tokenizer(),
        "check_model": lambda *_: None,
        "placed_run": nothing,
        "model_probe": nothing,
        "started_groups": nothing,
        "with_models": lambda *_: {},
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(evaluation, name, stand_in)
    monkeypatch.setattr(rollouts, "open_dataset", lambda *_, **__: Rows(5))
    config = make_config(
        tmp_path,
        model={"path": str(tmp_path)},
        batch={"samples_per_prompt": 4},
        placement=PlacementConfig(pools={"all": 4}, roles={"actor": "all"}),
        reward=RewardConfig(functions={"rule": RewardFunctionConfig(name="gsm8k")}),
        validation={"solved_at": 1.2},
    )
    monkeypatch.setattr(rollout, "load_config", lambda *_: resolved(config))
    monkeypatch.setattr(rollout, "settle_models", lambda found: found)
    return engines


def test_files_that_the_other_verbs_read(tmp_path: Path, hybrid: Engines, capsys: pytest.CaptureFixture[str]) -> None:
    """Three prompts in steps of two, with four samples each."""
    out = tmp_path / "samples"
    assert main(["rollout", "run.yaml", "--prompts", "3", "-o", str(out)]) == 0
    assert [len(asked) for asked in hybrid.requests] == [8, 4]
    assert hybrid.journal[-1] == "closed", "before reward models need the devices"
    figures = json.loads((out / "rollout.json").read_text())
    assert (figures["prompts"], figures["samples"], figures["samples_without_score"]) == (3, 11, 1)
    assert figures["tokens_per_s"] == pytest.approx(22 / figures["seconds"])
    assert figures["tokens_per_s_and_device"] == pytest.approx(figures["tokens_per_s"] / 4)
    samples = pq.read_table(out / "samples.parquet").to_pylist()
    assert [sample["response"] for sample in samples] == ["0", "1", "3", *map(str, (10, 11, 12, 13, 20, 21, 22, 23))]
    assert [sample["score"] for sample in samples][:3] == [0.0, 0.1, 0.3]
    columns, sizes = (
        ColumnsConfig(ability=None, extra_info=None),
        SftBatchConfig(rows_per_update=1, max_prompt_tokens=9, max_response_tokens=9),
    )
    best = pq.read_table(out / "best.parquet").to_pylist()
    answered = [read_answered(sizes, columns, "best", raw, "here") for raw in best]
    assert [found.ground_truth for found in answered] == ["13", "23"]
    assert answered[0].messages[0]["content"] == "?"
    ranked = [read_ranked(columns, "pairs", raw, "here") for raw in pq.read_table(out / "pairs.parquet").to_pylist()]
    assert [[message["content"] for message in found.said] for found in ranked] == [
        ["3", "0"],
        ["13", "10"],
        ["23", "20"],
    ]
    said = capsys.readouterr().out
    assert f'data.train.pairs={{dataset: "{out}/pairs.parquet", columns: {{ability: null, extra_info: null}}}}' in said


def test_without_a_good_sample_no_file_is_written(
    tmp_path: Path, hybrid: Engines, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "samples"
    assert main(["rollout", "run.yaml", "--least", "99", "--margin", "9", "-o", str(out)]) == 0
    assert sorted(path.name for path in out.glob("*.parquet")) == ["samples.parquet"]
    said = capsys.readouterr().out
    assert "best.parquet is not written: no prompt has such samples" in said
    assert "pairs.parquet is not written: no prompt has such samples" in said
    assert sum(map(len, hybrid.requests)) == 20, "all prompts"


def test_a_directory_that_exists_and_no_prompts_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollout", "run.yaml", "-o", str(tmp_path)]) == 2
    assert f"-o {tmp_path} exists" in capsys.readouterr().err
    assert main(["rollout", "run.yaml", "--prompts", "0", "-o", str(tmp_path / "new")]) == 2
    assert "--prompts 0" in capsys.readouterr().err
