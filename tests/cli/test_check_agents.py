"""`mrl check` of environments: templates between turns, and a conversation without a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mrl.cli.main import main

ROOT = Path(__file__).parents[2]
WORLD = """
from mrl.agents.environment import Done, Environment, Observation, Start

class Asks(Environment):
    def step(self, turn):
        return Done(score=0.5) if turn.number else Observation(text="And?")

class LongPrompt(Asks):
    def reset(self, task):
        return Start(messages=[*task.messages, {"role": "user", "content": "4 " * 400}])

class Breaks(Asks):
    def step(self, turn):
        raise OSError("the shelf is gone")
"""
Check = Callable[..., tuple[int, str]]


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Check:
    from mrl.demo.model import make_model

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "worlds.py").write_text(WORLD)
    model = make_model(tmp_path / "model", seed=1)

    def run(*environments: str) -> tuple[int, str]:
        given = (f"model.path={model}", "rollout.max_prompt_tokens=32", "rollout.max_response_tokens=32")
        named = [f"agent.environments.{environment}" for environment in environments]
        code = main(["check", str(ROOT / "configs" / "laptop-ppo.yaml"), *given, *named])
        return code, capsys.readouterr().out

    return run


def test_an_environment_answers_before_any_engine_is_asked(check: Check) -> None:
    code, output = check("shelf.name=worlds:Asks")
    assert "ok    environment shelf: after 'I know.' it ends with `done` and the score 0.5" in output
    assert "ok    turns: the chat template gives the same text turn by turn: results of tools" in output
    assert code == 0


def test_one_that_fails_or_asks_for_too_long_a_prompt_is_named(check: Check) -> None:
    code, output = check("shelf.name=worlds:Breaks")
    assert code == 2
    assert "fail  environment shelf: raised: OSError: the shelf is gone" in output
    code, output = check("shelf.name=worlds:LongPrompt")
    assert code == 2
    assert "at most 32" in output


def test_one_that_no_row_goes_to_is_warned_of(check: Check) -> None:
    _, output = check("shelf={name: 'worlds:Asks', sources: [elsewhere]}")
    assert "warn  environment shelf: none of the checked rows has a data source that it handles" in output


def test_one_that_cannot_be_loaded_is_a_message(check: Check) -> None:
    code, output = check("shelf={name: 'worlds:Asks', options: {depth: 3}}")
    assert code == 2
    assert "fail  agent" in output
    assert "depth" in output


def test_full_turns_that_do_not_fit_are_warned_of(check: Check) -> None:
    limits = "max_turns: 3, max_turn_tokens: 8, max_observation_tokens: {}"
    _, output = check("shelf={name: 'worlds:Asks', " + limits.format(5) + "}")
    assert "warn  environment shelf: 2 of 3 turns of full length fit into a response of 32 tokens" in output
    assert "rollout.max_response_tokens=34" in output
    _, output = check("shelf={name: 'worlds:Asks', " + limits.format(4) + "}")
    assert "where all are full" not in output
