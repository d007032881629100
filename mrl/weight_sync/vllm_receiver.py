"""What runs inside vLLM's workers: takes the weights that a trainer rank of the same device hands over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from vllm.device_allocator.cumem import CuMemAllocator
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from mrl.errors import RolloutError
from mrl.weight_sync.ipc import IpcReceiver, socket_path
from mrl.weight_sync.vllm_parameters import ParameterWriter, full_tensor_reason, load_full_tensors


class WorkerExtension:
    """Methods that vLLM's workers get beside their own."""

    def full_tensor_reason(self) -> str:
        """Return why this worker's model cannot be written directly; empty where it can."""
        return full_tensor_reason(self.model_runner.model)  # type: ignore[attr-defined]

    def last_update_error(self) -> str:
        """Return why this worker did not take the last version; empty where it did."""
        receiver: IpcTransferEngine = self.weight_transfer_engine  # type: ignore[attr-defined]
        return receiver.refused_because

    def free_memory(self, part: str) -> tuple[int, int, int]:
        """Of this worker's device: free bytes, all, and those that vLLM's allocator takes from the driver to wake."""
        torch.cuda.empty_cache()  # as vLLM does before it wakes
        asleep = [each for each in CuMemAllocator.get_instance().pointer_to_data.values() if each.is_asleep]
        return *torch.cuda.mem_get_info(), sum(each.handle[1] for each in asleep if each.tag == part)


@dataclass
class ReceiverInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Where the workers of a replica listen."""

    sockets: str
    replica: str


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Which version is to come, and in which form."""

    version: int
    full: bool


class IpcTransferEngine(WeightTransferEngine[ReceiverInfo, UpdateInfo]):  # type: ignore[misc]
    """Listens as long as the worker lives; what it was sent it checks, writes, and answers with digests."""

    init_info_cls = ReceiverInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: ReceiverInfo) -> None:
        self.refused_because = ""
        path = socket_path(Path(init_info.sockets), init_info.replica, get_tensor_model_parallel_rank())
        self._ipc = IpcReceiver(path)

    def start_weight_update(self) -> None:
        """Nothing to prepare."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Take in one version, or tell the trainer why not.

        Nothing is raised: where one of several workers raises, vLLM no longer listens to the others.
        """
        self.refused_because = ""
        try:
            if update_info.full:
                digests = load_full_tensors(self.model, self.model_config, self._tensors(update_info.version))
            else:
                weights = ParameterWriter(self.model)
                for name, tensor in self._tensors(update_info.version):
                    weights.write(name, tensor)
                digests = weights.finish()
            self._ipc.reply(digests)
        except (RolloutError, RuntimeError, ValueError) as error:
            self.refused_because = str(error)
            self._ipc.reject(self.refused_because)

    def finish_weight_update(self) -> None:
        """Nothing to finish: modules are packed as soon as all of theirs has arrived."""

    def shutdown(self) -> None:
        self._ipc.close()

    def _tensors(self, version: int) -> Iterator[tuple[str, Tensor]]:
        for bucket in self._ipc.buckets():
            if bucket.version != version:
                raise RolloutError(f"the trainer sends version {bucket.version}, but version {version} was asked for")
            yield from bucket.tensors.items()
