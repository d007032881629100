"""Movement of a model's parameters, gradients and optimizer state between device and host.

Unnecessary copies are avoided: gradients are dropped and restored as zeros, and weights that have not changed since
their last host copy are freed without a new copy. The frozen reference model is a host copy that temporarily replaces
the actor's weights.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from mrl.errors import EngineError
from mrl.rounding import round_up

PartName = Literal["parameters", "gradients", "optimizer"]
FROZEN = "frozen"
"""Part of a model with adapters: its own weights. They never change, and move together with the parameters."""
_ALIGNMENT_BYTES = 64
_C = ctypes.CDLL(None)


@dataclass(frozen=True)
class WeightCopy:
    """A rank's parameters of a model, in one flat host buffer."""

    host: Tensor


class DeviceMemory:
    """The parts of one rank's model, their location, and the copies between device and host."""

    def __init__(
        self,
        tensors: Mapping[str, Sequence[Tensor]],
        device: torch.device,
        state_tensors: Callable[[], Sequence[Tensor]] | None = None,
    ) -> None:
        """Hold the tensors of each part, each with its own storage. `state_tensors` returns those of the optimizer, of
        which there are more after its first step."""
        self.traffic = CopyStats()
        self._device = device
        self._state_tensors = state_tensors
        self._other_weights = False
        stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._parts = {name: HostMirroredStorage(held, self.traffic, stream) for name, held in tensors.items()}
        for part in self._parts.values():
            part.users.add(id(self))

    def share_frozen(self, other: DeviceMemory) -> None:
        """Use the frozen weights of another model in this process. They leave the device when both are offloaded."""
        part = self._parts[FROZEN] = other._parts[FROZEN]
        part.users.add(id(self))

    def offload(self, *names: PartName) -> None:
        """Free the device memory of these parts. Parts that are on the host or that the model does not have are
        skipped.

        Other processes can use the memory afterwards, together with all memory that was freed before.
        """
        self._own_weights_only("offloaded")
        for name in self._moved_with(names):
            part = self._parts.get(name)
            if part is None or not part.on_device:
                continue
            part.users.discard(id(self))
            if part.users:
                continue
            if name == "optimizer":
                self._look_at_optimizer()
            if name != "gradients":
                part.save_to_host()
            part.free()
        self.give_back()

    def give_back(self) -> None:
        """Release freed memory to other processes. Call this when the process pauses its work."""
        free_unused_memory(self._device)

    def onload(self, *names: PartName) -> None:
        """Copy these parts back to the device. Copies are asynchronous: users of a part wait for its copy."""
        for name in self._moved_with(names):
            part = self._parts.get(name)
            if part is not None:
                part.users.add(id(self))
            if part is None or part.on_device:
                continue
            part.allocate()
            if name == "gradients":
                part.zero()
            else:
                assert part.host is not None, f"{name} left the device without a copy"
                part.load_from_host(part.host)

    def check(self, *names: PartName) -> None:
        """Raise an error if one of these parts is not on the device."""
        for name in names:
            if name not in self._parts:
                raise EngineError(f"this engine is not trained: it has no {name}")
            if not self._parts[name].on_device:
                raise EngineError(
                    f"the model's {name} are not on the device", fix=f'call memory.onload("{name}") first'
                )
            if name != "parameters":
                self._own_weights_only("trained")

    def need(self, *names: PartName) -> None:
        """Check these parts, and make the device wait for their copies."""
        self.check(*names)
        for name in self._moved_with(names):
            self._parts[name].wait()

    def _moved_with(self, names: Sequence[PartName]) -> list[str]:
        """Return the parts that move if these are moved."""
        return [*names, *([FROZEN] if "parameters" in names and FROZEN in self._parts else [])]

    def changed(self) -> None:
        """Mark host copies as outdated, after weights and optimizer state have changed."""
        for name, part in self._parts.items():
            if name != FROZEN:
                part.host_is_current = False

    def copy_weights(self) -> WeightCopy:
        """Return a copy of the current weights for `weights_of`."""
        self.need("parameters")
        part = self._parts["parameters"]
        copy = WeightCopy(part.new_host_buffer())
        part.copy_to(copy.host)
        return copy

    @contextmanager
    def weights_of(self, copy: WeightCopy) -> Iterator[None]:
        """Replace this model's weights for the block, for forward passes only; restore its own weights afterwards.

        The copy must come from this engine, or from a trained engine with the same model and layout.
        """
        self._own_weights_only("replaced")
        part = self._parts["parameters"]
        if copy.host.numel() != part.host_buffer_bytes:
            raise EngineError(f"a copy of {copy.host.numel()} bytes does not fit a model of this shape and layout")
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
                assert part.host is not None, "the weights were saved before they were replaced"
                part.load_from_host(part.host)
            else:
                part.wait()
                part.free()
                self.give_back()

    @property
    def device_bytes(self) -> dict[PartName, int]:
        """Current size of each part on the device."""
        self._look_at_optimizer()
        sizes = {name: part.device_bytes for name, part in self._parts.items()}
        frozen = sizes.pop(FROZEN, 0)
        return {"parameters": sizes.pop("parameters") + frozen, **sizes}  # type: ignore[dict-item]

    def _look_at_optimizer(self) -> None:
        """Update the list of tensors: the first step and loading a checkpoint create new ones."""
        part = self._parts.get("optimizer")
        if part is not None and part.on_device and self._state_tensors is not None:
            part.hold(self._state_tensors())

    def _own_weights_only(self, action: str) -> None:
        if self._other_weights:
            raise EngineError(f"another model's weights are loaded: nothing can be {action} until they are removed")


