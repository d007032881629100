"""How ranks reach each other beside the default world, and what a route tells them."""

from __future__ import annotations

import datetime
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from mrl.controller import Rendezvous
from mrl.models.rollout_table import EngineSizes
from mrl.weight_sync.planner import RolloutLayout
from mrl.weight_sync.spec import WeightSyncSpec
from mrl.weight_sync.transport import JoinedTransport, P2PTransport

CPU = torch.device("cpu")
LIMIT_S = 20.0


def around(transport: P2PTransport, size: int) -> list[float]:
    """Everybody sends its number to the next and, doubled, to the one before, at once; what came from both."""
    after, before = (transport.rank + 1) % size, (transport.rank - 1) % size
    sent = [torch.full((3,), float(transport.rank)), torch.full((2,), 2.0 * transport.rank)]
    come = [torch.zeros(3), torch.zeros(2)]
    works = transport.start([(sent[0], after), (sent[1], before)], [(come[0], before), (come[1], after)])
    for work in works:
        work.wait()
    assert transport.start([], []) == []
    return [float(each[0]) for each in come] if all((each == each[0]).all() for each in come) else []


def test_joined_ranks_reach_each_other_without_a_default_world() -> None:
    store = HashStore()

    def rank(number: int) -> list[float]:
        return around(JoinedTransport(store, number, 3, CPU, LIMIT_S), 3)

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(rank, range(3))) == [[2, 2], [0, 4], [1, 0]]
    assert not torch.distributed.is_initialized()


def test_a_barrier_waits_for_everybody() -> None:
    store, passed = HashStore(), []
    may_come = threading.Event()

    def rank(number: int) -> None:
        transport = JoinedTransport(store, number, 2, CPU, LIMIT_S)
        if number == 1:
            assert may_come.wait(LIMIT_S), "the test forgot a rank"
            passed.append("late")
        transport.barrier()
        passed.append("through")

    with ThreadPoolExecutor(2) as threads:
        both = [threads.submit(rank, number) for number in range(2)]
        assert not both[0].done()
        may_come.set()
        for each in both:
            each.result(LIMIT_S)
    assert passed == ["late", "through", "through"]


def test_who_waits_in_vain_gives_up_after_the_time_limit() -> None:
    store = HashStore()
    began = datetime.datetime.now(datetime.UTC)

    def rank(number: int) -> str:
        transport = JoinedTransport(store, number, 2, CPU, 0.5)
        if number == 1:
            return ""
        try:
            (work,) = transport.start([], [(torch.zeros(1), 1)])
            work.wait()
        except RuntimeError as error:
            return str(error)
        return "it came"

    with ThreadPoolExecutor(2) as threads:
        said = list(threads.map(rank, range(2)))
    assert said[0] not in ("", "it came")
    assert (datetime.datetime.now(datetime.UTC) - began).total_seconds() < LIMIT_S / 2


def route(sizes: EngineSizes, engines: tuple[str, ...], meeting: Rendezvous | None = None) -> WeightSyncSpec:
    layout = RolloutLayout(sizes, (4, 5), (0, 0, 0, 0, 1, 1))
    return WeightSyncSpec(layout, Path("/run/sockets"), engines, "bfloat16", "float32", 4096, LIMIT_S, meeting)


@pytest.mark.parametrize(
    ("tp", "engines", "names"),
    [
        (1, ("rollout-0", "rollout-1"), ["rollout-0-0", "rollout-1-0"]),
        (2, ("rollout-0", "rollout-0"), ["rollout-0-0", "rollout-0-1"]),
        (2, ("rollout-0", "rollout-0", "rollout-1", "rollout-1"), [f"rollout-{i}-{j}" for i in (0, 1) for j in (0, 1)]),
    ],
)
def test_every_worker_of_every_engine_has_a_socket_of_its_own(
    tp: int, engines: tuple[str, ...], names: list[str]
) -> None:
    socket_paths = route(EngineSizes(tp), engines).socket_paths()
    assert socket_paths == {worker: Path(f"/run/sockets/{name}.sock") for worker, name in enumerate(names)}


def test_a_route_knows_both_dtypes_apart() -> None:
    settings = route(EngineSizes(1), ("rollout-0",)).settings()
    assert (settings.dtype, settings.trained_dtype) == (torch.bfloat16, torch.float32)
    assert settings.bucket_bytes == 4096


def test_trainers_and_porters_meet_where_the_route_says() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port, size = listener.getsockname()[1], 6

    def rank(number: int) -> list[float]:
        meeting = Rendezvous("127.0.0.1", port, 2, listener if number == 4 else None)
        return around(route(EngineSizes(1), ("rollout-0", "rollout-1"), meeting).transport(number, CPU), size)

    with ThreadPoolExecutor(size) as threads:
        found = list(threads.map(rank, range(size)))
    assert found == [[(number - 1) % size, 2 * ((number + 1) % size)] for number in range(size)]
