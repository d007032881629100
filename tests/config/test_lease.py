"""Two hosts never hold the same run, even if a lock of one host has no effect on the other."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mrl.config.resolved import run_directory as module
from mrl.config.resolved.run_directory import lease

ROOT = Path(__file__).resolve().parents[2]
HOLD = """
import sys, time
from pathlib import Path
from mrl.config.resolved import run_directory as lease
lease._BOOT_ID, lease._BEAT_S = Path(sys.argv[2]), 0.2
with lease.lease(Path(sys.argv[1])) as holder:
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BEAT_S", 0.2)
    monkeypatch.setattr(module, "_WATCH_S", 1.0)


@contextmanager
def held_elsewhere(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Hold a run in a process that believes it is on another host."""
    boot = path.with_name("boot")
    boot.write_text("another\n")
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path), str(boot)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    try:
        yield holder
    finally:
        holder.kill()
        holder.communicate()


def test_a_holder_on_another_host_is_named_while_it_lives(tmp_path: Path) -> None:
    path = tmp_path / ".lease"
    with held_elsewhere(path) as holder:
        with lease(path) as living:
            assert living == f"pid {holder.pid} on {os.uname().nodename}"
        assert path.read_text().startswith("another "), "it was left alone"
        holder.communicate("")
        assert not path.exists()
        began = time.monotonic()
        with lease(path) as living:
            assert living == ""
        assert time.monotonic() - began < 0.9, "there is no wait for a run that has ended normally"


def test_one_that_was_killed_is_watched_and_taken_over_from(tmp_path: Path) -> None:
    path = tmp_path / ".lease"
    with held_elsewhere(path) as holder:
        holder.kill()
        holder.wait()
        with lease(path) as living:
            assert living == ""
            assert not path.read_text().startswith("another ")


def test_one_that_stood_still_and_was_taken_over_from_ends(tmp_path: Path) -> None:
    path = tmp_path / ".lease"
    with held_elsewhere(path) as holder:
        holder.send_signal(signal.SIGSTOP)
        time.sleep(0.3)
        with lease(path) as living:
            assert living == ""
            holder.send_signal(signal.SIGCONT)
            assert holder.wait(5) == 1
            assert holder.stderr is not None
            assert f"pid {os.getpid()} on " in holder.stderr.read()


def test_one_whose_disk_was_full_for_a_while_is_seen_to_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / ".lease"
    monkeypatch.setattr(module, "_BEAT_S", 0.05)
    with lease(path):
        aside = path.with_suffix(".new")
        aside.mkdir()  # nothing can be written at its path
        time.sleep(0.2)
        before = path.read_text()
        aside.rmdir()
        deadline = time.monotonic() + 5
        while path.read_text() == before and time.monotonic() < deadline:
            time.sleep(0.02)
        assert path.read_text() != before


@pytest.mark.parametrize("how", ["removed", "renamed"])
def test_a_run_whose_directory_is_gone_ends_soon_and_says_so(how: str, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    with held_elsewhere(directory / ".lease") as holder:
        shutil.rmtree(directory) if how == "removed" else directory.rename(tmp_path / "other")
        assert holder.wait(10) == 1
        assert holder.stderr is not None
        stderr = holder.stderr.read()
        assert stderr.startswith(f"{directory}: the run's directory was removed or renamed, so nothing can be")
        assert stderr.count("\n") == 1


def test_a_directory_that_is_back_at_once_ends_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    with held_elsewhere(directory / ".lease") as holder:
        for _ in range(4):
            directory.rename(tmp_path / "other")
            time.sleep(0.1)
            (tmp_path / "other").rename(directory)
            time.sleep(0.25)
        assert holder.poll() is None