class FlatOptimizer(Protocol):
    """An optimizer whose parameters and gradients are views of flat buffers."""

    @property
    def buffers(self) -> Sequence[Any]: ...

    def state_tensors(self) -> Sequence[Tensor]: ...


def memory_of(
    models: Sequence[torch.nn.Module],
    optimizer: FlatOptimizer | None,
    device: torch.device,
    frozen: Sequence[Tensor] = (),
) -> DeviceMemory:
    """Return the memory of a model in Megatron's buffers, or of a frozen model."""
    parameters = [parameter for model in models for parameter in model.parameters()]
    if optimizer is None:
        return DeviceMemory({"parameters": [*_flatten(parameters), *frozen]}, device)
    tensors = {
        "parameters": [buffer.param_data for buffer in optimizer.buffers],
        "gradients": [buffer.grad_data for buffer in optimizer.buffers],
        "optimizer": list(optimizer.state_tensors()),
    }
    untrained = [parameter for parameter in parameters if not parameter.requires_grad]
    if untrained:
        tensors[FROZEN] = [*(parameter.data for parameter in untrained), *frozen]  # each has its own storage
    else:
        tensors["parameters"] += frozen  # the buffers of the table belong to the weights of a model
    return DeviceMemory(tensors, device, optimizer.state_tensors)


@dataclass
class CopyStats:
    """Bytes copied since the model was created."""

    to_host_bytes: int = 0
    to_device_bytes: int = 0


class HostMirroredStorage:
    """Tensors with one storage each, and one flat host buffer (pinned on machines with a GPU) for their contents.

    Copies run on a separate stream. Device work after `wait` runs after them.
    """

    def __init__(self, tensors: Sequence[Tensor], traffic: CopyStats, stream: torch.cuda.Stream | None) -> None:
        self.traffic = traffic
        self.on_device = True
        self.users: set[int] = set()
        """Models on the device that use these tensors: two roles may share a frozen model."""
        self.host: Tensor | None = None
        self.host_is_current = False
        self._stream = stream
        self._arrived: torch.cuda.Event | None = None
        self.hold(tensors)

    def hold(self, tensors: Sequence[Tensor]) -> None:
        """Replace the list of tensors. They must be on the device."""
        self._storages = [tensor.untyped_storage() for tensor in tensors]
        self._sizes = [storage.nbytes() for storage in self._storages]

    @property
    def device_bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._storages)

    @property
    def host_buffer_bytes(self) -> int:
        """Size of a host buffer for all contents, each aligned."""
        return sum(round_up(size, _ALIGNMENT_BYTES) for size in self._sizes)

    def save_to_host(self) -> None:
        """Copy the current contents to the host, unless they are already there."""
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
        """Copy the contents to a host buffer. Later device work on the storages waits for the copy."""
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
        """Return the device memory to torch's allocator."""
        if not all(storage.resizable() for storage in self._storages):
            raise EngineError(
                "memory that numpy has seen cannot leave the device", fix="give numpy a copy of the tensor"
            )
        for storage in self._storages:
            storage.resize_(0)
        self.on_device = False

    def allocate(self) -> None:
        """Allocate device memory again, with arbitrary contents."""
        for storage, size in zip(self._storages, self._sizes, strict=True):
            storage.resize_(size)
        self.on_device = True

    def wait(self) -> None:
        """Make the device wait for the last copy, without blocking the program."""
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
        return [torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage) for storage in self._storages]

    def _slots(self, host: Tensor) -> list[Tensor]:
        slots = torch.split(host, [round_up(size, _ALIGNMENT_BYTES) for size in self._sizes])
        return [slot[:size] for slot, size in zip(slots, self._sizes, strict=True)]


def _flatten(parameters: Sequence[torch.nn.Parameter]) -> list[Tensor]:
    """Return one buffer per dtype, and make all parameters views of it. Megatron does this for trained models."""
    buffers = []
    for dtype in {parameter.dtype for parameter in parameters}:
        of_dtype = [parameter for parameter in parameters if parameter.dtype == dtype]
        flat = torch.cat([parameter.data.flatten() for parameter in of_dtype])
        views = torch.split(flat, [parameter.numel() for parameter in of_dtype])
        for parameter, view in zip(of_dtype, views, strict=True):
            parameter.data = view.view_as(parameter)
        buffers.append(flat)
    return buffers


def pinned_memory(num_bytes: int) -> Tensor:
    """Return pinned host memory of exactly this size: torch rounds up to a power of two.

    Whole pages are pinned, so that no two buffers pin the same page. They are unpinned when the buffer is freed.
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
                fix="raise the limit of locked memory (ulimit -l unlimited), or set sync.offload=false",
            )
        weakref.finalize(memory, runtime.cudaHostUnregister, address)
    return torch.from_numpy(memory)[offset : offset + num_bytes]


def free_unused_memory(device: torch.device) -> None:
    """Empty the cache of torch's allocator or, on a CPU, glibc's.

    Both cache freed memory for their own process, but engines are separate processes. On a GPU this first waits for
    work on all streams, and also frees buffers that an engine has released since the last call.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch._C._cuda_clearCublasWorkspaces()  # 75 MB, which keep a segment of 0.6 GB from the other processes
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    elif trim := getattr(_C, "malloc_trim", None):  # other C libraries have no such function, and cache little
        trim(0)
