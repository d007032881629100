"""What of a model is on the device: its parameters, gradients and optimizer state, each there or on the host.

Nothing is copied that is where it should be: gradients are dropped and come back as zeros, and weights that have not
changed since they were last on the host only leave. The frozen reference model is a copy on the host that takes the
place of the actor's weights for a while.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from mrl.engine.model import TokenModel
from mrl.engine.optimizer import Optimizer
from mrl.errors import EngineError
from mrl.rounding import round_up

PartName = Literal["parameters", "gradients", "optimizer"]
_ALIGNMENT_BYTES = 64
_C = ctypes.CDLL(None)


@dataclass(frozen=True)
class WeightCopy:
    """A model's parameters on this rank, in one flat host buffer."""

    host: Tensor


class DeviceMemory:
    """The parts of one rank's model, where they are, and the way between the two places."""

    def __init__(self, models: Sequence[TokenModel], optimizer: Optimizer | None, device: torch.device) -> None:
        self.traffic = CopyStats()
        self._device = device
        self._optimizer = optimizer
        self._other_weights = False
        stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        tensors: dict[PartName, list[Tensor]]
        if optimizer is None:
            tensors = {"parameters": _flatten(models)}
        else:
            tensors = {
                "parameters": [buffer.param_data for buffer in optimizer.buffers],
                "gradients": [buffer.grad_data for buffer in optimizer.buffers],
                "optimizer": optimizer.state_tensors(),
            }
        self._parts = {name: HostMirroredStorage(held, self.traffic, stream) for name, held in tensors.items()}

    def offload(self, *names: PartName) -> None:
        """Free the device memory of those parts; what is on the host, or this model has not, stays as it is.

        Other processes can have it afterwards, with all else that was freed before.
        """
        self._own_weights_only("offloaded")
        for name in names:
            part = self._parts.get(name)
            if part is None or not part.on_device:
                continue
            if name == "optimizer":
                self._look_at_optimizer()
            if name != "gradients":
                part.save_to_host()
            part.free()
        self.give_back()

    def give_back(self) -> None:
        """Let other processes have what this one has freed: who calls this has done its work for a while."""
        free_unused_memory(self._device)

    def onload(self, *names: PartName) -> None:
        """Bring those parts back to the device. The program goes on at once; who needs a part waits for its copy."""
        for name in names:
            part = self._parts.get(name)
            if part is None or part.on_device:
                continue
            part.allocate()
            if name == "gradients":
                part.zero()
            else:
                assert part.host is not None, f"{name} left the device without a copy"
                part.load_from_host(part.host)

    def check(self, *names: PartName) -> None:
        """Refuse what cannot work with the parts where they are."""
        for name in names:
            if name not in self._parts:
                raise EngineError(f"this engine is not trained: it has no {name}")
            if not self._parts[name].on_device:
                raise EngineError(f"the model's {name} left the device", fix=f'call memory.onload("{name}") before')
            if name != "parameters":
                self._own_weights_only("trained")

    def need(self, *names: PartName) -> None:
        """The same, and have the device wait for parts that are on their way."""
        self.check(*names)
        for name in names:
            self._parts[name].wait()

    def changed(self) -> None:
        """The weights and the optimizer state are not what they were: copies on the host are out of date."""
        for part in self._parts.values():
            part.host_is_current = False

    def copy_weights(self) -> WeightCopy:
        """Return the present weights, to be kept for `weights_of`."""
        self.need("parameters")
        part = self._parts["parameters"]
        copy = WeightCopy(part.new_host_buffer())
        part.copy_to(copy.host)
        return copy

    @contextmanager
    def weights_of(self, copy: WeightCopy) -> Iterator[None]:
        """Other weights in place of this model's, for forward passes only; afterwards all is as it was before.

        The copy is of this engine, or of one with the same model and layout that is trained as well.
        """
        self._own_weights_only("replaced")
        part = self._parts["parameters"]
        if copy.host.numel() != part.host_buffer_bytes:
            raise EngineError(f"a copy of {copy.host.numel()} bytes is not of a model of this shape and layout")
        was_on_device = part.on_device
        if was_on_device:
            part.save_to_host()
        else:
            part.allocate()
        part.load_from_host(copy.host)
        self._other_weights = True
        try:
            yield
        finally:
            self._other_weights = False
            if was_on_device:
                assert part.host is not None, "the weights were kept before others came"
                part.load_from_host(part.host)
            else:
                part.wait()
                part.free()
                self.give_back()

    @property
    def device_bytes(self) -> dict[PartName, int]:
        """What each part occupies on the device now."""
        self._look_at_optimizer()
        return {name: part.device_bytes for name, part in self._parts.items()}

    def _look_at_optimizer(self) -> None:
        """The first step and loading a checkpoint make new tensors."""
        part = self._parts.get("optimizer")
        if part is not None and part.on_device and self._optimizer is not None:
            part.hold(self._optimizer.state_tensors())

    def _own_weights_only(self, what: str) -> None:
        if self._other_weights:
            raise EngineError(f"another model's weights are in place: nothing can be {what} before they are gone")


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
        if self._stream is None:
            return torch.empty(self.host_buffer_bytes, dtype=torch.uint8)
        return pinned_memory(self.host_buffer_bytes)

    def copy_to(self, host: Tensor) -> None:
        """Copy the contents to a host buffer; the device goes on with the storages only afterwards."""
        self.traffic.to_host_bytes += sum(self._sizes)
        self._copy(self._slots(host), self._contents())
        self.wait()

    def load_from_host(self, host: Tensor) -> None:
        self.traffic.to_device_bytes += sum(self._sizes)
        self._copy(self._contents(), self._slots(host))

    def zero(self) -> None:
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


