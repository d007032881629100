"""The nodes of a run: each has libraries that load, and the models or fetches them itself, or is named."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mrl.config.schema import ClusterConfig
from mrl.errors import ModelError, SetupError
from mrl.events import EventLog, Warned, read_events
from mrl.trainer import nodes as trainer_nodes
from mrl.trainer.nodes import check_libraries, fetch_models
from tests.trainer.fakes import make_config

JOINED = ClusterConfig(nodes=2, devices_per_node=2, device="cpu", ray_address="auto")
RESOURCES: Any = SimpleNamespace(nodes=[SimpleNamespace(node_id=f"id{number}", name=f"n{number}") for number in (1, 2)])


class Nodes:
    """Answers of each node: to the first question, and when it may download."""

    def __init__(self, before: dict[str, str], after: dict[str, str]) -> None:
        self.answers = {False: before, True: after}
        self.asked: list[Any] = []

    def ask(self, node_ids: list[str], probe: str, arguments: list[Any], deadline_s: float) -> list[str]:
        self.asked.append((node_ids, probe, arguments, deadline_s))
        return [self.answers[arguments[1]].get(node, "") for node in node_ids]


def bring(directory: Path, monkeypatch: pytest.MonkeyPatch, nodes: Nodes, **sections: Any) -> list[Any]:
    monkeypatch.setattr(trainer_nodes, "run_on_nodes", nodes.ask)
    events = EventLog(directory / "events.jsonl")
    try:
        fetch_models(make_config(directory, **{"cluster": JOINED} | sections), RESOURCES, events)
    finally:
        events.close()
    return [record.event for record in read_events(directory / "events.jsonl")]


def test_the_one_machine_of_a_run_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes({"id1": "nothing here"}, {})
    assert bring(tmp_path, monkeypatch, nodes, cluster={"ray_address": None}) == []
    assert nodes.asked == []


def test_nodes_that_have_the_models_are_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes({}, {})
    assert bring(tmp_path, monkeypatch, nodes, model={"critic": "values"}) == []
    assert nodes.asked == [(["id1", "id2"], "mrl.hub:node_lacks", [["policy"], False], 300.0)]


def test_a_node_that_lacks_them_fetches_them_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes({"id2": "not here"}, {})
    assert bring(tmp_path, monkeypatch, nodes) == [Warned("models", "1 of 2 nodes download models: n2")]
    assert nodes.asked[1:] == [(["id2"], "mrl.hub:node_lacks", [["policy"], True], 7200.0)]


def test_a_node_that_cannot_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"id1": "there is no directory policy", "id2": "there is no directory policy"}
    with pytest.raises(ModelError, match=r"^node n2: there is no directory policy\n") as caught:
        bring(tmp_path, monkeypatch, Nodes(answers, {"id2": answers["id2"]}))
    assert "HF_HOME" in caught.value.fix


ONE: Any = SimpleNamespace(nodes=RESOURCES.nodes[:1])


def cluster(device: Any, address: str | None) -> ClusterConfig:
    return ClusterConfig(nodes=2, devices_per_node=2, device=device, ray_address=address)


def test_nodes_of_a_cluster_are_asked_and_the_broken_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def ask(node_ids: list[str], probe: str, arguments: list[Any], deadline_s: float) -> list[str]:
        asked.append((node_ids, probe, arguments))
        return ["", "no such symbol"]

    monkeypatch.setattr(trainer_nodes, "run_on_nodes", ask)
    with pytest.raises(SetupError, match=r"^node n2: no such symbol\n") as caught:
        check_libraries(make_config(tmp_path, cluster=cluster("gpu", "auto")), RESOURCES)
    assert "make install-cuda" in caught.value.fix
    assert asked == [(["id1", "id2"], "mrl.libraries:transformer_engine_fault", [])]


@pytest.mark.parametrize(("device", "fails"), [("gpu", True), ("cpu", False)])
def test_one_machine_looks_for_itself_where_gpus_would_use_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, fails: bool
) -> None:
    monkeypatch.setattr(trainer_nodes, "transformer_engine_fault", lambda: "no such symbol")
    config = make_config(tmp_path, cluster=cluster(device, None))
    if fails:
        with pytest.raises(SetupError, match="node n1: no such symbol"):
            check_libraries(config, ONE)
    else:
        check_libraries(config, ONE)
