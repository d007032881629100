"""The run directory: private whatever the umask, made once, with the resolved configuration in it."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mrl.config.load import load_config
from mrl.config.render import render
from mrl.config.run_directory import create_run_directory
from mrl.errors import ConfigError

Write = Callable[..., str]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o277], ids=oct)
def test_modes_do_not_depend_on_the_umask(umask: int, valid: str, write: Write) -> None:
    resolved = load_config(write(valid))
    Path("runs").mkdir()
    before = os.umask(umask)
    try:
        directory = create_run_directory(resolved)
    finally:
        os.umask(before)
    assert directory == Path("runs/demo")
    assert mode(directory) == 0o700
    assert mode(directory / "logs") == 0o700
    assert mode(directory / "config.yaml") == 0o600


def test_the_configuration_in_it_loads_as_the_same(valid: str, write: Write) -> None:
    resolved = load_config(write(valid), ["batch.epochs_per_step=2"])
    directory = create_run_directory(resolved)
    assert (directory / "config.yaml").read_text() == render(resolved)
    assert load_config(str(directory / "config.yaml")).config == resolved.config
    assert sorted(path.name for path in directory.iterdir()) == ["config.yaml", "logs"]


def test_a_run_is_never_written_over(valid: str, write: Write) -> None:
    resolved = load_config(write(valid))
    directory = create_run_directory(resolved)
    before = (directory / "config.yaml").stat()
    with pytest.raises(ConfigError) as caught:
        create_run_directory(resolved)
    (problem,) = caught.value.problems
    assert str(problem) == (
        "runs/demo: run.name: this directory holds a run already "
        "(choose another run.name or run.dir, or move that directory away)"
    )
    assert caught.value.exit_code == 2
    assert (directory / "config.yaml").stat() == before


def test_an_empty_directory_may_be_there(valid: str, write: Write) -> None:
    path = write(valid)
    Path("runs/demo").mkdir(parents=True, mode=0o755)
    assert mode(create_run_directory(load_config(path))) == 0o700


def test_a_file_in_the_way(valid: str, write: Write) -> None:
    path = write(valid)
    write("", "runs")
    with pytest.raises(ConfigError, match=r"runs.*: run\.dir: the run directory cannot be made: "):
        create_run_directory(load_config(path))


def test_of_two_runs_at_once_one_wins(valid: str, write: Write) -> None:
    resolved = load_config(write(valid))

    def attempt(_: int) -> bool:
        try:
            create_run_directory(resolved)
        except ConfigError:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(attempt, range(8))) == 1
