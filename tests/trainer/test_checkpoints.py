"""Checkpoints of a run: whole or not there, damage is named, and what is kept is what was asked for."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mrl.config.resolved.run_directory import checkpoint_of
from mrl.errors import CheckpointError
from mrl.events import EventLog, Saved, Warned, read_events
from mrl.trainer.checkpoints import CheckpointManager, find_checkpoint


class Role:
    """Saves as a worker group does: a directory with a manifest in it, of the weights as they were at the beginning."""

    def __init__(self, weights: str = "none") -> None:
        self.weights = weights
        self.is_written = [True, True]
        self.group = SimpleNamespace(
            begin_checkpoint=self.begin,
            checkpoint_is_written=lambda: self.is_written,
            finish_checkpoint=lambda: self.finish(),
        )

    def begin(self, directory: str) -> None:
        self.path, self.copy = Path(directory), self.weights

    def finish(self) -> None:
        self.path.mkdir()
        (self.path / "manifest.json").write_text(json.dumps({"weights": self.copy}))


@pytest.fixture
def events(tmp_path: Path) -> EventLog:
    return EventLog(tmp_path / "events.jsonl")


def save(snapshots: CheckpointManager, step: int, is_best: bool = False, role: Role | None = None) -> Path:
    roles: Any = {"actor": role or Role(f"of step {step}")}
    snapshots.begin(step, roles, {"number": step}, is_best)
    snapshots.finish()
    return checkpoint_of(snapshots._directory, step)


def test_the_newest_comes_back_with_its_state(tmp_path: Path, events: EventLog) -> None:
    snapshots = CheckpointManager(tmp_path / "checkpoints", 2, events)
    assert snapshots.newest() is None
    for step in (1, 2, 10):
        save(snapshots, step)
    (tmp_path / "checkpoints" / "latest").write_text("step-000002")  # for people; the directories decide
    found = snapshots.newest()
    assert found is not None
    assert (found.step, found.state) == (10, {"number": 10})
    assert json.loads((found.path / "actor" / "manifest.json").read_text()) == {"weights": "of step 10"}
    assert snapshots.steps() == [2, 10], "two are kept"
    assert [record.event.step for record in read_events(events.path) if isinstance(record.event, Saved)] == [1, 2, 10]


def test_every_flipped_bit_of_the_batches_drawn_ahead_is_seen(tmp_path: Path, events: EventLog) -> None:
    snapshots = CheckpointManager(tmp_path / "checkpoints", 2, events)
    snapshots.begin(1, {"actor": Role()}, {}, False, b"drawn")  # type: ignore[dict-item]
    snapshots.finish()
    whole = snapshots.newest()
    assert whole is not None
    assert whole.drawn_ahead == b"drawn"
    (file,) = whole.path.glob("drawn*")
    for bit in range(8 * len(b"drawn")):
        content = bytearray(b"drawn")
        content[bit // 8] ^= 1 << bit % 8
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match="has a wrong checksum"):
            snapshots.newest()


def test_a_checkpoint_is_whole_when_it_becomes_visible(
    tmp_path: Path, events: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed right after the rename leaves either a complete checkpoint or none."""
    seen, rename = [], Path.rename

    def watched(self: Path, target: Path) -> Path:
        if self.is_dir():
            seen.append((sorted(file.name for file in self.iterdir()), target.name))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", watched)
    save(CheckpointManager(tmp_path / "checkpoints", 2, events), 3)
    assert seen == [(["actor", "manifest.json"], "step-000003")]


@pytest.mark.parametrize("victim", ["manifest.json", "actor/manifest.json"])
@pytest.mark.parametrize("damage", ["gone", "cut", "other"])
def test_damage_is_named_and_nothing_older_is_taken_in_silence(
    victim: str, damage: str, tmp_path: Path, events: EventLog
) -> None:
    snapshots = CheckpointManager(tmp_path / "checkpoints", 3, events)
    save(snapshots, 1)
    path = save(snapshots, 2) / victim
    if damage == "gone":
        path.unlink()
    else:
        path.write_text(path.read_text()[:-5] if damage == "cut" else '{"format": "other", "step": 2}')
    with pytest.raises(CheckpointError, match=r"the newest checkpoint is damaged: .*; the previous one is step 1"):
        snapshots.newest()


def test_a_save_that_did_not_end_is_invisible_and_removed_later(tmp_path: Path, events: EventLog) -> None:
    snapshots = CheckpointManager(tmp_path / "checkpoints", 2, events)
    save(snapshots, 1)
    (tmp_path / "checkpoints" / ".saving-000002" / "actor").mkdir(parents=True)
    found = snapshots.newest()
    assert found is not None
    assert found.step == 1
    save(snapshots, 3)
    assert not (tmp_path / "checkpoints" / ".saving-000002").exists()
    assert any(isinstance(record.event, Warned) for record in read_events(events.path))


