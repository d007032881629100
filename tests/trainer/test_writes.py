"""A disk that fails at any single write of a save: nothing good is lost, the run notices, and the next save works.

The writes are all writes that the kernel sees (`tests/system_calls.py`), from any process.
"""

from __future__ import annotations

import errno
import itertools
import multiprocessing
import os
import random
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mrl.trainer.checkpoint_score import CheckpointScore
from tests.system_calls import SystemCall, watched

MAKES = ("openat", "mkdir", "rename")
ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT)
NUM_KILLS, NUM_KILLS_IN_CI = 200, 20
LIMIT_S = 200.0


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory in memory: nothing here depends on how long a disk takes."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="mrl-test-") as directory:
        yield Path(directory)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tests.models.tiny_models import make_tiny

    return str(make_tiny("llama", tmp_path_factory.mktemp("tiny") / "model"))


class Role:
    """Saves as a worker group of one rank does."""

    def __init__(self, engine: Any) -> None:
        self.group, self._engine = self, engine

    def begin_checkpoint(self, path: str) -> None:
        from mrl.engine.checkpoint import PendingSave

        with self._as_a_rank_does():
            self._save = PendingSave(self._engine, path, {})

    def finish_checkpoint(self) -> None:
        with self._as_a_rank_does():
            self._save.finish()

    def load_checkpoint(self, path: str) -> None:
        from mrl.engine import checkpoint

        checkpoint.load(self._engine, path)

    @contextmanager
    def _as_a_rank_does(self) -> Iterator[None]:
        from mrl.errors import MrlError, WorkerRaised

        try:
            yield
        except (MrlError, OSError) as error:
            raise WorkerRaised(str(error)) from error


class Trained:
    """A model and a counter."""

    def __init__(self, role: Role) -> None:
        self.roles: Any = {"actor": role}
        self.num = 0

    def state_dict(self) -> dict[str, Any]:
        return {"num": self.num}

    def load_state_dict(self, state: Any) -> None:
        self.num = state["num"]


@contextmanager
def opened(model: str, directory: Path) -> Iterator[tuple[Any, Trained]]:
    """A run of one rank of a tiny model, which keeps one checkpoint and the best."""
    import torch.distributed as dist

    from mrl.config.schema import ParallelConfig
    from mrl.engine.parallel import model_parallel
    from mrl.trainer.run import open_run
    from tests.engine.tiny_training import build
    from tests.trainer.fakes import Screen, make_config, resolved

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(directory / f"meeting-{os.getpid()}"), 1)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    config = make_config(directory, training={"keep": 1, "max_failed_saves": 1, "trackers": []})
    with model_parallel(ParallelConfig(), seed=1) as groups, open_run(resolved(config), Screen([])) as run:
        trained = Trained(Role(build(model, ParallelConfig(), groups)))
        run.resume(trained)
        yield run, trained


