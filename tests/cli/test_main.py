"""The frame around the verbs: quick start, mistakes, exit codes."""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mrl.cli import main as frame
from mrl.cli.main import VERBS, main
from mrl.errors import EXIT_STOPPED, ConfigError, Problem, WorkerDied

ROOT = Path(__file__).parents[2]
RUN = [sys.executable, "-c", "import sys; from mrl.cli.main import main; sys.exit(main())"]


def stand_in(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Replace a verb's `run` by a function that raises `error`."""

    def run(arguments: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr("mrl.cli.demo.run", run)


def test_no_verb_prints_a_quick_start_of_four_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    for name, (_, summary) in VERBS.items():
        assert any(line.split() == [name, *summary.split()] for line in shown.splitlines())


@pytest.mark.parametrize("name", VERBS)
def test_help_of_every_verb_has_one_example_that_calls_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([name, "--help"])
    assert left.value.code == 0
    examples = capsys.readouterr().out.partition("example:\n")[2].split("\n")
    assert examples[0].split()[:2] == ["mrl", name]
    assert examples[1:] == [""]


@pytest.mark.parametrize("name", VERBS)
def test_the_example_of_every_verb_parses(name: str) -> None:
    verb = importlib.import_module(VERBS[name][0])
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    parser.parse_args(verb.EXAMPLE.format(verb=name).split()[2:])


def test_an_unknown_verb_is_named_with_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["shwo"]) == 2
    assert capsys.readouterr().err == 'mrl: unknown verb "shwo"; did you mean "show"?\n'


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError([Problem("a.yaml:3", "actor.lr", "must be positive")]), 2),
        (WorkerDied("rank 3 ended", fix="see its log"), 1),
    ],
    ids=["the user's mistake", "a failed run"],
)
def test_our_errors_are_messages_and_exit_codes(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch, error)
    assert main(["demo"]) == code
    assert capsys.readouterr().err == f"{error}\n"


def test_messages_hide_the_secrets_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HUB_TOKEN", "correct-horse-battery")
    stand_in(monkeypatch, WorkerDied("it printed correct-horse-battery"))
    main(["demo"])
    assert capsys.readouterr().err == "it printed <redacted:HUB_TOKEN>\n"


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError):
        main(["demo"])


def test_an_interrupt_leaves_quietly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stand_in(monkeypatch, KeyboardInterrupt())
    assert main(["demo"]) == frame.EXIT_INTERRUPTED == 130
    assert capsys.readouterr().err == ""


def test_a_reader_that_goes_away_is_no_error() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    finished = subprocess.run(
        [*RUN, "show", "--schema"], stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=60
    )
    os.close(write_end)
    assert finished.returncode == frame.EXIT_PIPE_CLOSED == 141
    assert finished.stderr == ""


def test_a_demo_writes_over_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--dir", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"{tmp_path} already exists\n  fix: choose another --dir\n"


def test_a_task_is_learned_by_its_algorithms_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--task", "search", "--algorithm", "ppo", "--dir", str(tmp_path / "new")]) == 1
    assert capsys.readouterr().err == "search cannot be trained with ppo\n  fix: --algorithm grpo\n"


@pytest.mark.needs
def test_a_demo_that_was_stopped_claims_no_accuracy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mrl.demo import demo

    stopped = demo.DemoResult(0.3, None, {}, tmp_path / "demo.yaml")
    monkeypatch.setattr(demo, "run_demo", lambda settings, console: stopped)
    assert main(["demo", "--dir", str(tmp_path / "new")]) == EXIT_STOPPED
    assert capsys.readouterr().out == f"stopped and saved; continue with: mrl train {tmp_path / 'demo.yaml'}\n"


def test_a_terminal_that_knows_no_other_letters_is_told_their_numbers(tmp_path: Path) -> None:
    config = f"{ROOT}/configs/laptop-grpo.yaml"
    code = "import sys; from mrl.cli.main import main; sys.exit(main())"
    ran = subprocess.run(
        [sys.executable, "-c", code, "show", config, "data.train.math.dataset=data/\u00fc.parquet"],
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT)},
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    assert rb"data/\xfc.parquet" in ran.stdout