def test_a_step_that_is_done_again_replaces_its_checkpoint(tmp_path: Path, events: EventLog) -> None:
    snapshots = CheckpointManager(tmp_path / "checkpoints", 2, events)
    save(snapshots, 1)
    path = save(snapshots, 1, role=Role("others"))
    assert json.loads((path / "actor" / "manifest.json").read_text()) == {"weights": "others"}


def test_a_checkpoint_by_its_name(tmp_path: Path, events: EventLog) -> None:
    directory = tmp_path / "checkpoints"
    snapshots = CheckpointManager(directory, 3, events)
    with pytest.raises(CheckpointError, match='no checkpoint "latest"; saved steps: none'):
        find_checkpoint(directory, "latest")
    for step in (1, 2, 3):
        save(snapshots, step, is_best=step == 2)
    assert [find_checkpoint(directory, which).name for which in ("latest", "best", "1")] == [
        *("step-000003", "step-000002", "step-000001")
    ]
    with pytest.raises(CheckpointError, match='no checkpoint "7"; saved steps: 1, 2, 3'):
        find_checkpoint(directory, "7")


@pytest.mark.parametrize(("keep", "kept"), [(1, [2, 6]), (6, [1, 2, 3, 4, 5, 6])])
def test_the_newest_are_kept_and_the_best_for_as_long_as_it_is(
    keep: int, kept: list[int], tmp_path: Path, events: EventLog
) -> None:
    snapshots = CheckpointManager(tmp_path / "checkpoints", keep, events)
    for step in range(1, 7):
        save(snapshots, step, is_best=step == 2)
    assert snapshots.steps() == kept
    save(snapshots, 7, is_best=True)
    assert (2 in snapshots.steps()) == (keep >= 6), "the previous best is no longer kept"


def test_a_checkpoint_of_another_step_is_none_of_this_one(tmp_path: Path, events: EventLog) -> None:
    snapshots = CheckpointManager(tmp_path / "checkpoints", 3, events)
    save(snapshots, 1).rename(tmp_path / "checkpoints" / "step-000004")
    with pytest.raises(CheckpointError, match="the manifest has format mrl-run-3, step 1"):
        snapshots.newest()


def test_every_role_is_in_the_checkpoint_and_its_size_is_told(tmp_path: Path, events: EventLog) -> None:
    snapshots = CheckpointManager(tmp_path / "checkpoints", 3, events)
    roles: dict[str, Any] = {"actor": Role(), "critic": Role("of the critic")}
    snapshots.begin(1, roles, {"n": 1}, is_best=False)
    snapshots.finish()
    path = tmp_path / "checkpoints" / "step-000001"
    assert json.loads((path / "critic" / "manifest.json").read_text()) == {"weights": "of the critic"}
    (saved,) = [record.event for record in read_events(events.path) if isinstance(record.event, Saved)]
    num_bytes = sum(len(each.read_bytes()) for each in path.rglob("*.json"))
    assert (saved.what, saved.path, saved.bytes) == ("checkpoint", str(path), num_bytes)
    assert 0 <= saved.seconds < 60
    (path / "critic" / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"critic/manifest.json has a wrong checksum"):
        snapshots.newest()


def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path, events: EventLog) -> None:
    snapshots = CheckpointManager(tmp_path / "checkpoints", 1, events)
    save(snapshots, 1)

    def fail(*_: str) -> None:
        raise OSError("no space")

    for method in ("begin", "finish"):
        role = Role()
        setattr(role, method, fail)
        role.group.begin_checkpoint = role.begin
        with pytest.raises(OSError, match="no space"):
            save(snapshots, 2, is_best=True, role=role)
        found = snapshots.newest()
        assert found is not None
        assert (found.step, (tmp_path / "checkpoints" / "latest").read_text()) == (1, "step-000001")
        assert not (tmp_path / "checkpoints" / "best").exists()
        assert not list((tmp_path / "checkpoints").glob(".saving*"))
        assert not snapshots.is_under_way
    save(snapshots, 2, is_best=True)
    assert (tmp_path / "checkpoints" / "best").read_text() == "step-000002"


