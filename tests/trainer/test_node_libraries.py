"""A broken Transformer Engine is one error, with its nodes, before any worker starts; CPU slots never ask."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mrl.config.schema import ClusterConfig
from mrl.errors import SetupError
from mrl.trainer import node_libraries
from mrl.trainer.node_libraries import check_libraries
from tests.trainer.fakes import make_config

RESOURCES: Any = SimpleNamespace(nodes=[SimpleNamespace(node_id=f"id{number}", name=f"n{number}") for number in (1, 2)])
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

    monkeypatch.setattr(node_libraries, "run_on_nodes", ask)
    with pytest.raises(SetupError, match=r"^node n2: no such symbol\n") as caught:
        check_libraries(make_config(tmp_path, cluster=cluster("gpu", "auto")), RESOURCES)
    assert "make install-cuda" in caught.value.fix
    assert asked == [(["id1", "id2"], "mrl.libraries:transformer_engine_fault", [])]


@pytest.mark.parametrize(("device", "fails"), [("gpu", True), ("cpu", False)])
def test_one_machine_looks_for_itself_where_gpus_would_use_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, fails: bool
) -> None:
    monkeypatch.setattr(node_libraries, "transformer_engine_fault", lambda: "no such symbol")
    config = make_config(tmp_path, cluster=cluster(device, None))
    if fails:
        with pytest.raises(SetupError, match="node n1: no such symbol"):
            check_libraries(config, ONE)
    else:
        check_libraries(config, ONE)