def in_a_process(work: Callable[..., None], *arguments: Any) -> int:
    """Run this in a separate process, which Megatron may change. Return its exit code."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mrl.engine.engine", "mrl.trainer.run", "tests.engine.tiny_training"])
    process = context.Process(target=work, args=arguments)
    process.start()
    process.join(LIMIT_S)
    assert process.exitcode is not None, f"it did not end within {LIMIT_S:g} s"
    return process.exitcode


class Disk:
    """Writes in one directory, in order; the one of a number fails, or is the last of the process."""

    def __init__(self, directory: Path, fails: Callable[[int], int] = lambda number: 0) -> None:
        self._directory, self._fails = directory, fails
        self.calls: list[SystemCall] = []

    def decide(self, call: SystemCall) -> int:
        if self._directory not in (call.path, *call.path.parents) or call.path.suffix == ".jsonl":
            return 0
        self.calls.append(call)
        return self._fails(len(self.calls) - 1)


def save(run: Any, trained: Trained, disk: Disk) -> None:
    """Save the next step, which is the best so far."""
    trained.num += 1

    def work() -> None:
        run.save(trained, trained.num, CheckpointScore(float(trained.num), trained.num), wait=False)
        run.finish_save()

    watched(work, disk.decide)


def whole_steps(checkpoints: Path) -> list[int]:
    """The steps that can be loaded; any that cannot is an error."""
    from mrl.config.resolved.run_directory import steps_in
    from mrl.engine.checkpoint_files import SavedFiles
    from mrl.trainer.checkpoints import find_checkpoint

    for step in (steps := steps_in(checkpoints)):
        found = find_checkpoint(checkpoints, str(step))
        SavedFiles(found / "actor").check_files(0, 1)
    if (checkpoints / "best").exists():
        find_checkpoint(checkpoints, "best")
    return steps


def fail_at_each_write(model: str, directory: Path, num_errors: int) -> None:
    """Have each write fail in turn, in so many of the ways there are."""
    with opened(model, directory) as (run, trained):
        checkpoints = run.directory / "checkpoints"
        save(run, trained, Disk(run.directory))
        save(run, trained, counted := Disk(run.directory))
        tried: Counter[str] = Counter()
        for number, turn in itertools.product(range(len(counted.calls)), range(num_errors)):
            code = ERRORS[(number + turn) % len(ERRORS)]
            save(
                run, trained, failed := Disk(run.directory, lambda at, number=number, code=code: code * (at == number))
            )
            what = f"{os.strerror(code)} at {failed.calls[number]}"
            is_there = trained.num in whole_steps(checkpoints)
            assert is_there or trained.num - 1 in whole_steps(checkpoints), f"the good one is lost: {what}"
            assert is_there or run.save_is_due(trained.num + 1), f"no new save is due: {what}"
            said = any("not saved" in line or "cannot " in line for line in run.console.said)
            assert said, f"nothing was reported: {what}"
            run.console.said.clear()
            save(run, trained, Disk(run.directory))
            assert whole_steps(checkpoints) == [trained.num], f"the next one is not as ever: {what}"
            there = {path.name for path in checkpoints.iterdir()}
            assert there == {f"step-{trained.num:06}", "best", "latest"}, f"{there} after {what}"
            for pointer in ("best", "latest"):
                assert (checkpoints / pointer).read_text() == f"step-{trained.num:06}", f"{pointer} after {what}"
            tried[failed.calls[number].name] += 1
        print(f"{tried.total()} writes failed: {dict(tried)}", flush=True)


@pytest.mark.parametrize("num_errors", [1, pytest.param(len(ERRORS), marks=[pytest.mark.slow, pytest.mark.on_demand])])
def test_any_write_of_a_save_may_fail(model: str, memory: Path, num_errors: int) -> None:
    assert in_a_process(fail_at_each_write, model, memory, num_errors) == 0


def record_a_save(model: str, directory: Path) -> None:
    with opened(model, directory) as (run, trained):
        save(run, trained, recorded := Disk(run.directory / "checkpoints"))
        staged = run.directory / "checkpoints" / ".saving-000001"
        calls = [(call.name, call.path) for call in recorded.calls]
        visible = calls.index(("rename", staged))
        written = {path for name, path in calls[:visible] if name == "write"}
        assert {path.suffix for path in written} == {".safetensors", ".tmp"}, "weights and manifests"
        for path in written:
            last = max(at for at, call in enumerate(calls) if call == ("write", path))
            assert last < calls.index(("fsync", path), last) < visible, f"{path} is not on disk when it is seen"
        for directory in (staged, staged / ".actor.saving"):
            last = max(at for at, (name, path) in enumerate(calls) if name in MAKES and path.parent == directory)
            assert last < calls.index(("fsync", directory), last) < visible, f"what is in {directory} is not on disk"
        assert ("fsync", staged.parent) in calls[visible:], "the new name must be synced, too"
        renamed = [at for at, (name, path) in enumerate(calls) if name == "rename" and path.name == ".latest.tmp"]
        assert ("fsync", staged.parent) in calls[renamed[0] :], "`latest` must be synced, too"


def test_all_of_a_checkpoint_is_on_disk_before_it_is_seen(model: str, memory: Path) -> None:
    assert in_a_process(record_a_save, model, memory) == 0


def save_and_die(model: str, directory: Path, last: int) -> None:
    """Resume from the newest checkpoint, save two more, and be killed at the write with this number."""

    def fails(number: int) -> int:
        if number == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return 0

    with opened(model, directory) as (run, trained):
        steps = whole_steps(run.directory / "checkpoints")
        assert trained.num == max(steps, default=0), "it resumes from the newest"
        if steps:
            best = (run.directory / "checkpoints" / "best").read_text()
            assert best == f"step-{trained.num:06}", "which is the best so far, and called so"
        disk = Disk(run.directory, fails)
        for _ in range(2):
            save(run, trained, disk)
        os._exit(len(disk.calls) if last < 0 else 0)  # gloo's threads are waited for otherwise


@pytest.mark.parametrize(
    "num_kills",
    [
        pytest.param(NUM_KILLS_IN_CI, marks=pytest.mark.slow),
        pytest.param(NUM_KILLS, marks=[pytest.mark.slow, pytest.mark.on_demand]),
    ],
)
def test_a_run_killed_at_any_write_goes_on_from_a_whole_checkpoint(model: str, memory: Path, num_kills: int) -> None:
    num_writes = in_a_process(save_and_die, model, memory, -1)
    assert 100 < num_writes < 255, "an exit code holds them"
    chance = random.Random(7)
    newest = 2
    for last in sorted(chance.choices(range(num_writes), k=num_kills)):
        assert in_a_process(save_and_die, model, memory, last) == -signal.SIGKILL, f"at write {last}"
        steps = whole_steps(memory / "run" / "checkpoints")
        assert newest <= max(steps) <= newest + 2, f"{steps} after a kill at write {last}"
        newest = max(steps)
    assert newest > 2, "and it gets on"
