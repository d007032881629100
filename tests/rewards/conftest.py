"""Managers of real worker processes. A marker in their environment finds every process that they start."""

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
    """Return a sample whose reward does the action `do` of tests/rewards/hostile.py."""
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
    """Makes managers and looks for their leftovers."""

    def __init__(self, directory: Path) -> None:
        self.marker = uuid.uuid4().hex
        self.events_path = directory / "events.jsonl"
        self.managers: list[RewardManager] = []

    def manager(self, *names: str, **settings: Any) -> RewardManager:
        """Return a manager of functions, by default the hostile one, with short limits."""
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
        """Return all living processes started by these managers, including detached ones."""
        return marked(self.marker)

    def settle(self, number: int, within_s: float = 2.0) -> set[int]:
        """Return the marked processes once their number is reached, or after the time limit."""
        return settle(self.marker, number, within_s)


def marked(marker: str) -> set[int]:
    """Return every process with the marker in its environment."""
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
    """A bench for managers. Nothing of them may outlive the test."""
    bench = Bench(tmp_path)
    yield bench
    for manager in bench.managers:
        manager.close()
    assert bench.settle(0) == set()


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RewardManager, Bench]]:
    """One manager for many failing samples. Each must leave it fully working."""
    bench = Bench(tmp_path_factory.mktemp("hostile"))
    yield bench.manager(), bench
    bench.managers[0].close()
    assert bench.settle(0) == set()