def test_the_best_of_a_process_that_died_before_it_said_so_is_named(
    tmp_path: Path, events: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "checkpoints"
    dying = CheckpointManager(directory, 1, events)
    save(dying, 1, is_best=True)
    monkeypatch.setattr(dying, "_point", lambda: exit("killed"))
    with pytest.raises(SystemExit):
        save(dying, 2, is_best=True)
    assert find_checkpoint(directory, "best").name == "step-000001"
    CheckpointManager(directory, 1, events).newest()
    assert find_checkpoint(directory, "best").name == "step-000002"


def test_a_best_that_cannot_be_named_yet_is_kept_and_named_later(tmp_path: Path, events: EventLog) -> None:
    directory = tmp_path / "checkpoints"
    snapshots = CheckpointManager(directory, 1, events)
    (directory / ".best.tmp").mkdir()  # in the way of what is to become `best`
    for step in (1, 2, 3):
        save(snapshots, step, is_best=step == 1)
    assert snapshots.steps() == [1, 3]
    assert not (directory / "best").exists()
    (directory / ".best.tmp").rmdir()
    save(snapshots, 4)
    assert find_checkpoint(directory, "best").name == "step-000001"
    assert snapshots.steps() == [1, 4]


def test_half_of_an_old_checkpoint_is_not_taken_for_one(
    tmp_path: Path, events: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = CheckpointManager(tmp_path / "checkpoints", 1, events)
    save(snapshots, 1)

    def die_halfway(path: Path, **_: Any) -> None:
        (path / "manifest.json").unlink()
        raise OSError("the file system is gone")

    with monkeypatch.context() as patch:
        patch.setattr("mrl.trainer.checkpoints.shutil.rmtree", die_halfway)
        save(snapshots, 2)
    assert snapshots.steps() == [2]
    save(snapshots, 3)
    assert [path.name for path in (tmp_path / "checkpoints").glob(".*")] == [], "it is removed with the next"


# --- damage and malice ------------------------------------------------------------------------------------------


def test_every_flipped_bit_of_the_manifest_is_seen(tmp_path: Path, events: EventLog) -> None:
    snapshots = CheckpointManager(tmp_path / "checkpoints", 2, events)
    path = save(snapshots, 7) / "manifest.json"
    good = path.read_bytes()
    for position in range(len(good)):
        for bit in range(8):
            path.write_bytes(good[:position] + bytes([good[position] ^ (1 << bit)]) + good[position + 1 :])
            with pytest.raises(CheckpointError):
                snapshots.newest()
    path.write_bytes(good)
    assert snapshots.newest() is not None


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b'{"format": []}', b"\xff\xfe", b"[" * 100_000, b'"\\ud800"'],
    ids=lambda text: repr(text[:12]),
)
def test_a_hostile_manifest_is_a_typed_error(text: bytes, tmp_path: Path, events: EventLog) -> None:
    snapshots = CheckpointManager(tmp_path / "checkpoints", 2, events)
    (save(snapshots, 7) / "manifest.json").write_bytes(text)
    with pytest.raises(CheckpointError, match="the newest checkpoint is damaged"):
        snapshots.newest()


@pytest.mark.parametrize(
    "text",
    [b"", b"step-", b"step-000009", b"../../etc", b"step-000007/../step-000007", b"\xff", b"/", b"7", b"step-7\n"],
)
def test_a_hostile_pointer_is_a_typed_error_and_removes_nothing(text: bytes, tmp_path: Path, events: EventLog) -> None:
    snapshots = CheckpointManager(tmp_path / "checkpoints", 1, events)
    save(snapshots, 7, is_best=True)
    (tmp_path / "checkpoints" / "best").write_bytes(text)
    with pytest.raises(CheckpointError, match="it does not name a checkpoint; the checkpoints are: step-000007"):
        find_checkpoint(tmp_path / "checkpoints", "best")
    save(snapshots, 8)
    assert snapshots.steps() == [7, 8], "what may be the best is not removed on a damaged word"
    warned = [each.event.message for each in read_events(events.path) if isinstance(each.event, Warned)]
    assert "no old checkpoint is removed" in warned[-1]


@pytest.mark.parametrize("which", ["", "-1", "\u0667", "1e1", "../7", "step-000007"])
def test_a_name_that_is_none_is_a_typed_error(which: str, tmp_path: Path, events: EventLog) -> None:
    snapshots = CheckpointManager(tmp_path / "checkpoints", 1, events)
    save(snapshots, 8)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        find_checkpoint(tmp_path / "checkpoints", which)


@pytest.mark.parametrize("name", ["best", "step-000003/manifest.json", "step-000003/actor/manifest.json"])
def test_a_fifo_among_checkpoints_is_named_and_not_waited_for(name: str, tmp_path: Path) -> None:
    (tmp_path / "step-000003" / "actor").mkdir(parents=True)
    manifest = {"format": "mrl-run-2", "step": 3, "roles": {"actor": ""}, "state": {}}
    sha256 = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (tmp_path / "step-000003" / "manifest.json").write_text(json.dumps(manifest | {"sha256": sha256}))
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError):
        find_checkpoint(tmp_path, "best" if name == "best" else "latest")
