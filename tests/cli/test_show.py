"""`mrl show` as a command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mrl.config.resolved.render import render_schema

ROOT = Path(__file__).parents[2]
PPO, GRPO = "configs/laptop-ppo.yaml", "configs/laptop-grpo.yaml"


def mrl(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "import sys; from mrl.cli.main import main; sys.exit(main())", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env=os.environ | environment,
    )


@pytest.mark.needs
def test_show_prints_values_with_their_origin() -> None:
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


def test_what_show_prints_can_be_shown(tmp_path: Path) -> None:
    first = mrl("show", PPO).stdout
    copy = tmp_path / "copy.yaml"
    copy.write_text(first)
    assert mrl("show", PPO, str(copy)).stdout == "no difference\n"


def test_difference_of_two() -> None:
    shown = mrl("show", PPO, GRPO)
    assert shown.returncode == 0
    lines = shown.stdout.splitlines()
    assert lines[:2] == [f"- {PPO}", f"+ {GRPO}"]
    assert "- algorithm.advantage: gae  # configs/laptop-ppo.yaml:9" in lines
    assert "+ algorithm.advantage: grpo  # configs/laptop-grpo.yaml:6" in lines
    assert "+ critic: null  # configs/laptop-grpo.yaml:11" in lines
    assert "- critic.max_tokens_per_device: 1024  # configs/laptop-ppo.yaml:21" in lines
    assert not any("actor" in line for line in lines)


def test_overrides_of_a_difference_belong_to_the_second() -> None:
    assert mrl("show", PPO, PPO, "run.name=other").stdout.splitlines()[2:] == [
        "- run.name: laptop-ppo  # configs/laptop-ppo.yaml:2",
        "+ run.name: other  # command line",
    ]


def test_schema() -> None:
    assert mrl("show", "--schema").stdout == render_schema()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "command line: name one configuration file, or two to compare; none given"),
        (["run.name=x"], "command line: name one configuration file, or two to compare; none given"),
        ([PPO, PPO, PPO], f"name one configuration file, or two to compare; 3 given: {PPO}, {PPO}, {PPO}"),
        (
            ["configs/laptop-pop.yaml"],
            'configs/laptop-pop.yaml: does not exist (did you mean "configs/laptop-ppo.yaml"?)',
        ),
        (["configs"], "configs: is a directory (name a file)"),
        (["--schema", PPO], "command line: --schema takes no configuration"),
        ([PPO, "actor.parallel.tp=3"], "tp x cp x pp = 3 does not divide the 4 devices of pool"),
    ],
    ids=repr,
)
def test_mistakes(arguments: list[str], message: str) -> None:
    shown = mrl("show", *arguments)
    assert shown.returncode == 2
    assert message in shown.stderr
    assert "Traceback" not in shown.stderr
    assert shown.stdout == ""


@pytest.mark.parametrize("verb", ["show", "explain"])
def test_all_mistakes_of_a_file_come_at_once(verb: str, tmp_path: Path) -> None:
    text = (
        (ROOT / PPO)
        .read_text()
        .replace("device: cpu", "device: tpu")
        .replace("prompts_per_step: 8", "promts_per_step: 8")
    )
    path = tmp_path / "wrong.yaml"
    path.write_text(text.replace("tp: 2", "tp: two"))
    shown = mrl(verb, str(path), "rollout.tpp=1", "nonsense=")
    assert shown.returncode == 2
    assert "Traceback" not in shown.stderr
    assert shown.stderr.splitlines() == [
        "6 problems in the configuration:",
        "  - command line: nonsense: unknown key (known: actor, agent, algorithm, asynchrony, batch, cluster, "
        "critic, data, deadlines, judge, model, placement, reference, reward, reward_model, reward_models, rollout, "
        "run, sync, teacher, training, validation)",
        f'  - {path}:3: cluster.device: "tpu" is not one of cpu, gpu (did you mean "gpu"?)',
        f'  - {path}:12: batch.promts_per_step: unknown key (did you mean "batch.prompts_per_step"?)',
        f'  - {path}:16: actor.parallel.tp: must be a whole number, not "two"',
        f'  - {path}:20: critic.parallel.tp: must be a whole number, not "two"',
        '  - command line: rollout.tpp: unknown key (did you mean "rollout.tp"?)',
    ]


def test_a_secret_in_the_query_of_an_address_is_not_shown(tmp_path: Path) -> None:
    url = "http://judge.example/score?api_key=canary-5up3r-hidden&version=2"
    function = f"reward.functions={{judge: {{name: http, options: {{url: '{url}'}}}}}}"
    shown = mrl("show", PPO, function)
    assert shown.returncode == 0
    assert "http://judge.example/score?api_key=<redacted>&version=2" in shown.stdout
    assert "canary" not in shown.stdout + shown.stderr


def test_a_secret_of_the_environment_is_not_shown() -> None:
    secret = "canary-5up3r-hidden"
    for override in (
        "rollout.stop=['${oc.env:MRL_TEST_TOKEN}']",
        "batch.prompts_per_step=${oc.env:MRL_TEST_TOKEN}",
    ):
        for verb in ("show", "explain"):
            shown = mrl(verb, PPO, override, MRL_TEST_TOKEN=secret)
            assert shown.returncode == (2 if "prompts_per_step" in override else 0)
            assert secret not in shown.stdout + shown.stderr
