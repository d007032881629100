"""Exchange of slices between ranks through small buffers: messages are cut to fit, with one peer at a time."""

from __future__ import annotations

import datetime
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.dtypes import torch_dtype
from mrl.models.fp8_scales import FP8
from mrl.models.regions import Region, extent, num_elements, slices
from mrl.weight_sync.fp8 import Fp8Source
from mrl.weight_sync.intersections import RegionCopy, ShardRegion
from mrl.weight_sync.planner import PlannedBucket, RankPlan, Transfer

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

Held = Mapping[tuple[int, str], Tensor]
"""Local Megatron parameters by pipeline chunk and name."""
_NUM_BUFFERS = 4
_FP8 = torch_dtype(FP8)
_index = cache(slices)  # layers of a kind share their boxes


class MessageRound(NamedTuple):
    """One message to a rank and one from another rank; either may be empty."""

    destination: int
    sent: list[Transfer]
    source: int
    received: list[Transfer]


def message_schedule(plan: RankPlan, bucket: PlannedBucket, limit: int) -> list[MessageRound]:
    """Return the messages of a bucket, with at most `limit` elements each.

    The ranks form a circle: each sends to the rank `shift` places ahead and receives from the rank `shift` places
    behind. All ranks use the same order of shifts, so no two ranks wait for each other forever.
    """
    rank, num_ranks = plan.rank, plan.num_ranks
    shifts = {(peer - rank) % num_ranks for peer in bucket.outgoing}
    shifts |= {(rank - peer) % num_ranks for peer in bucket.incoming}
    rounds: list[MessageRound] = []
    for shift in sorted(shifts - {0}):
        destination, source = (rank + shift) % num_ranks, (rank - shift) % num_ranks
        sent = split_messages(bucket.outgoing.get(destination, []), limit)
        received = split_messages(bucket.incoming.get(source, []), limit)
        pairs = zip_longest(sent, received)
        rounds += [MessageRound(destination, outgoing or [], source, incoming or []) for outgoing, incoming in pairs]
    return rounds


def split_messages(transfers: Sequence[Transfer], limit: int) -> list[list[Transfer]]:
    """Split the transfers into runs of at most `limit` elements. Transfers that do not fit are cut between rows.

    Example: a matrix of 3 rows and 4 columns and a vector of 5, in messages of 8. The runs are rows 0 and 1 of the
    matrix; its row 2 and four elements of the vector; the last element.
    """
    runs: list[list[Transfer]] = []
    room = 0
    for transfer in transfers:
        for part in [transfer] if transfer.region.num_elements <= room else _by_slice(transfer):
            (start, stop), size = part.region.copies[0].source[0], part.region.num_elements
            width = 1 if size <= room else size // (stop - start)
            assert width <= limit, f"a row of {width} elements exceeds messages of {limit}: a bucket holds several rows"
            while size > 0:
                if room < width:
                    runs.append([])
                    room = limit
                fitting = size if size <= room else room // width * width
                runs[-1].append(part if fitting == part.region.num_elements else _rows(part, size, fitting, width))
                size, room = size - fitting, room - fitting
    return runs


def _by_slice(transfer: Transfer) -> Iterator[Transfer]:
    for region_copy in transfer.region.copies:
        yield transfer._replace(region=ShardRegion((region_copy,), num_elements(region_copy.source)))


def _rows(transfer: Transfer, left: int, fitting: int, width: int) -> Transfer:
    """Return the next `fitting` elements, in whole rows, of a single slice with `left` elements left."""
    (region_copy,) = transfer.region.copies
    begin = (transfer.region.num_elements - left) // width
    end = begin + fitting // width
    source, target = (
        ((box[0][0] + begin, box[0][0] + end), *box[1:]) for box in (region_copy.source, region_copy.target)
    )
    return transfer._replace(region=ShardRegion((RegionCopy(region_copy.name, source, target),), fitting))


