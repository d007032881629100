"""Tensors that leave the device and come back: their storages shrink to nothing, so that all views of them stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.errors import EngineError
from mrl.rounding import round_up

_ALIGNMENT_BYTES = 64


@dataclass
class CopyStats:
    """Bytes copied since the model was made."""

    to_host_bytes: int = 0
    to_device_bytes: int = 0


class HostMirroredStorage:
    """Tensors with a storage each, and one flat host buffer (pinned where there is a GPU) for their contents.

    Copies run on a stream beside the computation. What the device does after `wait` comes after them.
    """

    def __init__(self, tensors: Sequence[Tensor], traffic: CopyStats, stream: torch.cuda.Stream | None) -> None:
        self.traffic = traffic
        self.on_device = True
        self.host: Tensor | None = None
        self.host_is_current = False
        self._stream = stream
        self._arrived: torch.cuda.Event | None = None
        self.hold(tensors)

    def hold(self, tensors: Sequence[Tensor]) -> None:
        """From now on these are the tensors; they are on the device."""
        self._storages = [tensor.untyped_storage() for tensor in tensors]
        self._sizes = [storage.nbytes() for storage in self._storages]

    @property
    def device_bytes(self) -> int:
        """What the storages occupy now."""
        return sum(storage.nbytes() for storage in self._storages)

    @property
    def host_buffer_bytes(self) -> int:
        """Of a host buffer for all contents, each beginning at an aligned address."""
        return sum(round_up(size, _ALIGNMENT_BYTES) for size in self._sizes)

    def save_to_host(self) -> None:
        """Have the present contents on the host; nothing to do where they are."""
        if not self.host_is_current:
            if self.host is None or self.host.numel() != self.host_buffer_bytes:
                self.host = self.new_host_buffer()
            self.copy_to(self.host)
            self.host_is_current = True

    def new_host_buffer(self) -> Tensor:
        """Host memory for all contents."""
        return torch.empty(self.host_buffer_bytes, dtype=torch.uint8, pin_memory=self._stream is not None)

    def copy_to(self, host: Tensor) -> None:
        """Copy the contents to a host buffer; the device goes on with the storages only afterwards."""
        self.traffic.to_host_bytes += sum(self._sizes)
        self._copy(self._slots(host), self._contents())
        self.wait()

    def load_from_host(self, host: Tensor) -> None:
        """Copy a host buffer to the storages."""
        self.traffic.to_device_bytes += sum(self._sizes)
        self._copy(self._contents(), self._slots(host))

    def zero(self) -> None:
        """Forget the contents."""
        for contents in self._contents():
            contents.zero_()

    def free(self) -> None:
        """Give the device memory back to torch's allocator."""
        if not all(storage.resizable() for storage in self._storages):
            raise EngineError("memory that numpy has seen cannot leave the device", fix="give numpy a copy of a tensor")
        for storage in self._storages:
            storage.resize_(0)
        self.on_device = False

    def allocate(self) -> None:
        """Take device memory again, with arbitrary contents."""
        for storage, size in zip(self._storages, self._sizes, strict=True):
            storage.resize_(size)
        self.on_device = True

    def wait(self) -> None:
        """Have the device wait for the last copy; the program goes on."""
        if self._arrived is not None:
            torch.cuda.current_stream().wait_event(self._arrived)

    def _copy(self, targets: list[Tensor], sources: list[Tensor]) -> None:
        if self._stream is None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
        self._arrived = self._stream.record_event()

    def _contents(self) -> list[Tensor]:
        return [torch.empty(0, dtype=torch.uint8, device=at.device).set_(at) for at in self._storages]

    def _slots(self, host: Tensor) -> list[Tensor]:
        slots = torch.split(host, [round_up(size, _ALIGNMENT_BYTES) for size in self._sizes])
        return [slot[:size] for slot, size in zip(slots, self._sizes, strict=True)]
