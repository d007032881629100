"""`mrl data` reports the files that it read, their format, and the fate of their rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.cli.main import main
from mrl.data.published import PUBLISHED
from mrl.files import sha256
from tests.data.published_files import COUNTDOWN, EMPTY_BOX, MATH, resized, write_file


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_refused_rows_are_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    train, test = write_file(Path("train.jsonl"), [*MATH, EMPTY_BOX]), write_file(Path("test.parquet"), MATH)
    monkeypatch.setitem(PUBLISHED, "math", resized("math", train=4, test=test))
    command = f"data math out --from train.jsonl test.parquet --sha256 train.jsonl={sha256(train)}"
    assert main(command.split()) == 0
    assert capsys.readouterr().out.splitlines() == [
        "math: DigitalLearningGmbH/MATH-lighteval@0530c78699ea5e8eb5530600900e1f328b48acad",
        f"  test.parquet: sha256 {sha256(test)}, the published file",
        f"  train.jsonl: sha256 {sha256(train)}, not the published file, so only rows are counted",
        "out/train.parquet: 3 prompts of 4 rows",
        "  refused 1: the solution's box is empty (the first: train.jsonl:4)",
        "out/test.parquet: 3 prompts of 3 rows",
    ]


def test_repeated_rows_are_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_file(Path("puzzles.parquet"), COUNTDOWN)
    monkeypatch.setitem(PUBLISHED, "countdown", resized("countdown", num_test=1, train=file))
    assert main(["data", "countdown", "out", "--from", "puzzles.parquet"]) == 0
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "out/train.parquet: 2 prompts of 4 rows",
        "  left out 1: an earlier row asks the same question",
        "out/test.parquet: 1 prompts, the last of puzzles.parquet",
    ]


def test_without_a_network_the_command_for_elsewhere_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "gsm8k", "out"]) == 2
    error = capsys.readouterr().err
    dataset = PUBLISHED["gsm8k"]
    assert (
        f"hf download --repo-type dataset {dataset.repository} --revision {dataset.revision}, on a machine with"
        in error
    )
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["gsm9k", "out"], "invalid choice: 'gsm9k'"),
        (["gsm8k", "out", "--from", "a", "--sha256", "a=12"], '"a=12" is not FILE=HASH, with 64 hexadecimal digits'),
    ],
)
def test_a_command_that_is_none(arguments: list[str], what: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["data", *arguments])
    assert what in capsys.readouterr().err
