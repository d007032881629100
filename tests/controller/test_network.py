"""A node's network settings. Several hosts are covered by tests/hosts."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from mrl.controller import RayWorkerGroup, Rendezvous, RunContext
from mrl.controller import nodes as nodes_module
from mrl.controller.network import Endpoint, failures, interfaces, listen, listen_everywhere, network
from mrl.controller.nodes import ALL_PAIRS, LinkedNode, broken_links, linked_nodes, offered_nodes
from mrl.errors import PlacementError
from mrl.events import NetworkChosen, read_events

CHOSEN = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}


@pytest.fixture(autouse=True)
def _site_names_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CHOSEN:
        monkeypatch.delenv(name, raising=False)


def test_every_address_has_an_interface_that_is_there() -> None:
    found = interfaces()
    assert found["127.0.0.1"] == "lo"
    assert set(found.values()) <= {name for _, name in socket.if_nameindex()}


def test_what_the_site_has_set_stays_and_the_rest_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert network("127.0.0.1").environment() == CHOSEN
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    ours = network("127.0.0.1")
    assert ours.of_site == {"GLOO_SOCKET_IFNAME": "ib0"}
    assert ours.environment() == {"NCCL_SOCKET_IFNAME": "=lo"}
    elsewhere = network("203.0.113.7")
    assert (elsewhere.interface, elsewhere.environment()) == (None, {})


def test_who_listens_is_reached_and_who_does_not_is_not() -> None:
    with listen("127.0.0.1") as there, socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        tried = [Endpoint("127.0.0.1", each.getsockname()[1], "lo") for each in (there, silent)]
        assert failures(tried, 5) == ["", "Connection refused"]
    assert failures([], 5) == []
    assert listen_everywhere("203.0.113.7") == []


def test_a_run_on_one_host_keeps_to_its_loopback(run_context: RunContext, rank_workers: RayWorkerGroup) -> None:
    """Ray knows the host by another address, which other hosts can reach."""
    (said,) = [
        record.event for record in read_events(run_context.events.path) if isinstance(record.event, NetworkChosen)
    ]
    assert (said.address, said.interface, said.chosen, said.of_site) == ("127.0.0.1", "lo", CHOSEN, {})
    assert {place["MASTER_ADDR"] for place in rank_workers.network()} == {"127.0.0.1"}
    assert all(place | CHOSEN == place for place in rank_workers.network())


def test_a_node_alone_has_no_links_and_one_under_a_foreign_address_is_named(run_context: RunContext) -> None:
    with linked_nodes(offered_nodes("cpu")) as (node,):
        assert broken_links([node], 60) == []
        foreign: list[Any] = [node, LinkedNode("n9", "203.0.113.7", node.agent)]
        with pytest.raises(PlacementError, match=r"Ray knows node n9 as 203\.0\.113\.7, but none of its interfaces"):
            broken_links(foreign, 60)


class Agent:
    """Answers like an agent of a node, and notes whom it tries to reach. Nodes below `split` reach no others."""

    def __init__(self, number: int, split: int, dialed: set[tuple[int, int]]) -> None:
        self.number, self._split, self._dialed = number, split, dialed
        self.listen = self.failures = self.stop_listening = self

    def remote(self, *question: Any) -> Any:
        if not question:
            return None
        if isinstance(question[0], str):
            return [Endpoint(question[0], self.number, "eth0")]
        ports = [end.port for end in question[0]]
        self._dialed |= {(self.number, port) for port in ports}
        return ["No route to host" * (self.number < self._split <= port) for port in ports]


@pytest.mark.parametrize(("num_nodes", "num_links"), [(4, 12), (ALL_PAIRS, 4032), (65, 65 * 7), (2048, 2048 * 11)])
def test_links_that_are_tested_grow_with_the_nodes_and_show_a_network_in_two_parts(
    num_nodes: int, num_links: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes_module, "node_answers", lambda answers, *_, **__: answers)
    for split in (0, 1, num_nodes // 3, num_nodes - 1):
        dialed: set[tuple[int, int]] = set()
        agents = [Agent(number, split, dialed) for number in range(num_nodes)]
        nodes = [
            LinkedNode(f"n{number}", f"10.0.{number >> 8}.{number & 255}", agent) for number, agent in enumerate(agents)
        ]
        assert bool(broken_links(nodes, 60)) == (split > 0)
        assert len(dialed) == num_links
        assert {number for number, _ in dialed} == {port for _, port in dialed} == {*range(num_nodes)}


def test_a_port_that_is_handed_over_waits_for_the_store_of_a_child_process() -> None:
    listener = listen("127.0.0.1")
    rendezvous = Rendezvous("127.0.0.1", listener.getsockname()[1], 1, listener)
    where = ("127.0.0.1", rendezvous.port)
    with pytest.raises(RuntimeError, match="EADDRINUSE"):
        TCPStore(*where, is_master=True)
    rendezvous.hand_over()
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(where)
    store = TCPStore(*where, is_master=True)
    store.set("key", "value")
    assert TCPStore(*where, is_master=False).get("key") == b"value"
