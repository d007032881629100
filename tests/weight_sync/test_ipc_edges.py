"""Edge cases of the handover: exact fits, open ends, and invalid frames."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mrl.errors import RolloutError
from mrl.weight_sync import ipc
from mrl.weight_sync.digest import Digests, digest, weighted_sums
from mrl.weight_sync.ipc import (
    _LENGTH,
    ALIGNMENT_BYTES,
    NUM_SLOTS,
    IpcReceiver,
    IpcSender,
    TensorView,
    _Channel,
    _connect,
    _placed,
    _share,
)

CPU = torch.device("cpu")
LIMIT_S = 20.0
SLOT_BYTES = 1024
BUFFER = torch.zeros(SLOT_BYTES, dtype=torch.uint8)


class Listening:
    """A receiver in a thread, with the tensors that it saw and its errors."""

    def __init__(self, path: Path, num_rounds: int = 1) -> None:
        self.receiver = IpcReceiver(path, LIMIT_S)
        self.seen: list[tuple[int, dict[str, list[float]]]] = []
        self.errors: list[str] = []
        self.thread = threading.Thread(target=self.listen, args=(num_rounds,), daemon=True)
        self.thread.start()

    def listen(self, num_rounds: int) -> None:
        for _ in range(num_rounds):
            try:
                for bucket in self.receiver.buckets():
                    tensors = {name: tensor.flatten().tolist() for name, tensor in bucket.tensors.items()}
                    self.seen.append((bucket.version, tensors))
                self.receiver.reply({"number": str(len(self.seen))})
            except RolloutError as error:
                self.errors.append(error.what)

    def end(self) -> None:
        self.thread.join(LIMIT_S)
        assert not self.thread.is_alive(), "the receiver still waits"
        self.receiver.close()


@pytest.fixture
def listen(tmp_path: Path) -> Iterator[Callable[..., tuple[Path, Listening]]]:
    made: list[Listening] = []

    def start(num_rounds: int = 1) -> tuple[Path, Listening]:
        made.append(Listening(tmp_path / "rollout-0-0.sock", num_rounds))
        return tmp_path / "rollout-0-0.sock", made[-1]

    yield start
    for each in made:
        each.end()


@pytest.mark.parametrize(
    ("row", "lies_within"),
    [
        (["a", "float32", [256], 0], True),
        (["a", "float32", [257], 0], False),
        (["a", "bfloat16", [512], 0], True),
        (["a", "float32", [4, 60], ALIGNMENT_BYTES], True),
        (["a", "float32", [241], ALIGNMENT_BYTES], False),
        (["a", "float32", [0, 5], SLOT_BYTES], True),
        (["a", "float32", [1], -ALIGNMENT_BYTES], False),
        (["a", "float32", [1], 32], False),
        (["a", "float32", [-1, 4], 0], False),
        (["a", "float32", [-4, -4], 0], False),
    ],
    ids=str,
)
def test_a_tensor_lies_in_its_buffer_to_the_last_byte(row: list[Any], lies_within: bool) -> None:
    if lies_within:
        placed = _placed(row, BUFFER)
        assert (placed.name, placed.shape, placed.offset) == (row[0], tuple(row[2]), row[3])
        assert placed.view(BUFFER).shape == tuple(row[2])
        return
    with pytest.raises(RolloutError, match=f"is not inside the buffer of {SLOT_BYTES} bytes"):
        _placed(row, BUFFER)


def test_a_tensor_of_another_dtype_is_refused() -> None:
    with pytest.raises(RolloutError, match="a has dtype int64"):
        _placed(["a", "int64", [2], 0], BUFFER)


def test_a_placed_tensor_is_a_view_of_its_bytes() -> None:
    buffer = torch.zeros(256, dtype=torch.uint8)
    placed = TensorView("a", torch.bfloat16, (2, 3), 64)
    assert placed.num_bytes == 12
    placed.view(buffer).fill_(1)
    assert torch.nonzero(buffer).flatten().tolist() == [*range(64, 76)]  # 1 is 0x3F80
    assert TensorView("b", torch.float32, (), 0).num_bytes == 4
    assert _placed(["b", "float32", [], 0], torch.zeros(4, dtype=torch.uint8)).shape == (), "a single number"


def test_nothing_stays_open_after_many_versions(listen: Callable[..., tuple[Path, Listening]]) -> None:
    path, listening = listen(6)
    sender = IpcSender(path, SLOT_BYTES, CPU, LIMIT_S)
    num_open = []
    for version in range(6):
        sender.begin(version)
        slots = []
        for number in range(5):
            slot = sender.slot()
            slots.append(slot.number)
            assert slot.buffer.numel() == SLOT_BYTES
            placed = TensorView(f"t{number}", torch.float32, (2,), ALIGNMENT_BYTES)
            placed.view(slot.buffer).fill_(10 * version + number)
            sender.send(slot, [placed])
        assert slots == [0, 1, 0, 1, 0]
        assert sender.end() == {"number": str(5 * (version + 1))}
        sender.close()
        num_open.append(len(os.listdir("/proc/self/fd")))
    assert max(num_open[2:]) <= num_open[1] + 1
    assert listening.seen == [(v, {f"t{n}": [10.0 * v + n] * 2}) for v in range(6) for n in range(5)]


def test_the_path_may_be_longer_than_the_kernel_takes(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    listening = Listening(deep / "0-0.sock")
    sender = IpcSender(deep / "0-0.sock", SLOT_BYTES, CPU, LIMIT_S)
    sender.begin(1)
    assert sender.end() == {"number": "0"}
    sender.close()
    listening.end()
    with pytest.raises(RolloutError, match="the socket's name is too long"):
        IpcReceiver(tmp_path / ("s" * 100))


def test_a_shared_buffer_cannot_shrink_under_its_reader() -> None:
    buffer, handle, descriptor = _share(SLOT_BYTES, CPU)
    assert descriptor is not None
    assert handle == {"bytes": SLOT_BYTES}
    for size in (0, 2 * SLOT_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    os.close(descriptor)
    buffer.fill_(3)
    assert int(buffer.sum()) == 3 * SLOT_BYTES


def spoken_to(path: Path) -> _Channel:
    return _Channel(_connect(path, LIMIT_S), "the receiver")


def test_another_protocol_is_refused_with_both_numbers(listen: Callable[..., tuple[Path, Listening]]) -> None:
    path, listening = listen()
    line = spoken_to(path)
    line.send("hello", {"protocol": 2, "version": 1, "slots": []})
    with pytest.raises(RolloutError, match="the trainer has protocol 2, but the rollout worker has 1"):
        line.receive("welcome", LIMIT_S)
    line.close()
    listening.thread.join(LIMIT_S)
    assert listening.errors == ["the trainer has protocol 2, not 1"]


def framed(frame: str) -> bytes:
    return _LENGTH.pack(len(frame)) + frame.encode()


@pytest.mark.parametrize(
    "said",
    [
        *(framed('{"kind": "bucket", "slot": 0, "tensors": []}'), framed('["hello"]'), framed('{"hello": 1}')),
        *(framed("no JSON"), _LENGTH.pack(1 << 30), b"GET / HTTP/1.1\r\n\r\n", b"\0", b""),
    ],
    ids=lambda said: repr(said[:24]),
)
@pytest.mark.parametrize("stays", [True, False])
def test_a_stranger_does_not_keep_the_trainer_from_its_receiver(
    listen: Callable[..., tuple[Path, Listening]], said: bytes, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ipc, "_HELLO_S", 0.2)
    path, listening = listen()
    stranger = _connect(path, LIMIT_S)
    stranger.sendall(said)
    if not stays:
        stranger.close()
    sender = IpcSender(path, SLOT_BYTES, CPU, LIMIT_S)
    sender.begin(1)
    sender.send(sender.slot(), [])
    assert sender.end() == {"number": "1"}
    sender.close()
    stranger.close()
    assert listening.errors == []


def test_where_only_strangers_come_the_last_is_told_of(tmp_path: Path) -> None:
    receiver = IpcReceiver(tmp_path / "rollout-0-0.sock", 0.5)
    stranger = _connect(tmp_path / "rollout-0-0.sock", LIMIT_S)
    stranger.sendall(_LENGTH.pack(1 << 30))
    what = r"no trainer sent weights within 0.5 s; another process connected: .* announced a frame of 1073741824 bytes"
    with pytest.raises(RolloutError, match=what):
        next(receiver.buckets())
    stranger.close()
    receiver.close()


def test_the_end_is_only_told_after_every_slot_was_read(listen: Callable[..., tuple[Path, Listening]]) -> None:
    path, _ = listen()
    sender = IpcSender(path, SLOT_BYTES, CPU, LIMIT_S)
    sender.begin(1)
    for _ in range(NUM_SLOTS):
        sender.send(sender.slot(), [])
    assert sender.end() == {"number": "2"}
    assert len(sender._free) == NUM_SLOTS
    sender.close()
    with pytest.raises(AssertionError, match="before `begin` or after `close`"):
        sender.end()


def test_a_socket_of_a_worker_that_crashed_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "rollout-0-0.sock"
    path.write_text("left behind")
    receiver = IpcReceiver(path, LIMIT_S)
    assert path.is_socket()
    receiver.reject("no sender is connected, so this goes nowhere")
    receiver.close()
    assert not path.exists()


# --- digests ----------------------------------------------------------------------------------------------------------


def test_digests_are_of_what_was_added_when_it_was_added() -> None:
    digests, tensor = Digests(), torch.arange(6.0).view(2, 3)
    digests.add("a", tensor)
    before = digest(tensor)
    tensor.zero_()
    digests.add("b", tensor)
    assert "a" in digests
    assert "c" not in digests
    assert digests.read() == {"a": before, "b": digest(torch.zeros(2, 3))}
    assert digests.read() == {"a": before, "b": digest(torch.zeros(2, 3))}
    assert before != digest(torch.zeros(2, 3))
    assert len(before) == 32
    digests.add("a", tensor)  # the newest counts
    assert digests.read()["a"] == digest(tensor)
    assert digest(torch.zeros(2, 3)) != digest(torch.zeros(3, 2))
    assert digest(torch.zeros(0)) != digest(torch.zeros(1))


def test_a_sum_sees_every_bit_of_every_word() -> None:
    """The highest bit of a 64-bit word times an even weight would be 0 at any position."""
    words = torch.arange(64)
    expected = int(weighted_sums(words))
    for place in range(64):
        for bit in (0, 31, 63):
            flipped = words.clone()
            flipped[place] ^= -(1 << 63) if bit == 63 else 1 << bit
            assert int(weighted_sums(flipped)) != expected, (place, bit)
