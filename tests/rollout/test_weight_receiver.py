"""Receivers have ranks after the trainer's, and meet them at the first receiver's socket."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mrl.config.mesh import Mesh
from mrl.config.schema import ParallelConfig
from mrl.controller import RankInfo, Rendezvous
from mrl.models.rollout_table import EngineSizes
from mrl.models.small import small_config
from mrl.plan.known_models import model_values
from mrl.rollout import replica
from mrl.rollout.replica import WeightReceiver
from mrl.weight_sync.resharder import WeightSyncSpec
from mrl.weight_sync.rollout_layout import RolloutLayout


@dataclass(frozen=True)
class NotedRoute(WeightSyncSpec):
    """A route that no rank joins. It records the calls and the meeting point of the ranks."""

    joined: list[tuple[int, torch.device, Rendezvous | None]] = field(default_factory=list)

    def transport(self, rank: int, device: torch.device) -> Any:
        self.joined.append((rank, device, self.rendezvous))
        return "transport"


def test_a_porter_comes_after_the_trainers_ranks_and_serves_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parallel = ParallelConfig(tp=2)
    (tmp_path / "config.json").write_text(json.dumps(dict(small_config(model_values("Qwen3-8B"), parallel))))
    made: list[Any] = []

    class Notes:
        def __init__(self, *arguments: Any) -> None:
            made.append(arguments)

        def send(self, version: int, workers: list[int]) -> tuple[int, list[int]]:
            return version, workers

    monkeypatch.setattr(replica, "Resharder", Notes)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        rendezvous = Rendezvous("10.0.0.7", 4321, 2, listener)
        place = RankInfo("rollout", 1, 1, Mesh(2), rendezvous)
        worker = WeightReceiver(place)
        assert worker.rendezvous() == Rendezvous("10.0.0.7", 4321, 2, None), "the socket itself stays here"
        layout = RolloutLayout(EngineSizes(1), (4, 5), ("n0",) * 6)
        elsewhere = Rendezvous("nowhere", 1, 2, None)
        route = NotedRoute(layout, (tmp_path / "0", tmp_path / "1"), "bfloat16", "float32", rendezvous=elsewhere)
        worker.prepare_receiving(str(tmp_path), parallel, 4, route)
    assert route.joined == [(5, torch.device("cpu"), rendezvous)]
    ((planner, transport, held, told),) = made
    assert (transport, held) == ("transport", {}), "it holds no weights"
    assert told == replace(route, rendezvous=rendezvous)
    assert planner.mesh == Mesh(4, tp=2), "the layout is the trainer's"
    assert worker.send_weights(3, [1, 0]) == (3, [1, 0])  # type: ignore[comparison-overlap]
