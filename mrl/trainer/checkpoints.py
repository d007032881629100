"""Checkpoints of a whole run: every role and the trainer's own state together, or nothing.

`checkpoints/step-000012/` holds a directory per role and `manifest.json`, which names its own hash and that of each
role's manifest, which names the hashes of its files. It is staged beside its place and made visible by one rename.
Between the beginning and the end of a save training may go on; one is under way at most.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrl import files
from mrl.config.run_directory import checkpoint_of, steps_in
from mrl.errors import CheckpointError, MrlError
from mrl.events import EventLog, Saved, Warned
from mrl.trainer.role_client import RoleClient

MANIFEST = "manifest.json"
_FORMAT = "mrl-run-2"
_STAGED = ".saving"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifests agree; the hashes of its files are checked where they are loaded."""

    path: Path
    step: int
    state: dict[str, Any]


def find_checkpoint(directory: Path, which: str) -> Path:
    """Return the checkpoint that is called `latest`, `best`, or by its step, whole as far as its manifests tell."""
    steps = steps_in(directory)
    number = steps[-1] if which == "latest" and steps else best_step(directory) if which == "best" else None
    if which.isdecimal() and int(which) in steps:
        number = int(which)
    if number is None:
        there = ", ".join(map(str, steps)) or "none"
        fix = "choose latest, or one of these steps" if steps else "save one: training.save_every"
        raise CheckpointError(f'no checkpoint "{which}"; steps that have one: {there}', where=str(directory), fix=fix)
    return _read(directory, number).path


def best_step(directory: Path) -> int | None:
    """Return the step of the best checkpoint; None where none has been called so."""
    pointer = directory / "best"
    if not pointer.exists():
        return None
    steps = {checkpoint_of(directory, step).name: step for step in steps_in(directory)}
    try:
        return steps[pointer.read_text(encoding="utf-8")]
    except (OSError, ValueError, KeyError) as error:
        what = f"it should name a checkpoint, one of {', '.join(steps) or 'none'}"
        fix = "write that name into it, or remove it: the next best is named anew"
        raise CheckpointError(what, where=str(pointer), fix=fix) from error


@dataclass(frozen=True)
class _Save:
    """A save under way."""

    step: int
    staged: Path
    roles: Mapping[str, RoleClient]
    state: dict[str, Any]
    is_best: bool
    began: float


class CheckpointManager:
    """The checkpoints of a run, oldest first."""

    def __init__(self, directory: Path, keep: int, events: EventLog) -> None:
        self._save: _Save | None = None
        self._directory = directory
        self._keep = keep
        self._events = events
        directory.mkdir(mode=0o700, exist_ok=True)

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, whole or damaged."""
        return steps_in(self._directory)

    def begin(self, step: int, roles: Mapping[str, RoleClient], state: Mapping[str, Any], is_best: bool) -> None:
        """Begin to write a checkpoint of this moment."""
        assert self._save is None, "one save at a time"
        staged = self._directory / f"{_STAGED}-{step:06d}"
        for leftover in self._directory.glob(f"{_STAGED}-*"):
            self._events.write(Warned("checkpoint", f"{leftover.name} was left by a save that did not end; removed"))
            shutil.rmtree(leftover)
        staged.mkdir(mode=0o700)
        save = _Save(step, staged, roles, dict(state), is_best, time.monotonic())
        with _removed_on_failure(staged):
            for name, role in roles.items():
                role.group.begin_checkpoint(str(staged / name))
        self._save = save

    @property
    def is_under_way(self) -> bool:
        return self._save is not None

    def is_written(self) -> bool:
        """Return whether one is under way whose end need not be waited for."""
        return self._save is not None and all(
            all(role.group.checkpoint_is_written()) for role in self._save.roles.values()
        )

    def finish(self) -> None:
        """Have the checkpoint that was begun on disk and visible; then remove those that are not kept."""
        assert self._save is not None, "a save was begun"
        save, self._save = self._save, None
        target = checkpoint_of(self._directory, save.step)
        with _removed_on_failure(save.staged):
            for role in save.roles.values():
                role.group.finish_checkpoint()
            manifest = {
                "format": _FORMAT,
                "step": save.step,
                "roles": {name: files.sha256(save.staged / name / MANIFEST) for name in save.roles},
                "state": save.state,
            }
            files.write_text(save.staged / MANIFEST, json.dumps(manifest | {"sha256": _sha256(manifest)}))
            if target.exists():  # a resumed run has done this step again
                shutil.rmtree(target)
            files.publish_directory(save.staged, target)
        if save.is_best:
            files.write_text(self._directory / "best", target.name)
        files.write_text(self._directory / "latest", target.name)
        self._delete_old()
        num_bytes = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
        self._events.write(Saved("checkpoint", save.step, str(target), num_bytes, time.monotonic() - save.began))

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint, or none where there is none. A damaged one is an error: nothing is lost in silence.

        The `latest` file is for people: what is there is what counts.
        """
        steps = self.steps()
        return _read(self._directory, steps[-1]) if steps else None

    def _delete_old(self) -> None:
        try:
            best = best_step(self._directory)
        except CheckpointError as error:
            self._events.write(Warned("checkpoint", f"none is removed: {error}"))
            return
        for step in self.steps()[: -self._keep]:
            if step != best:
                shutil.rmtree(checkpoint_of(self._directory, step))


@contextmanager
def _removed_on_failure(staged: Path) -> Iterator[None]:
    try:
        yield
    except (MrlError, OSError):
        shutil.rmtree(staged, ignore_errors=True)
        raise


def _sha256(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _read(directory: Path, step: int) -> Checkpoint:
    path = checkpoint_of(directory, step)
    try:
        manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != _FORMAT or manifest["step"] != step:
            raise ValueError(f"it says format {manifest['format']}, step {manifest['step']}")
        if manifest.pop("sha256") != _sha256(manifest):
            raise ValueError(f"{MANIFEST} is not what was saved")
        for name, sha256 in manifest["roles"].items():
            if files.sha256(path / name / MANIFEST) != sha256:
                raise ValueError(f"{name}/{MANIFEST} is not what was saved")
        return Checkpoint(path, step, dict(manifest["state"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        older = f"; the one before is step {steps_in(directory)[-2]}" if len(steps_in(directory)) > 1 else ""
        raise CheckpointError(
            f"the newest checkpoint is damaged: {error}{older}",
            where=str(path),
            fix="move it away to go on from the one before, or set training.resume=never and another run.name",
        ) from error
