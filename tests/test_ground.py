"""The lowest layers: errors, files, data types, registry, events."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from mrl import files
from mrl.dtypes import ITEM_BYTES, SAFETENSORS_NAMES, dtype_name, torch_dtype
from mrl.errors import ConfigError, MrlError, NameUnknown, Problem, WorkerDied, counted, did_you_mean
from mrl.events import Event, EventLog, EventsLost, PhaseBegin, SampleSkipped, Saved, Warned, WorkerFault, read_events
from mrl.registry import Registry, load_attribute
from mrl.rounding import round_up


def test_an_error_says_where_what_and_fix() -> None:
    assert str(MrlError("5 is not 6", where="a.yaml:3", fix="write 6")) == "a.yaml:3: 5 is not 6\n  fix: write 6"
    assert str(MrlError("5 is not 6")) == "5 is not 6"


def test_a_noun_follows_its_number() -> None:
    assert [counted(number, "row") for number in (0, 1, 2, 1024)] == ["0 rows", "1 row", "2 rows", "1,024 rows"]


def test_errors_cross_processes_whole() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        error = pool.apply(make_error)
    assert isinstance(error, WorkerDied)
    assert (error.what, error.where, error.fix, error.role, error.ranks) == ("gone", "node 1", "look", "actor", (2, 3))
    assert str(error) == "node 1: gone\n  fix: look"


def make_error() -> WorkerDied:
    return WorkerDied("gone", where="node 1", fix="look", role="actor", ranks=[2, 3])


def test_a_config_error_lists_every_problem() -> None:
    error = ConfigError([Problem("a.yaml:1", "x", "bad", "good"), Problem("command line", "", "worse")])
    assert error.exit_code == 2
    assert str(error) == "2 problems in the configuration:\n  - a.yaml:1: x: bad (good)\n  - command line: worse"


def test_did_you_mean_the_nearest_or_here_are_all() -> None:
    assert did_you_mean("grpoo", ["grpo", "gae"]) == 'did you mean "grpo"?'
    assert did_you_mean("zzz", ["grpo", "gae"]) == "known: gae, grpo"


def test_a_file_is_replaced_whole_and_on_disk_before_it_is_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "latest"
    path.write_text("before")
    (tmp_path / ".latest.tmp").write_text("of a writer that was killed, and longer than what comes")
    seen = []

    def fsync(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        seen.append((name, path.read_text(), os.fstat(descriptor).st_size))

    monkeypatch.setattr(os, "fsync", fsync)
    files.write_text(path, "afterwards")
    assert seen[0] == (".latest.tmp", "before", len("afterwards"))
    assert seen[1][:2] == (tmp_path.name, "afterwards"), "the directory is synced after the rename"
    assert path.read_text() == "afterwards"
    assert os.listdir(tmp_path) == ["latest"]


def test_an_error_of_writing_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/\.latest\.tmp'"):
        files.write_text(tmp_path / "latest", "x")


@pytest.mark.parametrize("umask", [0o000, 0o277], ids=oct)
def test_a_file_has_the_mode_that_was_asked_for(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        files.write_text(tmp_path / "own", "x", mode=0o600)
    finally:
        os.umask(before)
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o600


def test_a_directory_is_on_disk_before_and_after_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged, target = tmp_path / "staged", tmp_path / "target"
    staged.mkdir()
    seen = []
    monkeypatch.setattr(files, "sync", lambda path: seen.append((path, target.exists())))
    files.publish_directory(staged, target)
    assert seen == [(staged, False), (tmp_path, True)]
    assert not staged.exists()


def test_a_hash_is_that_of_the_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_BYTES_AT_ONCE", 2)
    (tmp_path / "file").write_bytes(b"abc")
    assert files.sha256(tmp_path / "file") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.mark.parametrize("name", ITEM_BYTES)
def test_a_data_type_is_known_by_name_and_size(name: str) -> None:
    dtype = torch_dtype(name)
    assert (dtype_name(dtype), dtype.itemsize) == (name, ITEM_BYTES[name])
    assert {*SAFETENSORS_NAMES} < {*ITEM_BYTES}


def test_a_name_that_is_no_data_type_is_refused() -> None:
    with pytest.raises(ValueError, match='"float99" is not one of the data types bool, uint8'):
        torch_dtype("float99")


def test_sizes_are_rounded_up_to_multiples() -> None:
    assert [round_up(size, 4) for size in (0, 1, 4, 5)] == [0, 4, 4, 8]
    assert round_up(np.array([1, 8, 9]), 8).tolist() == [8, 8, 16]


def test_a_registry_knows_names_and_paths() -> None:
    registry: Registry[object] = Registry("reward")
    registry.register("exact")(print)
    assert registry.resolve("exact") is print
    assert "exact" in registry
    assert list(registry) == ["exact"]
    assert registry.resolve("json:dumps") is json.dumps
    with pytest.raises(NameUnknown, match='unknown reward "exat"\n  fix: did you mean "exact"\\? Or name your own'):
        registry.resolve("exat")
    with pytest.raises(ValueError, match='reward "exact" is registered twice'):
        registry.register("exact")(len)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:f", 'no module "no_such_module" \\(from "no_such_module:f"\\)'),
        ("json.no_such:f", 'no module "json.no_such"'),
        ("json:dunps", '"json" has no "dunps"\n  fix: did you mean "dumps"\\?'),
    ],
)
def test_a_wrong_path_says_which_half(path: str, message: str) -> None:
    with pytest.raises(NameUnknown, match=message):
        load_attribute(path)


def test_a_module_that_fails_to_import_is_not_called_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_plugin.py").write_text("import a_library_that_is_missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_library_that_is_missing"):
        load_attribute("broken_plugin:f")


def test_events_come_back_as_they_were_written(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    events: list[Event] = [
        PhaseBegin("rollout", 3),
        WorkerFault("actor", 2, "node-1", "update_actor", "died", "killed", 1.5),
        SampleSkipped(7, "too_long", "9000 of 8192 tokens"),
        Saved("checkpoint", 3, "a/b", 1000, 0.5),
    ]
    for event in events:
        log.write(event)
    log.close()
    assert [recorded.event for recorded in read_events(log.path)] == events
    assert log.path.stat().st_mode & 0o777 == 0o600


def test_every_kind_of_event_has_a_name_of_its_own() -> None:
    assert all(kind and cls.kind == kind for kind, cls in Event.registry.items())
    assert len({cls.__name__ for cls in Event.registry.values()}) == len(Event.registry)


def test_writers_do_not_interleave(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_many, args=(path, name)) for name in ("a", "b", "c")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    seen = [recorded.event for recorded in read_events(path)]
    assert len(seen) == 600
    assert all(isinstance(event, Warned) and len(event.message) == 2000 for event in seen)


def write_many(path: Path, name: str) -> None:
    log = EventLog(path)
    for _ in range(200):
        log.write(Warned(name, name * 2000))


def test_a_line_cut_short_by_a_crash_is_left_out_and_a_foreign_one_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    EventLog(path).write(PhaseBegin("rollout", 1))
    with path.open("a") as file:
        file.write('{"time": 1, "kind": "phase_be')
    assert len(list(read_events(path))) == 1
    with path.open("a") as file:
        file.write("\n")
    with pytest.raises(MrlError, match=r"events.jsonl:2: not an event of this version of mrl"):
        list(read_events(path))


def test_events_hold_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "canary-canary")
    log = EventLog(tmp_path / "events.jsonl")
    log.write(Warned("login", "canary-canary was refused"))
    assert "canary" not in log.path.read_text()
    assert "<redacted:WANDB_API_KEY> was refused" in log.path.read_text()


# --- a full disk ------------------------------------------------------------------------------------------------


@contextmanager
def no_file_larger_than(num_bytes: int) -> Iterator[None]:
    """Make the kernel refuse larger files of this process, like on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_events_that_cannot_be_written_are_counted_and_told_of_later(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.write(PhaseBegin("rollout", 1))
    size = log.path.stat().st_size
    for room in (0, 10):  # with 10 bytes, a part of a line fits
        with no_file_larger_than(size + room):
            log.write(PhaseBegin("rollout", 2))
    assert log.num_lost == 2
    assert log.path.stat().st_size == size, "no part of a line stays"
    log.write(PhaseBegin("rollout", 3))
    first, lost, last = (record.event for record in read_events(log.path))
    assert (first, last) == (PhaseBegin("rollout", 1), PhaseBegin("rollout", 3))
    assert isinstance(lost, EventsLost)
    assert lost.num == 2
    assert log.num_lost == 0
    log.close()
