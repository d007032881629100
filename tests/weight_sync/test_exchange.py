"""Messages of an exchange: their size, their order, and the arrival of their contents."""

from __future__ import annotations

import datetime
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from mrl.controller import Rendezvous
from mrl.models.regions import Region, num_elements
from mrl.models.rollout_table import EngineSizes
from mrl.weight_sync.exchange import (
    JoinedTransport,
    MessageRound,
    P2PTransport,
    WeightExchange,
    message_schedule,
    split_messages,
)
from mrl.weight_sync.intersections import RegionCopy, ShardRegion
from mrl.weight_sync.planner import ParameterSite, PlannedBucket, RankPlan, Transfer
from mrl.weight_sync.resharder import WeightSyncSpec
from mrl.weight_sync.rollout_layout import RolloutLayout

CPU = torch.device("cpu")
LIMIT_S = 20.0
HOME = ParameterSite(0, 0, "layer.")


def move(name: str, source: Region, target: Region, tensor: int = 0) -> Transfer:
    return Transfer(HOME, tensor, ShardRegion((RegionCopy(name, source, target),), num_elements(source)))


def both(one: Transfer, other: Transfer) -> Transfer:
    return one._replace(
        region=ShardRegion(
            (*one.region.copies, *other.region.copies), one.region.num_elements + other.region.num_elements
        )
    )


def sizes(runs: list[list[Transfer]]) -> list[int]:
    return [sum(each.region.num_elements for each in run) for run in runs]


def elements(runs: list[list[Transfer]]) -> list[tuple[int, str, tuple[int, ...], tuple[int, ...]]]:
    """Return source and target of every element, in order."""
    found = []
    for run in runs:
        for each in run:
            assert each.region.num_elements == sum(num_elements(slice_.source) for slice_ in each.region.copies)
            for slice_ in each.region.copies:
                places = zip(of_box(slice_.source), of_box(slice_.target), strict=True)
                found += [(each.tensor, slice_.name, source, target) for source, target in places]
    return found


def of_box(box: Region) -> list[tuple[int, ...]]:
    grids = torch.meshgrid([torch.arange(start, stop) for start, stop in box], indexing="ij")
    return [tuple(place) for place in torch.stack([grid.flatten() for grid in grids], 1).tolist()]


MATRIX = move("w", ((4, 9), (2, 5)), ((0, 5), (0, 3)))
VECTOR = move("b", ((3, 13),), ((0, 10),), 1)
FUSED = both(move("q", ((0, 2), (0, 4)), ((0, 2), (0, 4))), move("k", ((1, 4), (0, 4)), ((2, 5), (0, 4))))
ALL = [MATRIX, VECTOR, FUSED, MATRIX._replace(tensor=2), VECTOR._replace(tensor=3)]


@pytest.mark.parametrize("limit", [4, 5, 8, 11, 16, 35, 44, 45, 46, 1000])
def test_runs_hold_every_element_once_in_order_and_no_more_than_fits(limit: int) -> None:
    runs = split_messages(ALL, limit)
    assert elements(runs) == elements([ALL])
    assert max(sizes(runs)) <= limit
    assert all(runs)
    widest = 4
    assert min(sizes(runs)[:-1], default=limit) > limit - widest - 1  # a run ends where no row has room


def test_a_row_that_fits_into_no_message_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="a row of 4 elements exceeds messages of 3"):
        split_messages([FUSED], 3)


def plan_of(rank: int, num_ranks: int) -> tuple[RankPlan, PlannedBucket]:
    """Plan an exchange in which each rank sends each other a vector. Its length encodes source and destination."""

    def vector(source: int, destination: int) -> list[Transfer]:
        length = 2 + source + 3 * destination
        return [move(f"from{source}", ((0, length),), ((0, length),), source)]

    others = [other for other in range(num_ranks) if other != rank]
    bucket = PlannedBucket(
        (),
        {other: vector(other, rank) for other in others},
        {other: vector(rank, other) for other in others},
        "float32",
    )
    return RankPlan(rank, num_ranks, rank, {n: n for n in range(num_ranks)}, (bucket,)), bucket


def test_everybody_goes_around_the_circle_in_the_same_order() -> None:
    for num_ranks in (2, 3, 5):
        by_rank = [message_schedule(*plan_of(rank, num_ranks), limit=100) for rank in range(num_ranks)]
        for number in range(num_ranks - 1):
            for rank in range(num_ranks):
                step: MessageRound = by_rank[rank][number]
                assert step.destination == (rank + number + 1) % num_ranks
                assert step.source == (rank - number - 1) % num_ranks
                assert by_rank[step.destination][number].source == rank
                assert by_rank[step.destination][number].received == step.sent


def test_who_has_nothing_to_do_with_a_rank_has_no_step_for_it() -> None:
    _, bucket = plan_of(0, 4)
    lonely = PlannedBucket((), {}, {2: bucket.outgoing[2]}, "float32")
    plan = RankPlan(0, 4, None, {}, (lonely,))
    (step,) = message_schedule(plan, lonely, 100)
    assert (step.destination, step.source, step.received) == (2, 2, [])
    own = PlannedBucket((), {0: bucket.outgoing[2]}, {}, "float32")
    assert message_schedule(RankPlan(0, 4, 0, {0: 0}, (own,)), own, 100) == []


