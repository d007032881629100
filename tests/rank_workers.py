"""Workers that the controller's tests run in real processes."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import signal
import tempfile
import time

import ray
import torch
import torch.distributed

from mrl.controller import Dispatch, RankInfo, Worker, register
from mrl.errors import BatchError
from mrl.protocol import DataProto
from mrl.protocol.columns import jagged


class FollowedWorker(Worker):
    """Rank 0 is called, and the other ranks work for it."""

    @register(Dispatch.FOLLOWERS)
    def follow(self) -> None:
        time.sleep(600)

    @register(Dispatch.RANK_ZERO)
    def who(self, for_s: float = 0.0) -> int:
        time.sleep(for_s)
        return self.rank


class RankWorker(Worker):
    """Reports its place, computes on columns, and misbehaves on request."""

    def __init__(self, place: RankInfo, greeting: str = "hello", fail_on_rank: int = -1) -> None:
        super().__init__(place)
        self.greeting = greeting
        self.notes: list[int] = []
        if fail_on_rank == self.rank:
            raise ValueError("this rank cannot start")

    @register(Dispatch.ONE_TO_ALL)
    def greet(self, name: str) -> str:
        return f"{self.greeting} {name} from {self.rank} of {self.world_size}"

    @register(Dispatch.ONE_TO_ALL)
    def where(self) -> tuple[str, int]:
        return ray.get_runtime_context().get_node_id(), self.place.local_rank

    @register(Dispatch.ONE_TO_ALL)
    def network(self) -> dict[str, str | None]:
        return {name: os.environ.get(name) for name in ("MASTER_ADDR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}

    @register(Dispatch.RANK_ZERO)
    def temporary_directory(self) -> str:
        return tempfile.gettempdir()

    @register(Dispatch.RANK_ZERO)
    def who(self) -> int:
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    def nothing(self) -> None:
        return None

    @register(Dispatch.ONE_TO_ALL)
    def note(self, number: int) -> None:
        self.notes.append(number)

    @register(Dispatch.RANK_ZERO)
    def note_alone(self, number: int) -> None:
        self.notes.append(number)

    @register(Dispatch.ONE_TO_ALL)
    def noted(self) -> list[int]:
        return self.notes

    @register(Dispatch.ONE_TO_ALL)
    def join(self) -> float:
        """Meet the other ranks and add up the rank numbers."""
        self.init_process_group("gloo", timeout_s=60)
        return self.all_reduce()

    def all_reduce(self) -> float:
        total = torch.tensor([float(self.rank)])
        torch.distributed.all_reduce(total)
        return float(total)

    @register(Dispatch.DATA_PARALLEL, reads=("prompts",), writes=("responses", "rollout_log_probs", "scores"))
    def generate(self, batch: DataProto, extra: int) -> DataProto:
        """Return responses that are `extra` tokens longer than the prompts. Each token is this shard's number."""
        lengths = batch.lengths("prompts") + extra
        values = torch.full((int(lengths.sum()),), self.place.coordinates.dp, dtype=torch.int32)
        return DataProto.from_dict(
            {
                "responses": jagged(values, lengths),
                "rollout_log_probs": jagged(-values.float(), lengths),
                "scores": torch.from_numpy(lengths).float(),
            },
            meta_info={"rank": self.rank},
            row_ids=batch.row_ids,
        )

    @register(Dispatch.DATA_PARALLEL, reads=("responses", "uid"))
    def count(self, batch: DataProto) -> dict[str, object]:
        """Return a description of this shard."""
        return {
            "rank": self.rank,
            "row_ids": batch.row_ids.tolist(),
            "uid": batch["uid"].tolist(),
            "tokens": int(batch.lengths("responses").sum()),
            "made_by": sorted({int(value) for value in batch.values("responses")}),
            "columns": sorted(batch.columns()),
        }

    @register(Dispatch.DATA_PARALLEL, reads=("prompts",), writes=("values",))
    def forget_a_column(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict({"vaules": batch["prompts"]}, row_ids=batch.row_ids)

    @register(Dispatch.ONE_TO_ALL)
    def die(self, rank: int, after_s: float, by: int = signal.SIGKILL) -> float:
        """Kill one rank before all others enter a collective."""
        if self.rank == rank:
            print("about to be killed", flush=True)
            time.sleep(after_s)
            os.kill(os.getpid(), by)
        return self.all_reduce()

    @register(Dispatch.ONE_TO_ALL)
    def raise_on(self, rank: int) -> float:
        """Raise on one rank before all others enter a collective."""
        if self.rank == rank:
            raise BatchError("row 7 is bad", where=f"rank {rank}", fix="leave it out")
        return self.all_reduce()

    @register(Dispatch.ONE_TO_ALL)
    def raise_alone(self, rank: int) -> int:
        """Raise on one rank and answer on the others, so that they are out of step from now on."""
        if self.rank == rank:
            raise BatchError("row 9 is bad")
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    def raise_everywhere(self) -> None:
        raise BatchError("every rank says the same")

    @register(Dispatch.ONE_TO_ALL)
    def stop_on(self, rank: int) -> float:
        """Stop one rank before all others enter a collective."""
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGSTOP)
        return self.all_reduce()

    @register(Dispatch.ONE_TO_ALL)
    def spin_on(self, rank: int) -> float:
        """Compute forever on one rank while all others enter a collective."""
        if self.rank == rank:
            self.spin_for_ever()
        return self.all_reduce()

    def spin_for_ever(self) -> None:
        while True:
            sum(range(1000))

    @register(Dispatch.RANK_ZERO)
    def fill_shared_memory(self) -> None:
        """Write more bytes to /dev/shm than its size."""
        num_bytes = 2 * shutil.disk_usage("/dev/shm").total
        with open("/dev/shm/large", "w+b") as file:
            file.truncate(num_bytes)
            memory = mmap.mmap(file.fileno(), num_bytes)
            for begin in range(0, num_bytes, mmap.PAGESIZE):
                memory[begin] = 1

    @register(Dispatch.RANK_ZERO)
    def hang_in_c(self, holds_gil: bool) -> None:
        """Block in C on reading an empty pipe, with or without the interpreter's lock."""
        library = (ctypes.PyDLL if holds_gil else ctypes.CDLL)(None)
        library.read(os.pipe()[0], ctypes.create_string_buffer(1), 1)

    @register(Dispatch.ONE_TO_ALL)
    def leave(self, status: int) -> None:
        os._exit(status)

    @register(Dispatch.ONE_TO_ALL)
    def set_canary(self, value: str) -> None:
        os.environ["CANARY_API_KEY"] = value

    @register(Dispatch.ONE_TO_ALL)
    def say_secret(self) -> int:
        print("the key is", os.environ["CANARY_API_KEY"], flush=True)
        return os.getpid()
