"""Handover between two real processes: contents, waits, and errors if the other side fails."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mrl.errors import RolloutError
from mrl.weight_sync.ipc import ALIGNMENT_BYTES, IpcReceiver, IpcSender, SharedBuffer, TensorView

CPU = torch.device("cpu")
SLOT_BYTES = 4096
LIMIT_S = 20.0
Run = Callable[..., Any]


def received(end: Any, path: Path, behaviour: str) -> None:
    """Receive two versions as a rollout worker, and report them to the test."""
    receiver = IpcReceiver(path, LIMIT_S)
    for _ in range(2):
        seen = {}
        for bucket in receiver.buckets():
            if behaviour == "die":
                os._exit(1)
            if behaviour == "refuse":
                receiver.reject("`lm_head.weight` has another shape")
                end.send("refused")
                return
            if behaviour == "sleep":
                time.sleep(LIMIT_S)
            for name, tensor in bucket.tensors.items():
                seen[name] = (bucket.version, str(tensor.dtype), tuple(tensor.shape), tensor.double().sum().item())
        receiver.reply({name: str(value) for name, (_, _, _, value) in seen.items()})
        end.send(seen)
    receiver.close()


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Run]:
    context = multiprocessing.get_context("spawn")
    started: dict[Path, Any] = {}

    path = tmp_path / "0-0.sock"

    def start(behaviour: str = "take") -> tuple[Path, Any]:
        if path in started:
            started[path].join(LIMIT_S)  # while it ends, its socket still takes connections
        ours, theirs = context.Pipe()
        process = context.Process(target=received, args=(theirs, path, behaviour), daemon=True)
        process.start()
        theirs.close()
        started[path] = process
        return path, ours

    yield start
    for process in started.values():
        process.kill()
        process.join()


def put(slot: SharedBuffer, name: str, tensor: torch.Tensor, offset: int = 0) -> TensorView:
    placed = TensorView(name, tensor.dtype, tuple(tensor.shape), offset)
    placed.view(slot.buffer).copy_(tensor)
    return placed


def send_many(sender: IpcSender) -> None:
    for number in range(10):
        slot = sender.slot()
        sender.send(slot, [put(slot, f"a{number}", torch.zeros(4))])


def test_two_versions_arrive_through_the_same_socket(worker: Run) -> None:
    path, results = worker()
    sender = IpcSender(path, SLOT_BYTES, CPU, LIMIT_S)
    for version in (3, 4):
        sender.begin(version)
        for number in range(5):  # more than there are slots
            slot = sender.slot()
            one = put(slot, f"a{number}", torch.full((3, 5), number + version, dtype=torch.float32))
            other = put(slot, f"b{number}", torch.arange(7, dtype=torch.bfloat16), ALIGNMENT_BYTES)
            sender.send(slot, [one, other])
        digests = sender.end()
        seen = results.recv()
        assert seen == {
            **{f"a{n}": (version, "torch.float32", (3, 5), 15.0 * (n + version)) for n in range(5)},
            **{f"b{n}": (version, "torch.bfloat16", (7,), 21.0) for n in range(5)},
        }
        assert digests == {name: str(value[3]) for name, value in seen.items()}
        sender.close()


def test_a_slot_is_free_only_when_the_receiver_has_read_it(tmp_path: Path) -> None:
    receiver = IpcReceiver(tmp_path / "0-0.sock", LIMIT_S)
    go, sums = threading.Event(), []

    def receive() -> None:
        for bucket in receiver.buckets():
            assert go.wait(LIMIT_S), "the receiver was never released"
            sums.append(bucket.tensors["a"].sum().item())
        receiver.reply({})

    thread = threading.Thread(target=receive)
    thread.start()
    sender = IpcSender(tmp_path / "0-0.sock", SLOT_BYTES, CPU, 0.3)
    sender.begin(1)
    for number in range(2):
        slot = sender.slot()
        sender.send(slot, [put(slot, "a", torch.full((2,), float(number)))])
    with pytest.raises(RolloutError, match=r"sent no `done` within 0.3 s"):
        sender.slot()
    go.set()
    slot = sender.slot()
    assert slot.number == 0
    sender.send(slot, [put(slot, "a", torch.full((2,), 2.0))])
    sender.end()
    sender.close()
    thread.join(LIMIT_S)
    receiver.close()
    assert sums == [0.0, 2.0, 4.0]


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("refuse", "rollout worker 0-0 refused the weights: `lm_head.weight` has another shape"),
        ("sleep", "rollout worker 0-0 sent no `done` within 1 s"),
    ],
)
def test_what_the_sender_says_of_a_receiver_that_fails(worker: Run, behaviour: str, message: str) -> None:
    path, _ = worker(behaviour)
    sender = IpcSender(path, SLOT_BYTES, CPU, LIMIT_S)
    sender.begin(1)
    sender._deadline_s = 1.0
    with pytest.raises(RolloutError, match=message):
        send_many(sender)
    sender.close()


def test_a_new_worker_takes_the_place_of_one_that_was_killed(worker: Run, tmp_path: Path) -> None:
    path, _ = worker("die")
    sender = IpcSender(path, SLOT_BYTES, CPU, LIMIT_S)
    sender.begin(1)
    slot = sender.slot()
    sender.send(slot, [put(slot, "a", torch.ones(4))])
    with pytest.raises(RolloutError, match="disconnected"):
        sender.end()
    sender.close()
    assert path.exists()  # no process could remove it
    _, results = worker("take")
    sender.begin(2)
    slot = sender.slot()
    sender.send(slot, [put(slot, "a", torch.ones(4))])
    assert sender.end() == {"a": "4.0"}
    assert results.recv()["a"][0] == 2
    sender.close()


def test_a_sender_that_vanishes_is_an_error_and_the_receiver_goes_on(tmp_path: Path) -> None:
    receiver = IpcReceiver(tmp_path / "0-0.sock", LIMIT_S)
    errors: list[str] = []

    def receive() -> None:
        try:
            list(receiver.buckets())
        except RolloutError as error:
            errors.append(str(error))
        assert list(receiver.buckets()) == []
        receiver.reply({"a": "1"})

    thread = threading.Thread(target=receive)
    thread.start()
    sender = IpcSender(tmp_path / "0-0.sock", SLOT_BYTES, CPU, LIMIT_S)
    sender.begin(1)
    sender.close()
    sender.begin(1)
    assert sender.end() == {"a": "1"}
    sender.close()
    thread.join(LIMIT_S)
    receiver.close()
    assert len(errors) == 1
    assert "the trainer disconnected before it sent `bucket`" in errors[0]


def test_nobody_listens_and_nobody_sends(tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match=r"no rollout worker listens after 0.1 s"):
        IpcSender(tmp_path / "0-0.sock", SLOT_BYTES, CPU, 0.1).begin(1)
    receiver = IpcReceiver(tmp_path / "0-0.sock", 0.1)
    with pytest.raises(RolloutError, match=r"no trainer sent weights within 0.1 s"):
        next(receiver.buckets())
    receiver.close()
    assert not (tmp_path / "0-0.sock").exists()


def test_the_receiver_believes_no_frame(tmp_path: Path) -> None:
    receiver = IpcReceiver(tmp_path / "0-0.sock", LIMIT_S)
    errors: list[str] = []

    def receive() -> None:
        try:
            list(receiver.buckets())
        except RolloutError as error:
            errors.append(error.what)
            receiver.reject(error.what)

    thread = threading.Thread(target=receive)
    thread.start()
    sender = IpcSender(tmp_path / "0-0.sock", SLOT_BYTES, CPU, LIMIT_S)
    sender.begin(1)
    sender.send(sender.slot(), [TensorView("a", torch.float32, (1024,), ALIGNMENT_BYTES)])
    with pytest.raises(RolloutError, match=r"a \[1024\] at byte 64 is not inside the buffer of 4096"):
        sender.end()
    thread.join(LIMIT_S)
    sender.close()
    receiver.close()
    assert len(errors) == 1
