"""Slices from rank to rank through small buffers: each message is cut to fit, and each rank has one peer at a time."""

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

from mrl.models.regions import Region, extent, num_elements, slices
from mrl.weight_sync.intersections import RegionCopy, ShardRegion
from mrl.weight_sync.planner import PlannedBucket, RankPlan, Transfer

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

Held = Mapping[tuple[int, str], Tensor]
"""Local Megatron parameters by pipeline chunk and name."""
_NUM_BUFFERS = 4
_index = cache(slices)  # layers of a kind share their boxes


class MessageRound(NamedTuple):
    """One message to one rank and one from another; either may be empty."""

    destination: int
    sent: list[Transfer]
    source: int
    received: list[Transfer]


def message_schedule(plan: RankPlan, bucket: PlannedBucket, limit: int) -> list[MessageRound]:
    """Return the messages of a bucket, of at most `limit` elements each.

    Every rank goes around the circle: it sends to the one `shift` places on and receives from the one as far back. All
    do so in the same order and nobody waits in another, so nobody waits for ever.
    """
    rank, num_ranks = plan.rank, plan.num_ranks
    shifts = {(other - rank) % num_ranks for other in bucket.outgoing}
    shifts |= {(rank - other) % num_ranks for other in bucket.incoming}
    found: list[MessageRound] = []
    for shift in sorted(shifts - {0}):
        destination, source = (rank + shift) % num_ranks, (rank - shift) % num_ranks
        sent = split_messages(bucket.outgoing.get(destination, []), limit)
        received = split_messages(bucket.incoming.get(source, []), limit)
        pairs = zip_longest(sent, received)
        found += [MessageRound(destination, out or [], source, into or []) for out, into in pairs]
    return found


def split_messages(transfers: Sequence[Transfer], limit: int) -> list[list[Transfer]]:
    """Return the same transfers in runs of at most `limit` elements; what does not fit into a run is cut between rows.

    A matrix of 3 rows and 4 columns and a vector of 5, in messages of 8: rows 0 and 1 of the matrix; its row 2 and four
    elements of the vector; the last one.
    """
    runs: list[list[Transfer]] = []
    room = 0
    for transfer in transfers:
        for each in [transfer] if transfer.region.num_elements <= room else _by_slice(transfer):
            (start, stop), size = each.region.copies[0].source[0], each.region.num_elements
            width = 1 if size <= room else size // (stop - start)
            assert width <= limit, f"a row of {width} elements in messages of {limit}: a bucket holds several rows"
            while size > 0:
                if room < width:
                    runs.append([])
                    room = limit
                fitting = size if size <= room else room // width * width
                runs[-1].append(each if fitting == each.region.num_elements else _rows(each, size, fitting, width))
                size, room = size - fitting, room - fitting
    return runs


def _by_slice(transfer: Transfer) -> Iterator[Transfer]:
    for each in transfer.region.copies:
        yield transfer._replace(region=ShardRegion((each,), num_elements(each.source)))


def _rows(transfer: Transfer, left: int, fitting: int, width: int) -> Transfer:
    """Of a single slice of which `left` elements are left, the rows that make up the next `fitting`."""
    (each,) = transfer.region.copies
    begin = (transfer.region.num_elements - left) // width
    end = begin + fitting // width
    source, target = (((box[0][0] + begin, box[0][0] + end), *box[1:]) for box in (each.source, each.target))
    return transfer._replace(region=ShardRegion((RegionCopy(each.name, source, target),), fitting))


