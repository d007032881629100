"""Several settings of one `mrl eval`: each is sampled and counted as it was asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mrl.config.reward import RewardConfig, RewardFunctionConfig
from mrl.config.schema import PlacementConfig
from mrl.config.training import ValidationConfig
from mrl.events import EventLog
from mrl.rewards.outcome import Score
from mrl.rollout.requests import GenerationRequest, Sampling
from mrl.trainer import evaluation
from tests.trainer.fakes import END, Hybrid, Rewards, Tokenizer, make_config
from tests.trainer.test_validation import Rows


def test_each_setting_is_sampled_as_it_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines and rewards are fakes. The test covers the verb's own requests and results."""
    said: list[str] = []

    def answer(request: GenerationRequest, sampling: Sampling) -> list[int]:
        return [1 if sampling.temperature == 0.5 else 0, END]

    class Engines(Hybrid):
        def close(self) -> None:
            self.journal.append("closed")

    class Scores(Rewards):
        def __enter__(self) -> Scores:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    @contextmanager
    def nothing(*_: Any, **__: Any) -> Iterator[Any]:
        yield {}

    hybrid = Engines([], answer)
    rewards = Scores(lambda sample: Score(float(sample.response), {}, 0.0, sample.response))
    stand_ins: dict[str, Any] = {
        "HybridEngine": lambda *_, **__: hybrid,
        "manager_class": lambda reward: lambda *_, **__: rewards,
        "load_tokenizer": lambda *_, **__: Tokenizer(),
        "open_dataset": lambda *_, **__: Rows(3),
        "check_model": lambda *_: None,
        "placed_run": nothing,
        "model_probe": nothing,
        "started_groups": nothing,
        "with_models": lambda *_: {},
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(evaluation, name, stand_in)
    placement = PlacementConfig(pools={"all": 4}, roles={"actor": "all"})
    reward = RewardConfig(functions={"rule": RewardFunctionConfig(name="gsm8k")})
    base = ValidationConfig(every=1, save_samples=False, temperature=0.25)
    config = make_config(tmp_path, model={"path": str(tmp_path)}, validation=base, placement=placement, reward=reward)
    settings = [
        replace(base, greedy=True),
        replace(base, temperature=0.5, samples_per_prompt=2),
        replace(base, top_p=0.75, top_k=5, samples_per_prompt=4, k=[1, 4]),
    ]
    events = EventLog(tmp_path / "events.jsonl")
    found = evaluation.evaluate(config, settings, tmp_path, events, said.append)
    events.close()
    asked = [
        (each.temperature, each.top_p, each.top_k, len(rows))
        for each, rows in zip(hybrid.samplings, hybrid.requests, strict=True)
    ]
    assert asked == [(1.0, 1.0, 1, 3), (0.5, 1.0, 0, 6), (0.25, 0.75, 5, 12)]
    means = [{name: figures[name] for name in figures if name.startswith("val/score/mean@")} for figures in found]
    means = [{name: value for name, value in figures.items() if name.count("/") == 2} for figures in means]
    assert means == [{"val/score/mean@1": 0.0}, {"val/score/mean@2": 1.0}, {"val/score/mean@4": 0.0}]
    assert "val/solved/pass@4" in found[2]
    assert "val/solved/pass@4" not in found[1]
    assert said == [f"{number} of 3 done" for number in (1, 2, 3)]
    assert hybrid.journal.count("awake") == 1, "one engine serves them all"
