"""Checkpoints of a whole run: all roles and the trainer's own state, saved atomically.

`checkpoints/step-000012/` holds a directory per role and `manifest.json`, which contains its own hash and the hash of
each role's manifest, which in turn contains the hashes of its files. It is written next to its final place, published
by one rename, and removed in the same way. Training may continue between the start and the end of a save. At most one
save is under way.
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
from mrl.config.resolved.run_directory import checkpoint_of, steps_in
from mrl.errors import CheckpointError, MrlError
from mrl.events import EventLog, Saved, Warned
from mrl.trainer.role_client import RoleClient

MANIFEST, DRAWN_AHEAD = "manifest.json", "drawn-ahead.bin"
_FORMAT = "mrl-run-3"
_STAGED, _REMOVED = ".saving", ".removing"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint with consistent manifests. The hashes of its files are checked when they are loaded."""

    path: Path
    step: int
    state: dict[str, Any]
    is_best: bool
    """Whether it was the best checkpoint when it was saved."""
    drawn_ahead: bytes
    """Batches that were drawn and not trained."""


def find_checkpoint(directory: Path, name: str) -> Path:
    """Return the checkpoint named `latest`, `best` or by its step, after checking its manifests."""
    steps = steps_in(directory)
    number = steps[-1] if name == "latest" and steps else best_step(directory) if name == "best" else None
    if name.isdecimal() and int(name) in steps:
        number = int(name)
    if number is None:
        known = ", ".join(map(str, steps)) or "none"
        fix = "choose `latest` or one of these steps" if steps else "set training.save_every to save checkpoints"
        raise CheckpointError(f'no checkpoint "{name}"; saved steps: {known}', where=str(directory), fix=fix)
    return read_checkpoint(directory, number).path


def best_step(directory: Path) -> int | None:
    """Return the step of the best checkpoint; None if no checkpoint was marked as best."""
    pointer = directory / "best"
    if not pointer.exists():
        return None
    steps = {checkpoint_of(directory, step).name: step for step in steps_in(directory)}
    try:
        return steps[files.read_text(pointer)]
    except (OSError, ValueError, KeyError) as error:
        problem = f"it does not name a checkpoint; the checkpoints are: {', '.join(steps) or 'none'}"
        fix = "write one of these names into it, or remove it: the next best checkpoint recreates it"
        raise CheckpointError(problem, where=str(pointer), fix=fix) from error