class WeightExchange:
    """Moves what steps say, and counts it as it passes. While one message is under way the next is packed."""

    def __init__(self, held: Held, transport: P2PTransport, dtype: torch.dtype, limit: int) -> None:
        self._held, self._transport = held, transport
        self._buffers = torch.empty(_NUM_BUFFERS, limit, dtype=dtype, device=transport.device)
        self.extra_bytes = self._buffers.nbytes
        self.bytes_sent = self.bytes_received = self.num_transfers = 0

    def run(
        self, planned: Sequence[MessageRound], receiving_ranks: Collection[int], matrices: Sequence[Tensor] | None
    ) -> None:
        """Send to the ranks that receive; what comes in goes into the matrices, or nowhere without them."""
        takes = self._transport.rank in receiving_ranks
        waiting: tuple[Sequence[dist.Work], list[Transfer], Tensor] = [], [], self._buffers[0]
        for number, step in enumerate(planned):
            outgoing, incoming = self._buffers[:2] if number % 2 else self._buffers[2:]
            out: dict[int, Tensor] = {}
            into: dict[int, Tensor] = {}
            if step.sent and step.destination in receiving_ranks:
                out[step.destination] = message = self._pack(step.sent, outgoing)
                self.bytes_sent += message.nbytes
                self.num_transfers += 1
            if step.received and takes:
                message = incoming[: sum(transfer.region.num_elements for transfer in step.received)]
                into[step.source] = message
                self.bytes_received += message.nbytes
            started = self._transport.start(out, into)
            _finish(*waiting, matrices)
            waiting = started, step.received if takes else [], incoming
        _finish(*waiting, matrices)

    def copy_local(self, transfers: Sequence[Transfer], matrices: Sequence[Tensor]) -> None:
        for transfer in transfers:
            matrix = matrices[transfer.tensor]
            for each in transfer.region.copies:
                matrix[_index(each.target)].copy_(self._source(transfer, each))

    def _source(self, transfer: Transfer, each: RegionCopy) -> Tensor:
        return self._held[transfer.site.chunk, transfer.site.prefix + each.name][_index(each.source)]

    def _pack(self, transfers: Sequence[Transfer], buffer: Tensor) -> Tensor:
        end = 0
        for transfer in transfers:
            for each in transfer.region.copies:
                shape, strides, size = _contiguous(each.source)
                buffer.as_strided(shape, strides, buffer.storage_offset() + end).copy_(self._source(transfer, each))
                end += size
        return buffer[:end]


def _finish(
    works: Sequence[dist.Work], transfers: Sequence[Transfer], buffer: Tensor, matrices: Sequence[Tensor] | None
) -> None:
    """Wait for messages, and unpack the one that came in."""
    for work in works:
        work.wait()
    if matrices is None:
        return
    end = 0
    for transfer in transfers:
        for each in transfer.region.copies:
            shape, strides, size = _contiguous(each.target)
            packed = buffer.as_strided(shape, strides, buffer.storage_offset() + end)
            matrices[transfer.tensor][_index(each.target)].copy_(packed)
            end += size


@cache
def _contiguous(box: Region) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Return shape, strides and elements of a box that lies by itself."""
    shape = extent(box)
    strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return shape, strides, math.prod(shape)


class WorldTransport:
    """Point-to-point messages in the trainer's own world: engines on its devices need nobody else."""

    def __init__(self, device: torch.device) -> None:
        self.rank, self.device = dist.get_rank(), device

    def start(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> Sequence[dist.Work]:
        """Begin to send and receive buffers, by rank, as one batch; nobody touches them before the work is done."""
        messages = [dist.P2POp(dist.isend, buffer, rank) for rank, buffer in outgoing.items()]
        messages += [dist.P2POp(dist.irecv, buffer, rank) for rank, buffer in incoming.items()]
        return dist.batch_isend_irecv(messages) if messages else []

    def barrier(self) -> None:
        dist.barrier()


class JoinedTransport:
    """A world of trainer ranks and of receivers, who stand on the engines' devices.

    Megatron takes torch's default world for its own, so this one is a process group beside it, which no other call
    can reach.
    """

    def __init__(self, store: Store, rank: int, size: int, device: torch.device, timeout_s: float) -> None:
        self.rank, self.device = rank, device
        timeout = datetime.timedelta(seconds=timeout_s)
        # torch's types know neither the constructors of its process groups nor their messages.
        self._group: Any
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            self._group = dist.ProcessGroupGloo(store, rank, size, timeout)

    def start(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> Sequence[dist.Work]:
        """Send and receive one by one: each pair of ranks has a connection of its own, so none waits for another."""
        works = [self._group.send([buffer], rank, 0) for rank, buffer in outgoing.items()]
        return works + [self._group.recv([buffer], rank, 0) for rank, buffer in incoming.items()]

    def barrier(self) -> None:
        self._group.barrier().wait()


P2PTransport: TypeAlias = WorldTransport | JoinedTransport
