"""The run directory is private with any umask, held by one process, and contains the resolved configuration."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mrl.config.resolved.load import Resolved, load_config, load_config_of
from mrl.config.resolved.render import render
from mrl.config.resolved.run_directory import open_run_directory, steps_in
from mrl.config.schema import Config
from mrl.errors import ConfigError

LAPTOP_SFT = str(Path(__file__).parents[2] / "configs" / "laptop-sft.yaml")
Write = Callable[..., str]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o277], ids=oct)
def test_modes_do_not_depend_on_the_umask(umask: int, valid: str, write: Write) -> None:
    resolved = load_config(write(valid))
    Path("runs").mkdir()
    before = os.umask(umask)
    try:
        with open_run_directory(resolved, may_go_on=True) as directory:
            pass
    finally:
        os.umask(before)
    assert directory == Path("runs/demo")
    assert mode(directory) == 0o700
    assert mode(directory / "logs") == 0o700
    assert mode(directory / "config.yaml") == 0o600


def test_the_configuration_in_it_loads_as_the_same(valid: str, write: Write) -> None:
    resolved = load_config(write(valid), ["batch.epochs_per_step=2"])
    with open_run_directory(resolved, may_go_on=True) as directory:
        pass
    assert (directory / "config.yaml").read_text() == render(resolved)
    assert load_config(str(directory / "config.yaml")).config == resolved.config
    assert sorted(path.name for path in directory.iterdir()) == [".lock", "config.yaml", "logs"]


def refusal(resolved: Resolved[Config], may_go_on: bool = True) -> str:
    with pytest.raises(ConfigError) as caught, open_run_directory(resolved, may_go_on=may_go_on):
        pass
    (problem,) = caught.value.problems
    assert caught.value.exit_code == 2
    return str(problem)


def test_a_run_is_never_written_over(valid: str, write: Write) -> None:
    resolved = load_config(write(valid))
    with open_run_directory(resolved, may_go_on=True) as directory:
        before = (directory / "config.yaml").read_text(), (directory / "config.yaml").stat().st_mtime_ns
    assert refusal(resolved, may_go_on=False) == (
        "runs/demo: run.name: this directory is not empty, and has no checkpoint to continue from "
        "(choose another run.name or run.dir, or move that directory away)"
    )
    assert ((directory / "config.yaml").read_text(), (directory / "config.yaml").stat().st_mtime_ns) == before
    (directory / "config.yaml").rename(directory / "mine.txt")
    assert "this directory is not empty" in refusal(resolved), "a directory that is not a run of mrl is never moved"


def test_an_attempt_that_failed_before_its_first_checkpoint_is_set_aside(valid: str, write: Write) -> None:
    path = write(valid)
    messages: list[str] = []
    for epochs in (1, 2, 3):
        resolved = load_config(path, [f"batch.epochs_per_step={epochs}"])
        with open_run_directory(resolved, may_go_on=True, warn=messages.append) as directory:
            (directory / "logs" / f"attempt {epochs}").touch()
    assert [line.rpartition("/")[2] for line in messages] == ["attempt-1", "attempt-2"]
    assert {entry.name for entry in directory.iterdir()} == {".lock", "attempt-1", "attempt-2", "config.yaml", "logs"}
    kept = [next((directory / name / "logs").iterdir()).name for name in ("attempt-1", "attempt-2", ".")]
    assert kept == ["attempt 1", "attempt 2", "attempt 3"], "nothing is lost"
    assert "epochs_per_step: 1" in (directory / "attempt-1" / "config.yaml").read_text()


def test_a_run_with_a_checkpoint_goes_on_unless_told_not_to(valid: str, write: Write) -> None:
    resolved = load_config(write(valid))
    with open_run_directory(resolved, may_go_on=True) as directory:
        (directory / "checkpoints" / "step-000003").mkdir(parents=True)
    with open_run_directory(load_config("run.yaml", ["training.steps=20"]), may_go_on=True):
        assert load_config(str(directory / "config.yaml")).config.training.steps == 20
    assert "this directory is not empty" in refusal(resolved, may_go_on=False)


def test_an_empty_directory_may_be_there(valid: str, write: Write) -> None:
    path = write(valid)
    Path("runs/demo").mkdir(parents=True, mode=0o755)
    with open_run_directory(load_config(path), may_go_on=True) as directory:
        assert mode(directory) == 0o700


def test_a_file_in_the_way(valid: str, write: Write) -> None:
    path = write(valid)
    write("", "runs")
    assert "run.dir: cannot create the run directory: " in refusal(load_config(path))


def test_two_runs_at_once(valid: str, write: Write) -> None:
    resolved = load_config(write(valid))
    with open_run_directory(resolved, may_go_on=True):
        assert refusal(resolved) == (
            "runs/demo: run.name: another process is running this run "
            "(wait for it, or choose another run.name or run.dir)"
        )


def test_a_run_that_another_host_runs(valid: str, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def held(path: Path) -> Iterator[str]:
        assert path == Path("runs/demo/.lease")
        yield "pid 7 on node3"

    monkeypatch.setattr("mrl.config.resolved.run_directory.lease", held)
    message = refusal(load_config(write(valid)))
    assert message.startswith("runs/demo: run.name: pid 7 on node3 is running this run (wait for it")
    assert not Path("runs/demo/config.yaml").exists()


def test_a_lease_that_cannot_be_written_is_a_message(valid: str, write: Write) -> None:
    resolved = load_config(write(valid))
    Path("runs/demo/.lease.new").mkdir(parents=True)
    assert "runs/demo/.lease.new: run.dir: cannot create the run directory: Is a directory" in refusal(resolved)


def test_steps_are_those_whose_names_are_whole(tmp_path: Path) -> None:
    odd = (
        "step-000004.tmp",
        "step-\u00b2",
        "step-1",
        "step-0000000000000000000000000001",
        "step-+00005",
        "step-000007\n",
    )
    for name in ("step-000004", "step-000012", "step-1234567", *odd):
        (tmp_path / name).mkdir()
    assert steps_in(tmp_path) == [4, 12, 1234567]


def test_what_mrl_train_saved_is_not_gone_on_with_by_mrl_sft(valid: str, write: Write) -> None:
    resolved = load_config(write(valid))
    with open_run_directory(resolved, may_go_on=True) as directory:
        (directory / "checkpoints" / "step-000004").mkdir(parents=True)
    began = (directory / "config.yaml").read_text()
    run = resolved.config.run
    other = load_config_of("sft", LAPTOP_SFT, [f"run.name={run.name}", f"run.dir={run.dir}"])
    with pytest.raises(ConfigError) as caught, open_run_directory(other, may_go_on=True):
        pass
    assert "a run of `mrl train` has checkpoints here, but `mrl sft` cannot continue from them" in str(caught.value)
    assert (directory / "config.yaml").read_text() == began
    (directory / "config.yaml").write_text(render(other))
    with (
        pytest.raises(ConfigError, match="a run of `mrl sft` has checkpoints here"),
        open_run_directory(resolved, may_go_on=True),
    ):
        pass
