"""A trainer's side of the handover for tests: whole models from files, as vLLM's shards or unchanged."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrl.models.families import read_spec
from mrl.models.hf_reader import HfReader
from mrl.models.regions import slices
from mrl.models.rollout_table import EngineSizes, rollout_tensors
from mrl.models.table import float32_tensors, hf_tensors
from mrl.rollout.engine import Cache, EngineSettings, RolloutEngine
from mrl.weight_sync.ipc import ALIGNMENT_BYTES, IpcSender, TensorView, socket_path

Tensors = Iterable[tuple[str, Tensor]]
SLOT_BYTES = 1 << 20
DEADLINE_S = 60.0


def fused(
    model: Path, sizes: EngineSizes | None = None, worker: int = 0, dtype: str = "float32"
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of one worker of a vLLM engine."""
    reader = HfReader(model)
    for entry in rollout_tensors(read_spec(model), sizes or EngineSizes(), worker):
        tensor = torch.zeros(entry.shape, dtype=getattr(torch, entry.dtype or dtype))
        matrix = tensor.view(entry.place)
        for piece in entry.pieces:
            target = matrix[slices(piece.target)]
            target.copy_(reader.read(piece.hf, piece.source).reshape(target.shape))
        yield entry.name, tensor


def whole(model: Path, dtype: str = "float32") -> Iterator[tuple[str, Tensor]]:
    """Yield a model's tensors as a trainer in that dtype has them."""
    reader, spec = HfReader(model), read_spec(model)
    for name, shape in hf_tensors(spec, "lm").items():
        kept = "float32" if name in float32_tensors(spec) else dtype
        yield name, reader.read(name, tuple((0, size) for size in shape)).to(getattr(torch, kept))


def send(settings: EngineSettings, version: int, tensors: Tensors, worker: int = 0) -> dict[str, str]:
    """Send tensors to one process of a replica, in as few buckets as possible. Return its digests."""
    path = socket_path(settings.sockets, settings.replica, worker)
    sender = IpcSender(path, SLOT_BYTES, torch.device("cpu"), DEADLINE_S)
    try:
        sender.begin(version)
        slot, placed, offset = sender.slot(), list[TensorView](), 0
        for name, tensor in tensors:
            if offset + tensor.nbytes > SLOT_BYTES:
                sender.send(slot, placed)
                slot, placed, offset = sender.slot(), [], 0
            placed.append(TensorView(name, tensor.dtype, tuple(tensor.shape), offset))
            placed[-1].view(slot.buffer).copy_(tensor)
            offset += -(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        sender.send(slot, placed)
        return sender.end()
    finally:
        sender.close()


class InBackground:
    """A function in a thread. `result` waits for it, and raises its exception."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._outcome: list[Any] = []
        self._error: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, args=(function, args), daemon=True)
        self._thread.start()

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            self._outcome.append(function(*args))
        except BaseException as error:
            self._error.append(error)

    def result(self) -> Any:
        self._thread.join(DEADLINE_S)
        if self._error:
            raise self._error[0]
        return self._outcome[0]


def update(engine: RolloutEngine, model: Path, version: int, cache: Cache | None = None) -> list[dict[str, str]]:
    """Send the weights of a model's files to an engine. Return the replies of its processes."""
    settings = engine.settings
    full, sizes = engine.full_tensor_reason, EngineSizes(settings.tp, settings.dp, pp=settings.pp, dp=settings.dp)

    def tensors(worker: int) -> Tensors:
        return whole(model, settings.dtype) if full else fused(model, sizes, worker, settings.dtype)

    sending = [InBackground(send, settings, version, tensors(worker), worker) for worker in range(settings.num_workers)]
    engine.receive_weights(version, cache)
    return [each.result() for each in sending]
