"""`mrl compare`: pairs of runs until a decision, also after an interruption; and two finished runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from mrl.cli.compare import EXIT_UNDECIDED
from mrl.cli.main import main
from mrl.data.row_files import write_samples
from mrl.errors import EXIT_STOPPED

CONFIG = str(Path(__file__).parents[2] / "configs" / "laptop-grpo.yaml")
SCORE = "val/score/mean@1"
VALIDATED = [
    'data.validation={sums: {dataset: "toy:addition", options: {part: validation}}}',
    "validation={every: 5, samples_per_prompt: 1}",
    "training.steps=5",
]


class Runs:
    """Stands for `mrl train`: each run writes its metrics, or ends with an exit code."""

    def __init__(self, score: Callable[[str, int], float | None]) -> None:
        self.score, self.trained, self.codes = score, list[list[str]](), list[int]()

    def __call__(self, command: Sequence[str]) -> int:
        assert command[3] == "train"
        self.trained.append(list(command[4:]))
        if self.codes and (code := self.codes.pop(0)):
            return code
        values = dict(value.split("=", 1) for value in command[5:] if "=" in value)
        directory = Path(json.loads(values["run.dir"]), values["run.name"])
        directory.mkdir(exist_ok=True)
        side, number = values["run.name"].split("-")
        lines = [{"step": step, SCORE: self.score(side, int(number)) if step else 0.1} for step in (0, 5)]
        (directory / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        return 0


def compared(runs: Runs, directory: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> int:
    monkeypatch.setattr("mrl.cli.compare.attempt", runs)
    command = [CONFIG, CONFIG, *VALIDATED, f"run.dir={directory}", "training.seed=40", "data.seed=7"]
    return main(["compare", *command, "--b", "algorithm.advantage=rloo", *more])


def test_pairs_are_trained_until_the_comparison_is_decided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = Runs(lambda side, number: 0.5 + 0.01 * number + (side == "b") * (0.1 + 0.005 * number))
    assert compared(runs, tmp_path, monkeypatch) == 0
    last = capsys.readouterr().out.splitlines()[-2]
    assert last == (f"3 of at most 5 pairs: B is better than A: +0.105 in {SCORE}, 95 % interval +0.091 to +0.119")
    assert len(runs.trained) == 6, "the third pair decides"
    seeds = [(run[-4], run[-5]) for run in runs.trained]
    assert [seed for _, seed in seeds] == [f"training.seed={40 + number}" for number in (0, 0, 1, 1, 2, 2)]
    assert [seed for seed, _ in seeds] == [f"data.seed={7 + number}" for number in (0, 0, 1, 1, 2, 2)]
    assert ["algorithm.advantage=rloo" in run for run in runs.trained] == [False, True] * 3
    directory = tmp_path / "compare-laptop-grpo-laptop-grpo"
    result = json.loads((directory / "comparison.json").read_text())
    assert (result["is_decided"], result["effect"]) == (True, pytest.approx(0.105))
    page = (directory / "comparison.html").read_text()
    assert "B is better than A" in page
    assert "+ algorithm.advantage: rloo" in page
    assert page.count("<tr><td>") == 3


def test_no_difference_is_said_with_the_seeds_that_would_show_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = Runs(lambda side, number: 0.5 + (side == "b") * (0.08 if number % 2 else -0.04))
    assert compared(runs, tmp_path, monkeypatch, "--seeds", "4") == EXIT_UNDECIDED
    *_, last, _ = capsys.readouterr().out.splitlines()
    assert last.startswith(f"4 of at most 4 pairs: no difference seen: +0.02 in {SCORE}, 95 % interval -0.1")
    assert last.endswith("; about 92 more seeds would distinguish them")
    same = Runs(lambda side, number: 0.5 + 0.1 * number)
    assert compared(same, tmp_path, monkeypatch, "--seeds", "3", "--name", "same") == EXIT_UNDECIDED
    assert "no difference seen: A and B are equal in each pair" in capsys.readouterr().out


def test_lower_is_better_if_the_configuration_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = Runs(lambda side, number: 0.5 + (side == "b") * (0.1 + 0.001 * number))
    assert compared(runs, tmp_path, monkeypatch, "validation.best_mode=min") == 0
    assert "B is worse than A: -0.101" in capsys.readouterr().out


def test_an_interrupted_comparison_goes_on_and_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = Runs(lambda side, number: 0.5 + (side == "b") * (0.1 + 0.001 * number))
    runs.codes = [0, 0, 0, EXIT_STOPPED]
    assert compared(runs, tmp_path, monkeypatch) == EXIT_STOPPED
    assert "the same command continues the comparison" in capsys.readouterr().err
    for change, problem in {
        "--seeds=6": "planned as",
        "algorithm.gamma=0.5": "+   gamma: 0.5",
    }.items():
        assert compared(runs, tmp_path, monkeypatch, change) == 1
        assert problem in capsys.readouterr().err
    assert compared(runs, tmp_path, monkeypatch) == 0
    (tmp_path / "compare-laptop-grpo-laptop-grpo" / "b-1" / "metrics.jsonl").write_text('{"step": 5}\n')
    runs.score = lambda side, number: None  # as a figure that is not finite is written
    assert compared(runs, tmp_path, monkeypatch) == 1
    assert f"the last validation has no finite {SCORE}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["--seeds", "2"], "--seeds is 2, but a comparison needs 3 to 100 pairs"),
        (["--b", "validation.temperature=0.5"], "the section validation differs"),
        (["--b", "training.seed=3"], "training.seed=3 for one side only"),
        (["validation.every=0"], "nothing is validated"),
        (["training.resume=never"], "a comparison resumes its runs"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    more: list[str], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = Runs(lambda side, number: 0.5)
    assert compared(runs, tmp_path, monkeypatch, *more) == 1
    assert problem in capsys.readouterr().err
    assert not runs.trained


def finished(directory: Path, scores: Sequence[float], first: str = "prompt 0") -> Path:
    """Write the samples of a run's validation, two of each prompt, with a step before that must not count."""
    directory.mkdir()
    (directory / "config.yaml").write_text("run: {}\n")
    for step, shift in ((5, 9.0), (10, 0.0)):
        rows = [(f"sums/0/{row}", score + sign + shift) for row, score in enumerate(scores) for sign in (-0.5, 0.5)]
        columns = {
            "data_source": ["sums"] * len(rows),
            "uid": [uid for uid, _ in rows],
            "prompt": [first] * 2 + ["another"] * (len(rows) - 2),
            "score": [score for _, score in rows],
        }
        write_samples(directory / "samples", step, columns, "validation")
    (directory / "samples" / "validation-000005.parquet").touch()
    return directory


def test_finished_runs_are_compared_by_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = finished(tmp_path / "a", [0.1 * number for number in range(10)])
    b = finished(tmp_path / "b", [0.1 * number + 0.05 + 0.01 * (number % 2) for number in range(10)])
    c = finished(tmp_path / "c", [0.9 - 0.1 * number for number in range(10)])
    assert main(["compare", str(a), str(b)]) == 0
    row = " ".join(capsys.readouterr().out.splitlines()[1].split())
    assert row == "all 10 0.45 0.505 +0.055 +0.0512 to +0.0588 B scores higher"
    assert main(["compare", str(a), str(c)]) == EXIT_UNDECIDED
    assert "no difference seen" in capsys.readouterr().out
    other = finished(tmp_path / "other", [0.5] * 10, first="what?")
    assert main(["compare", str(a), str(other)]) == 1
    assert "10 and 10 prompts, of which 9 are the same" in capsys.readouterr().err
    assert main(["compare", str(a), CONFIG]) == 1
    assert main(["compare", str(a), str(b), "training.seed=1"]) == 1