class WeightExchange:
    """Executes message rounds and counts the traffic. The next message is packed while one is under way."""

    def __init__(
        self, held: Held, transport: P2PTransport, limit_bytes: int, quantized: Fp8Source | None = None
    ) -> None:
        self._held, self._transport, self._quantized = held, transport, quantized
        self._buffers = torch.empty(_NUM_BUFFERS, limit_bytes // 4, dtype=torch.float32, device=transport.device)
        self.extra_bytes = self._buffers.nbytes
        self.bytes_sent = self.bytes_received = self.num_transfers = 0

    def run(
        self,
        planned: Sequence[MessageRound],
        receiving_ranks: Collection[int],
        matrices: Sequence[Tensor] | None,
        dtype: torch.dtype,
    ) -> None:
        """Send to the receiving ranks, in messages of that dtype.

        Incoming messages go into the matrices; without matrices, nothing is received.
        """
        receives = self._transport.rank in receiving_ranks
        buffers = self._buffers.view(dtype)
        pending: tuple[Sequence[dist.Work], list[Transfer], Tensor] = [], [], buffers[0]
        for number, step in enumerate(planned):
            outgoing, incoming = buffers[:2] if number % 2 else buffers[2:]
            out: dict[int, Tensor] = {}
            into: dict[int, Tensor] = {}
            if step.sent and step.destination in receiving_ranks:
                out[step.destination] = message = _as_bytes(self._pack(step.sent, outgoing))
                self.bytes_sent += message.nbytes
                self.num_transfers += 1
            if step.received and receives:
                message = incoming[: sum(transfer.region.num_elements for transfer in step.received)]
                into[step.source] = message = _as_bytes(message)
                self.bytes_received += message.nbytes
            started = self._transport.start(out, into)
            _finish(*pending, matrices)
            pending = started, step.received if receives else [], incoming
        _finish(*pending, matrices)

    def copy_local(self, transfers: Sequence[Transfer], matrices: Sequence[Tensor]) -> None:
        for transfer in transfers:
            matrix = matrices[transfer.tensor]
            for region_copy in transfer.region.copies:
                self._copy(transfer, region_copy, matrix[_index(region_copy.target)])

    def _copy(self, transfer: Transfer, region_copy: RegionCopy, target: Tensor) -> None:
        key = transfer.site.chunk, transfer.site.prefix + region_copy.name
        if self._quantized is None or target.dtype != _FP8:
            scales = {} if self._quantized is None else self._quantized.scales
            source = scales[key] if key in scales else self._held[key]
            target.copy_(source[_index(region_copy.source)].view(target.shape))
        else:
            self._quantized.quantize(key, region_copy.source, target)

    def _pack(self, transfers: Sequence[Transfer], buffer: Tensor) -> Tensor:
        end = 0
        for transfer in transfers:
            for region_copy in transfer.region.copies:
                shape, strides, size = _contiguous(region_copy.source)
                self._copy(transfer, region_copy, buffer.as_strided(shape, strides, buffer.storage_offset() + end))
                end += size
        return buffer[:end]


def _as_bytes(message: Tensor) -> Tensor:
    """Return a message in a type that every transport has."""
    return message.view(torch.uint8) if message.dtype == _FP8 else message


def _finish(
    works: Sequence[dist.Work], transfers: Sequence[Transfer], buffer: Tensor, matrices: Sequence[Tensor] | None
) -> None:
    """Wait for the messages, and unpack the received one."""
    for work in works:
        work.wait()
    if matrices is None:
        return
    end = 0
    for transfer in transfers:
        for region_copy in transfer.region.copies:
            shape, strides, size = _contiguous(region_copy.target)
            packed = buffer.as_strided(shape, strides, buffer.storage_offset() + end)
            matrices[transfer.tensor][_index(region_copy.target)].copy_(packed)
            end += size


@cache
def _contiguous(box: Region) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Return shape, strides and number of elements of a contiguous box of this extent."""
    shape = extent(box)
    strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return shape, strides, math.prod(shape)


class WorldTransport:
    """Point-to-point messages in the trainer's own world, for engines on the trainer's devices."""

    def __init__(self, device: torch.device) -> None:
        self.rank, self.device = dist.get_rank(), device

    def start(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> Sequence[dist.Work]:
        """Start to send and receive buffers, by rank, as one batch. Do not touch the buffers until the work is done."""
        messages = [dist.P2POp(dist.isend, buffer, rank) for rank, buffer in outgoing.items()]
        messages += [dist.P2POp(dist.irecv, buffer, rank) for rank, buffer in incoming.items()]
        return dist.batch_isend_irecv(messages) if messages else []

    def barrier(self) -> None:
        dist.barrier()


class JoinedTransport:
    """A world of trainer ranks and receivers on the engines' devices.

    Megatron uses torch's default world, so this one is a separate process group that no other call can reach.
    """

    def __init__(self, store: Store, rank: int, size: int, device: torch.device, timeout_s: float) -> None:
        self.rank, self.device = rank, device
        timeout = datetime.timedelta(seconds=timeout_s)
        # torch has no type information for the constructors and messages of its process groups.
        self._group: Any
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            self._group = dist.ProcessGroupGloo(store, rank, size, timeout)

    def start(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> Sequence[dist.Work]:
        """Send and receive one by one. Each pair of ranks has a separate connection, so no pair blocks another."""
        works = [self._group.send([buffer], rank, 0) for rank, buffer in outgoing.items()]
        return works + [self._group.recv([buffer], rank, 0) for rank, buffer in incoming.items()]

    def barrier(self) -> None:
        self._group.barrier().wait()


P2PTransport: TypeAlias = WorldTransport | JoinedTransport