@dataclass(frozen=True)
class _Save:
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
        self._pointers: dict[str, Path] = {}
        """Targets of `latest` and `best` that could not be written yet."""
        directory.mkdir(mode=0o700, exist_ok=True)

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, intact or damaged."""
        return steps_in(self._directory)

    def begin(
        self,
        step: int,
        roles: Mapping[str, RoleClient],
        state: Mapping[str, Any],
        is_best: bool,
        drawn_ahead: bytes = b"",
    ) -> None:
        assert self._save is None, "one save at a time"
        staged = self._directory / f"{_STAGED}-{step:06d}"
        for leftover in [*self._directory.glob(f"{_STAGED}-*"), *self._directory.glob(f"{_REMOVED}-*")]:
            self._warn(f"{leftover.name} was left by an interrupted process; removed")
            shutil.rmtree(leftover, ignore_errors=True)  # leftovers do no harm; the next save tries again
        staged.mkdir(mode=0o700)
        save = _Save(step, staged, roles, dict(state), is_best, time.monotonic())
        with _removed_on_failure(staged):
            if drawn_ahead:
                files.write_bytes(staged / DRAWN_AHEAD, drawn_ahead)
            for name, role in roles.items():
                role.group.begin_checkpoint(str(staged / name))
        self._save = save

    @property
    def is_under_way(self) -> bool:
        return self._save is not None

    def is_written(self) -> bool:
        """Return whether a save is under way and all its files are written."""
        return self._save is not None and all(
            all(role.group.checkpoint_is_written()) for role in self._save.roles.values()
        )

    def finish(self) -> None:
        """Complete and publish the checkpoint under way, then remove the checkpoints that are not kept."""
        assert self._save is not None, "a save was begun"
        save, self._save = self._save, None
        target = checkpoint_of(self._directory, save.step)
        with _removed_on_failure(save.staged):
            for role in save.roles.values():
                role.group.finish_checkpoint()
            manifest = {
                "format": _FORMAT,
                "step": save.step,
                "is_best": save.is_best,
                "roles": {name: files.sha256(save.staged / name / MANIFEST) for name in save.roles},
                "state": save.state,
            }
            if (drawn_ahead := save.staged / DRAWN_AHEAD).exists():
                manifest["drawn_ahead"] = files.sha256(drawn_ahead)
            files.write_text(save.staged / MANIFEST, json.dumps(manifest | {"sha256": _sha256(manifest)}))
            if target.exists():  # a resumed run repeated this step
                shutil.rmtree(target)
            files.publish_directory(save.staged, target)
        self._pointers |= {"latest": target} | ({"best": target} if save.is_best else {})
        self._point()
        self._delete_old()
        num_bytes = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
        self._events.write(Saved("checkpoint", save.step, str(target), num_bytes, time.monotonic() - save.began))

    def newest(self) -> Checkpoint | None:
        """Return the newest checkpoint, or None. Raise an error if it is damaged, so that no step is lost
        silently.

        The `latest` file is for people. The directories decide.
        """
        steps = self.steps()
        if not steps:
            return None
        checkpoint = read_checkpoint(self._directory, steps[-1])
        if checkpoint.is_best:  # the process may have died before it wrote `best`
            self._pointers["best"] = checkpoint.path
            self._point()
        return checkpoint

    def _point(self) -> None:
        """Write `latest` and `best`. If one cannot be written, try again after the next save."""
        for name, target in list(self._pointers.items()):
            try:
                files.write_text(self._directory / name, target.name)
                del self._pointers[name]
            except OSError as error:
                self._warn(f"cannot write {name}, retrying after the next save; it should name {target.name}: {error}")

    def _delete_old(self) -> None:
        try:
            best = best_step(self._directory)
            kept = {best and checkpoint_of(self._directory, best), self._pointers.get("best")}
        except CheckpointError as error:
            self._warn(f"no old checkpoint is removed: {error}")
            return
        for path in (checkpoint_of(self._directory, step) for step in self.steps()[: -self._keep]):
            if path not in kept:
                try:
                    removed = path.with_name(f"{_REMOVED}-{path.name}")
                    path.rename(removed)  # atomic: half a checkpoint must not be visible
                    shutil.rmtree(removed)
                except OSError as error:
                    self._warn(f"cannot remove {path.name}, retrying after the next save: {error}")

    def _warn(self, message: str) -> None:
        self._events.write(Warned("checkpoint", message))


@contextmanager
def _removed_on_failure(staged: Path) -> Iterator[None]:
    try:
        yield
    except (MrlError, OSError):
        shutil.rmtree(staged, ignore_errors=True)
        raise


def _sha256(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def read_checkpoint(directory: Path, step: int) -> Checkpoint:
    """Return the checkpoint of a step, after checking its manifests."""
    path = checkpoint_of(directory, step)
    try:
        manifest: dict[str, Any] = json.loads(files.read_text(path / MANIFEST))
        if manifest["format"] != _FORMAT or manifest["step"] != step:
            raise ValueError(f"the manifest has format {manifest['format']}, step {manifest['step']}")
        if manifest.pop("sha256") != _sha256(manifest):
            raise ValueError(f"{MANIFEST} has a wrong checksum")
        for name, sha256 in manifest["roles"].items():
            if files.sha256(path / name / MANIFEST) != sha256:
                raise ValueError(f"{name}/{MANIFEST} has a wrong checksum")
        drawn_ahead = b""
        if "drawn_ahead" in manifest:
            drawn_ahead = files.read_bytes(path / DRAWN_AHEAD, (path / DRAWN_AHEAD).stat().st_size)
            if hashlib.sha256(drawn_ahead).hexdigest() != manifest["drawn_ahead"]:
                raise ValueError(f"{DRAWN_AHEAD} has a wrong checksum")
        return Checkpoint(path, step, dict(manifest["state"]), bool(manifest["is_best"]), drawn_ahead)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        previous = f"; the previous one is step {steps_in(directory)[-2]}" if len(steps_in(directory)) > 1 else ""
        raise CheckpointError(
            f"the newest checkpoint is damaged: {error}{previous}",
            where=str(path),
            fix="move it away to resume from the previous one, or set training.resume=never and another run.name",
        ) from error