def _flatten(models: Sequence[TokenModel]) -> list[Tensor]:
    """Return one buffer for each dtype, with all parameters as views of it; a trained model has this from Megatron."""
    buffers = []
    parameters = [parameter for model in models for parameter in model.parameters()]
    for dtype in {parameter.dtype for parameter in parameters}:
        same = [parameter for parameter in parameters if parameter.dtype == dtype]
        flat = torch.cat([parameter.data.flatten() for parameter in same])
        views = torch.split(flat, [parameter.numel() for parameter in same])
        for parameter, view in zip(same, views, strict=True):
            parameter.data = view.view_as(parameter)
        buffers.append(flat)
    return buffers


def pinned_memory(num_bytes: int) -> Tensor:
    """Return host memory that a GPU copies to and from by itself, of this size: torch rounds up to a power of two.

    Whole pages are pinned, so that no two buffers pin the same one; they are let go of with the buffer.
    """
    pages = round_up(num_bytes, mmap.PAGESIZE)
    memory = np.empty(pages + mmap.PAGESIZE, dtype=np.uint8)
    offset = -memory.ctypes.data % mmap.PAGESIZE
    address = memory.ctypes.data + offset
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if pages:
        if (code := int(runtime.cudaHostRegister(address, pages, 0))) != 0:
            raise EngineError(
                f"CUDA cannot pin {num_bytes:,} bytes of host memory (cudaHostRegister: error {code})",
                fix="give processes more locked memory (ulimit -l unlimited), or set sync.offload=false",
            )
        weakref.finalize(memory, runtime.cudaHostUnregister, address)
    return torch.from_numpy(memory)[offset : offset + num_bytes]


def free_unused_memory(device: torch.device) -> None:
    """Have torch's allocator, or on a CPU glibc's, keep nothing; what is wanted again is taken anew.

    Both keep what was freed for the process itself, and an engine is another process. On a GPU, work under way on any
    stream ends first, and buffers that an engine has let go of only since the last look count as freed.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch._C._cuda_clearCublasWorkspaces()  # 75 MB, which keep a segment of 0.6 GB from the other processes
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    elif trim := getattr(_C, "malloc_trim", None):  # other C libraries have none, and keep little
        trim(0)
