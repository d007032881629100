"""Receiving side in vLLM's workers: takes weights from the trainer rank on the same device."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from vllm.device_allocator.cumem import CuMemAllocator
from vllm.distributed.parallel_state import get_dp_group, get_pp_group, get_tensor_model_parallel_rank, get_tp_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from mrl.config.peft_settings import TENSORS_FILE
from mrl.errors import RolloutError
from mrl.weight_sync.digest import Digests
from mrl.weight_sync.ipc import IpcReceiver, socket_path
from mrl.weight_sync.vllm_adapters import ADAPTER, adapters_digest, num_pairs, slot_problem
from mrl.weight_sync.vllm_parameters import ParameterWriter, full_tensor_reason, load_full_tensors
from mrl.weight_sync.vllm_routes import RouteRecorder, Routes


class WorkerExtension:
    """Additional methods of vLLM's workers."""

    def full_tensor_reason(self) -> str:
        """Return why this worker's model cannot be written directly; empty if it can."""
        return full_tensor_reason(self.model_runner.model)  # type: ignore[attr-defined]

    def last_update_error(self) -> str:
        """Return why this worker rejected the last version; empty if it accepted it."""
        receiver: IpcTransferEngine = self.weight_transfer_engine  # type: ignore[attr-defined]
        return receiver.refused_because

    def forget_adapters(self) -> None:
        """Make vLLM compute its indices of adapters again: their memory may have been discarded."""
        self.model_runner.lora_manager._adapter_manager._last_mapping = None  # type: ignore[attr-defined]

    def loaded_adapters(self, directory: str) -> str:
        """Return how this worker's slot differs from the adapters of its stage in a directory, and the digest of their
        file, as JSON."""
        file, runner = Path(directory) / TENSORS_FILE, self.model_runner  # type: ignore[attr-defined]
        layers = range(*runner.model_config.get_layers_start_end_indices(runner.parallel_config))
        problem = slot_problem(runner.lora_manager._adapter_manager, ADAPTER, num_pairs(file, layers))
        return json.dumps([problem, adapters_digest(file)])

    def frozen_problem(self) -> str:
        """Return how this worker's weights differ from those of the last transfer; empty if they do not."""
        receiver: IpcTransferEngine = self.weight_transfer_engine  # type: ignore[attr-defined]
        return receiver.frozen_problem()

    def record_routes(self) -> None:
        """Record the experts that the routers choose from now on. All tensor ranks choose the same ones."""
        if get_tensor_model_parallel_rank() == 0:
            self.route_recorder = RouteRecorder(self.model_runner)  # type: ignore[attr-defined]

    def take_routes(self, requests: Sequence[str]) -> dict[str, Routes]:
        """Return the routes of the finished requests that this worker has computed, on the first tensor rank."""
        return self.route_recorder.take(requests) if get_tensor_model_parallel_rank() == 0 else {}

    def forget_routes(self) -> None:
        if get_tensor_model_parallel_rank() == 0:
            self.route_recorder.forget()

    def make_stage_input(self) -> None:
        """Allocate the tensors that a stage gets from the one before, which vLLM does in a first pass on GPUs only."""
        runner = self.model_runner  # type: ignore[attr-defined]
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )

    def free_memory(self, part: str) -> tuple[int, int, int]:
        """Return bytes of this worker's device: free, total, and required by vLLM's allocator to wake this part."""
        torch.cuda.empty_cache()  # vLLM does the same before it wakes
        asleep = [
            allocation for allocation in CuMemAllocator.get_instance().pointer_to_data.values() if allocation.is_asleep
        ]
        return *torch.cuda.mem_get_info(), sum(allocation.handle[1] for allocation in asleep if allocation.tag == part)


@dataclass
class ReceiverInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Sockets of a replica's workers."""

    sockets: str
    replica: str


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Version that is sent next, and its form."""

    version: int
    full: bool


class IpcTransferEngine(WeightTransferEngine[ReceiverInfo, UpdateInfo]):  # type: ignore[misc]
    """Listens while the worker lives. Checks and writes incoming weights, and answers with their digests."""

    init_info_cls = ReceiverInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: ReceiverInfo) -> None:
        self.refused_because = ""
        self._ipc = IpcReceiver(socket_path(Path(init_info.sockets), init_info.replica, _worker_number()))
        self._frozen: dict[str, str] = {}

    def start_weight_update(self) -> None:
        """Do nothing: no preparation is needed."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receive one version, or send the trainer the reason for rejecting it.

        It never raises an error: if one of several workers raises one, vLLM stops listening to the others.
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
            self._frozen = self._content() if self.vllm_config.lora_config else {}
            self._ipc.reply(digests)
        except (RolloutError, RuntimeError, ValueError) as error:
            self.refused_because = str(error)
            self._ipc.reject(self.refused_because)

    def frozen_problem(self) -> str:
        """Return which parameters have changed since the last transfer; empty if none have."""
        now = self._content()
        if changed := [name for name in now.keys() | self._frozen.keys() if now.get(name) != self._frozen.get(name)]:
            return f"{len(changed)} frozen parameters have changed since they arrived: {', '.join(sorted(changed)[:5])}"
        return ""

    def _content(self) -> dict[str, str]:
        """Return digests of the parameters as kernels read them."""
        digests = Digests()
        for name, parameter in self.model.named_parameters():
            digests.add(name, parameter)
        return digests.read()

    def finish_weight_update(self) -> None:
        """Do nothing: each module is packed as soon as all of its tensors have arrived."""

    def shutdown(self) -> None:
        self._ipc.close()

    def _tensors(self, version: int) -> Iterator[tuple[str, Tensor]]:
        for bucket in self._ipc.buckets():
            if bucket.version != version:
                raise RolloutError(f"the trainer sends version {bucket.version} instead of version {version}")
            yield from bucket.tensors.items()


def _worker_number() -> int:
    """Return the number of this worker in its engine."""
    stage = get_dp_group().rank_in_group * get_pp_group().world_size + get_pp_group().rank_in_group
    return int(stage * get_tp_group().world_size + get_tensor_model_parallel_rank())
