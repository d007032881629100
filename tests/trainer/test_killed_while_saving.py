"""SIGKILL at fifty random moments of a run that saves after every step: each resume finds a verified state."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

NUM_KILLS = 50
LIMIT_S = 60.0


class Role:
    """Saves as a worker group of one rank does."""

    def __init__(self, engine: Any, step: int) -> None:
        self.group, self.engine, self.step = self, engine, step

    def begin_checkpoint(self, path: str) -> None:
        from mrl.engine.checkpoint import PendingSave

        self.save = PendingSave(self.engine, path, {"step": self.step})
        self.finish_checkpoint = self.save.finish


def train_for_ever(model: str, directory: Path) -> None:
    """One rank of a tiny model, from the newest checkpoint on; what it found is a line of `resumes`."""
    import torch.distributed as dist

    from mrl.config.schema import ParallelConfig
    from mrl.engine import checkpoint
    from mrl.engine.parallel import model_parallel
    from mrl.events import EventLog
    from mrl.trainer.checkpoints import CheckpointManager
    from tests.engine.tiny_training import build, step

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(directory / f"meeting-{os.getpid()}"), 1)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    with model_parallel(ParallelConfig(), seed=1) as groups:
        engine = build(model, ParallelConfig(), groups)
        snapshots = CheckpointManager(directory / "checkpoints", 2, EventLog(directory / "events.jsonl"))
        found, done = snapshots.newest(), 0
        if found is not None:
            extra = checkpoint.load(engine, found.path / "actor")
            assert extra == {"step": found.step} == found.state, "both halves are of one step"
            done = found.step
        with (directory / "resumes").open("a") as resumes:
            resumes.write(f"{done}\n")
        for number in itertools.count(done + 1):
            step(engine)

            if snapshots.is_under_way:  # while the file of the step before was written
                snapshots.finish()
            snapshots.begin(number, {"actor": Role(engine, number)}, {"step": number}, is_best=number % 3 == 0)


def num_resumes(directory: Path) -> int:
    path = directory / "resumes"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.slow
def test_every_resume_finds_a_verified_state(tmp_path: Path) -> None:
    from tests.models.tiny_models import make_tiny

    model = str(make_tiny("llama", tmp_path / "model"))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mrl.engine.engine", "mrl.trainer.checkpoints", "tests.engine.tiny_training"])
    chance = random.Random(7)
    for number in range(NUM_KILLS):
        process = context.Process(target=train_for_ever, args=(model, tmp_path))
        process.start()
        deadline = time.monotonic() + LIMIT_S
        while num_resumes(tmp_path) <= number:
            assert process.is_alive(), f"attempt {number} ended by itself with {process.exitcode}"
            assert time.monotonic() < deadline, f"attempt {number} did not begin"
            time.sleep(0.01)
        time.sleep(chance.uniform(0.0, 0.8))
        assert process.pid is not None, "it was started"
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL
    steps = [int(line) for line in (tmp_path / "resumes").read_text().splitlines()]
    assert len(steps) == NUM_KILLS
    assert steps == sorted(steps), "no resume goes further back than the one before"
    assert steps[-1] >= 5, "and the run gets on"
