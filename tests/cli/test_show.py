"""`mrl show` as a command."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from mrl.cli.main import main
from mrl.config.resolved.render import render_schema

ROOT = Path(__file__).parents[2]
PPO, GRPO = "configs/laptop-ppo.yaml", "configs/laptop-grpo.yaml"


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def mrl(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(ROOT)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        code = main(arguments)
        return subprocess.CompletedProcess(arguments, code, *capsys.readouterr())

    return run


@pytest.mark.needs
def test_show_prints_values_with_their_origin(mrl: Run) -> None:
    shown = mrl("show", GRPO, "batch.epochs_per_step=2")
    assert shown.returncode == 0, shown.stderr
    lines = [" ".join(line.split()) for line in shown.stdout.splitlines()]
    assert "name: laptop-grpo # configs/laptop-grpo.yaml:3" in lines
    assert "devices_per_node: 4 # configs/laptop-ppo.yaml:3" in lines
    assert "epochs_per_step: 2 # command line" in lines
    assert "release_s: 2.0 # default" in lines
    assert shown.stderr == (
        "configs/laptop-grpo.yaml: not checked: layers, heads and experts against the layouts: "
        'the files of "Qwen/Qwen2.5-0.5B-Instruct" are not on this machine\n'
    )


def test_what_show_prints_can_be_shown(mrl: Run, tmp_path: Path) -> None:
    first = mrl("show", PPO).stdout
    copy = tmp_path / "copy.yaml"
    copy.write_text(first)
    assert mrl("show", PPO, str(copy)).stdout == "no difference\n"


def test_overrides_of_a_difference_belong_to_the_second(mrl: Run) -> None:
    assert mrl("show", PPO, PPO, "run.name=other").stdout.splitlines()[2:] == [
        "- run.name: laptop-ppo  # configs/laptop-ppo.yaml:2",
        "+ run.name: other  # command line",
    ]


def test_schema(mrl: Run) -> None:
    assert mrl("show", "--schema").stdout == render_schema()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "command line: name one configuration file, or two to compare; none given"),
        ([PPO, PPO, PPO], f"name one configuration file, or two to compare; 3 given: {PPO}, {PPO}, {PPO}"),
        (
            ["configs/laptop-pop.yaml"],
            'configs/laptop-pop.yaml: does not exist (did you mean "configs/laptop-ppo.yaml"?)',
        ),
        (["--schema", PPO], "command line: --schema takes no configuration"),
    ],
    ids=repr,
)
def test_mistakes(arguments: list[str], message: str, mrl: Run) -> None:
    shown = mrl("show", *arguments)
    assert shown.returncode == 2
    assert message in shown.stderr
    assert "Traceback" not in shown.stderr
    assert shown.stdout == ""


def test_a_secret_in_the_query_of_an_address_is_not_shown(mrl: Run) -> None:
    url = "http://judge.example/score?api_key=canary-5up3r-hidden&version=2"
    function = f"reward.functions={{judge: {{name: http, options: {{url: '{url}'}}}}}}"
    shown = mrl("show", PPO, function)
    assert shown.returncode == 0
    assert "http://judge.example/score?api_key=<redacted>&version=2" in shown.stdout
    assert "canary" not in shown.stdout + shown.stderr
