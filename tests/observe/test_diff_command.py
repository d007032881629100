"""`mrl diff` on the directories of runs with fake workers: what it prints, and its exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mrl.cli.main import main
from mrl.config.training import RecordConfig
from mrl.protocol import DataProto
from mrl.rollout.requests import GenerationRequest, Sampling
from mrl.trainer import generation
from tests.trainer.fakes import END, make_config, scene


def answer_by_seed(request: GenerationRequest, sampling: Sampling) -> list[int]:
    return [100 + request.seed % 50, 50, END]


def run_of(directory: Path, *, record: bool = True, **training: Any) -> Path:
    """Three steps in a new directory."""
    directory.mkdir()
    (directory / "config.yaml").write_text("run: {name: run}\n")
    every = {"record": RecordConfig(every=1)} if record else {}
    config = make_config(directory, training={"steps": 3} | every | training)
    with scene(config, directory, answer=answer_by_seed) as found:
        found.trainer.fit()
    return directory


def test_equal_runs_are_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(run_of(tmp_path / name)) for name in ("a", "b")]
    assert main(["diff", *runs, "--exact"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "metrics: no difference in 3 steps of both runs"
    assert said[1:5] == ["configuration: equal", "versions: equal", "seeds: equal", "hosts: equal"]
    assert [line.partition(":")[0] for line in said[5:]] == ["step 1", "step 2", "step 3"]
    assert all("equal, bit for bit" in line for line in said[5:])


def test_a_seed_that_is_used_twice_is_found_by_its_row_and_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In step 2, the second sample of each prompt is drawn with the seed of the first."""
    right = run_of(tmp_path / "right")
    real = generation.request_seed

    def twice(seed: int, step: int, uid: str, number: int) -> int:
        return real(seed, step, uid, 0 if step == 2 else number)

    monkeypatch.setattr(generation, "request_seed", twice)
    assert main(["diff", str(right), str(run_of(tmp_path / "wrong"))]) == 3
    said = capsys.readouterr().out
    assert "step 1: equal, bit for bit" in said
    assert "step 2: the first difference is in phase rollout: column responses\n  row 1 (id 5), token 0: " in said
    assert "step 3" not in said


def test_what_differs_in_the_configuration_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(run_of(tmp_path / "a")), str(run_of(tmp_path / "b", seed=6))]
    assert main(["diff", *runs]) == 3
    said = capsys.readouterr().out
    assert "configuration: 1 differences\n  training.seed: 5 and 6\n" in said
    assert "seeds: 2 differences\n  training: 5 and 6\n" in said
    assert "step 1: the first difference is in phase rollout: column responses" in said


def test_what_only_one_run_has_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [run_of(tmp_path / "a"), run_of(tmp_path / "b")]
    path = runs[1] / "record" / "step-000001" / "batch.mrl"
    batch = DataProto.load_from_disk(path)
    batch.with_column("values", batch["advantages"]).save_to_disk(path)
    assert main(["diff", *map(str, runs), "--step", "1"]) == 0
    assert "columns of only the second run, not compared: values\n" in capsys.readouterr().out


def test_runs_without_records_are_compared_by_their_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(run_of(tmp_path / "a", record=False)), str(run_of(tmp_path / "b", record=False))]
    assert main(["diff", *runs]) == 0
    assert "no step is recorded in both runs" in capsys.readouterr().out
    path = tmp_path / "b" / "metrics.jsonl"
    lines = path.read_text().splitlines()
    lines[1] = lines[1].replace('"actor/loss": 2.0', '"actor/loss": 2.5')
    path.write_text("\n".join(lines) + "\n")
    assert main(["diff", *runs]) == 3
    assert "metrics first differ in step 2: actor/loss is 2.0 and 2.5\n" in capsys.readouterr().out


def test_what_is_no_run_and_a_step_without_a_record_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path / "a")
    assert main(["diff", str(run), str(tmp_path / "nowhere")]) == 1
    assert "nowhere is not the directory of a run: it has no config.yaml" in capsys.readouterr().err
    assert main(["diff", str(run), str(run), "--step", "9"]) == 1
    said = capsys.readouterr().err
    assert "step 9 was not recorded; recorded steps: 1, 2, 3" in said
    assert "training.record.steps=[9]" in said