@pytest.mark.parametrize("receiving_ranks", [[0, 1, 2], [1], []], ids=str)
@pytest.mark.parametrize("limit", [3, 100])
def test_what_is_sent_arrives_at_those_who_take_it_and_is_counted(receiving_ranks: list[int], limit: int) -> None:
    store, num_ranks = HashStore(), 3

    def rank(number: int) -> tuple[list[list[float]], WeightExchange]:
        plan, bucket = plan_of(number, num_ranks)
        held = {(0, f"layer.from{number}"): torch.arange(50.0) + 100 * number}
        exchange = WeightExchange(held, JoinedTransport(store, number, num_ranks, CPU, LIMIT_S), 4 * limit)
        matrices = [torch.zeros(2 + source + 3 * number) for source in range(num_ranks)]
        exchange.run(
            message_schedule(plan, bucket, limit),
            receiving_ranks,
            matrices if number in receiving_ranks else None,
            torch.float32,
        )
        return [matrix.tolist() for matrix in matrices], exchange

    with ThreadPoolExecutor(num_ranks) as threads:
        found = list(threads.map(rank, range(num_ranks)))
    lengths = {
        (source, to): 2 + source + 3 * to for source in range(num_ranks) for to in range(num_ranks) if source != to
    }
    for number, (matrices, exchange) in enumerate(found):
        for source, matrix in enumerate(matrices):
            arrives = number in receiving_ranks and source != number
            assert matrix == [100.0 * source + at if arrives else 0.0 for at in range(len(matrix))]
        sent = [length for (source, to), length in lengths.items() if source == number and to in receiving_ranks]
        received = [length for (_, to), length in lengths.items() if to == number and to in receiving_ranks]
        assert (exchange.bytes_sent, exchange.bytes_received) == (4 * sum(sent), 4 * sum(received))
        assert exchange.num_transfers == sum(-(-length // limit) for length in sent)
        assert exchange.extra_bytes == 4 * 4 * limit


def test_what_a_rank_holds_itself_is_copied_slice_by_slice_and_rounded() -> None:
    held = {(0, "layer.q"): torch.randn(4, 4), (0, "layer.k"): torch.randn(4, 4)}
    transport: Any = type("NoWires", (), {"rank": 0, "device": CPU})
    matrices = [torch.zeros(5, 4, dtype=torch.bfloat16)]
    WeightExchange(held, transport, 20).copy_local([FUSED], matrices)
    expected = torch.cat([held[0, "layer.q"][:2], held[0, "layer.k"][1:4]]).bfloat16()
    assert torch.equal(matrices[0], expected)


def around(transport: P2PTransport, size: int) -> list[float]:
    """Send this rank's number to the next rank and, doubled, to the previous, both at once. Return what arrived."""
    after, before = (transport.rank + 1) % size, (transport.rank - 1) % size
    sent = [torch.full((3,), float(transport.rank)), torch.full((2,), 2.0 * transport.rank)]
    come = [torch.zeros(3), torch.zeros(2)]
    works = [
        *transport.start({after: sent[0]}, {before: come[0]}),
        *transport.start({before: sent[1]}, {after: come[1]}),
    ]
    for work in works:
        work.wait()
    assert transport.start({}, {}) == []
    return [float(each[0]) for each in come] if all((each == each[0]).all() for each in come) else []


def test_joined_ranks_reach_each_other_without_a_default_world() -> None:
    store, before = HashStore(), torch.distributed.is_initialized()  # by an engine of another test, perhaps

    def rank(number: int) -> list[float]:
        return around(JoinedTransport(store, number, 3, CPU, LIMIT_S), 3)

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(rank, range(3))) == [[2, 2], [0, 4], [1, 0]]
    assert torch.distributed.is_initialized() == before


def test_who_waits_in_vain_gives_up_after_the_time_limit() -> None:
    store = HashStore()
    began = datetime.datetime.now(datetime.UTC)

    def rank(number: int) -> str:
        transport = JoinedTransport(store, number, 2, CPU, 0.5)
        if number == 1:
            return ""
        try:
            (work,) = transport.start({}, {1: torch.zeros(1)})
            work.wait()
        except RuntimeError as error:
            return str(error)
        return "it came"

    with ThreadPoolExecutor(2) as threads:
        said = list(threads.map(rank, range(2)))
    assert said[0] not in ("", "it came")
    assert (datetime.datetime.now(datetime.UTC) - began).total_seconds() < LIMIT_S / 2


def route(meeting: Rendezvous) -> WeightSyncSpec:
    layout = RolloutLayout(EngineSizes(1), (4, 5), (0, 0, 0, 0, 1, 1))
    return WeightSyncSpec(layout, (), "bfloat16", "float32", timeout_s=LIMIT_S, rendezvous=meeting)


def test_trainers_and_porters_meet_where_the_route_says() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port, size = listener.getsockname()[1], 6

    def rank(number: int) -> list[float]:
        meeting = Rendezvous("127.0.0.1", port, 2, listener if number == 4 else None)
        return around(route(meeting).transport(number, CPU), size)

    with ThreadPoolExecutor(size) as threads:
        found = list(threads.map(rank, range(size)))
    assert found == [[(number - 1) % size, 2 * ((number + 1) % size)] for number in range(size)]
