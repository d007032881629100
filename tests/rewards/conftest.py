"""Managers of real worker processes, each marked in its environment so that nothing of it can hide."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mrl.config.reward import RewardConfig, RewardFunctionConfig
from mrl.events import Event, EventLog, read_events
from mrl.rewards.manager import RewardManager
from mrl.rewards.sample import Sample

HOSTILE = "tests.rewards.hostile:score"
MARKER = "MRL_TEST_MARKER"


def make_sample(do: str = "ok", row_id: int = 0, **extra: Any) -> Sample:
    """A sample whose reward does what `do` says in tests/rewards/hostile.py."""
    return Sample(
        prompt="How many?",
        response="forty-two",
        num_response_tokens=3,
        ground_truth="42",
        data_source="unit/test",
        extra_info={"do": do, "ok": row_id, **extra},
        uid=f"u{row_id}",
        row_id=row_id,
    )


class Bench:
    """Makes managers, and looks for what they have left."""

    def __init__(self, directory: Path) -> None:
        self.marker = uuid.uuid4().hex
        self.events_path = directory / "events.jsonl"
        self.managers: list[RewardManager] = []

    def manager(self, *names: str, **settings: Any) -> RewardManager:
        """A manager of functions, by default of the hostile one; limits are short."""
        functions = {f"f{number}": RewardFunctionConfig(name=name) for number, name in enumerate(names or (HOSTILE,))}
        settings = {
            "functions": functions,
            "num_workers": 2,
            "limit_s": 0.5,
            "retries": 0,
            "max_failed_share": 1.0,
            "memory_bytes": 1 << 28,
            **settings,
        }
        settings["environment"] = {MARKER: self.marker} | settings.get("environment", {})
        self.managers.append(RewardManager(RewardConfig(**settings), EventLog(self.events_path)))
        return self.managers[-1]

    def events(self) -> list[Event]:
        """Return the recorded events."""
        return [recorded.event for recorded in read_events(self.events_path)]

    def processes(self) -> set[int]:
        """Everything alive that was started by these managers, however far it has run away."""
        return marked(self.marker)

    def settle(self, number: int, within_s: float = 2.0) -> set[int]:
        """The processes, once there are as many, or after that time."""
        return settle(self.marker, number, within_s)


def marked(marker: str) -> set[int]:
    """Every process with the marker in its environment."""
    processes = set()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and marker.encode() in (entry / "environ").read_bytes():
                processes.add(int(entry.name))
        except OSError:
            continue
    return processes


def settle(marker: str, number: int, within_s: float) -> set[int]:
    deadline = time.monotonic() + within_s
    while len(processes := marked(marker)) != number and time.monotonic() < deadline:
        time.sleep(0.02)
    return processes


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """A place to make managers in; nothing of them outlives the test."""
    bench = Bench(tmp_path)
    yield bench
    for manager in bench.managers:
        manager.close()
    assert bench.settle(0) == set()


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RewardManager, Bench]]:
    """One manager for many samples that go wrong: each must leave it as good as new."""
    bench = Bench(tmp_path_factory.mktemp("hostile"))
    yield bench.manager(), bench
    bench.managers[0].close()
    assert bench.settle(0) == set()
