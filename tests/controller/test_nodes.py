"""Survey of a cluster's nodes, on the one node of the tests."""

from __future__ import annotations

import socket

import pytest

from mrl.controller import RunContext, nodes
from mrl.controller.nodes import free_devices, offered_nodes, run_on_nodes, wait_for_nodes
from mrl.errors import PlacementError
from tests.conftest import NUM_DEVICES


def test_nodes_are_offered_asked_and_awaited(run_context: RunContext) -> None:
    (offer,) = offered_nodes("cpu")
    assert offer.devices == NUM_DEVICES
    assert offered_nodes("gpu")[0].devices == 0
    assert free_devices("cpu") == 0, "the pool of the tests has them"
    assert run_on_nodes([offer.node_id], "socket:gethostname", [], 60) == [socket.gethostname()]
    wait_for_nodes([offer.name], "cpu", NUM_DEVICES, 0)


def test_nodes_that_are_absent_or_short_are_named(run_context: RunContext) -> None:
    (offer,) = offered_nodes("cpu")
    with pytest.raises(PlacementError) as caught:
        wait_for_nodes([offer.name, "node7", "node9"], "cpu", 8, 0.1)
    assert "3 of 3 nodes are not ready after 0.1 s: node7 has not joined; node9 has not joined; " in str(caught.value)
    assert f"{offer.name} offers {NUM_DEVICES} of 8 devices" in str(caught.value)


def test_a_node_that_cannot_answer_is_an_error(run_context: RunContext) -> None:
    with pytest.raises(PlacementError, match="a node did not answer"):
        run_on_nodes([offered_nodes("cpu")[0].node_id], "socket:gethostbyname", ["a..b"], 60)


def test_a_node_that_has_died_offers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray also lists nodes that it has lost."""
    known = {"Resources": {"CPU": 4.0}, "NodeManagerAddress": "10.0.0.1"}
    listed = [{"NodeID": name, "NodeName": name, "Alive": name != "b", **known} for name in ("c", "b", "a")]
    monkeypatch.setattr(nodes.ray, "nodes", lambda: listed)
    assert [(offer.name, offer.devices) for offer in offered_nodes("cpu")] == [("a", 4), ("c", 4)]
