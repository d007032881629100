"""One Ray and one set of pools for the whole test session, because starting them is slow."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# Every test process computes with one thread, as an actor of Ray with one CPU does. Otherwise vLLM sets the number of
# torch's threads, and another thread of the process may be in the middle of a step. torch reads this at its import.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import mrl.controller  # noqa: F401 - before any test imports ray: it settles how Ray authenticates
from tests import minutes, sweep

if TYPE_CHECKING:
    from mrl.controller import RayWorkerGroup, RunContext

NUM_DEVICES = 4

UNIT_PACKAGES = ("config", "models", "protocol", "plan", "cli")
"""Packages whose tests `make unit` runs with the same strength. It draws fewer cases in those of `algos` and `data`."""
NEED_RAY = (
    *(f"cli/test_{name}.py" for name in ("check", "check_agents", "finished", "sft_verbs")),
    "data/test_ranked_rows.py",
    "plan/test_exactness.py",
)
"""Files that import workers. The environment of `make unit` cannot collect them."""
HAS_RAY = importlib.util.find_spec("ray") is not None
if not HAS_RAY:
    collect_ignore = [*NEED_RAY]

# No test uses the hub or a developer's cache. Tests about the hub make a cache and a service.
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": "/dev/null/cache"}


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # with several processes, only the first adds up the minutes
        config.pluginmanager.register(minutes.of_this_session(), "minutes")
        if os.environ.get("MRL_SWEEP_RECORD") == "1":
            config.pluginmanager.register(sweep.SweepRecord(), "sweep record")
    if choice := os.environ.get("MRL_SWEEP_PART"):
        config.pluginmanager.register(
            sweep.SweepPart(choice, float(os.environ.get("MRL_SWEEP_MINUTES", "inf"))), "sweep part"
        )
    if choice := os.environ.get("MRL_SLOW_HALF"):
        config.pluginmanager.register(sweep.SlowHalf(choice), "half of the slow tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that `make unit` has run, if the caller says so."""
    if os.environ.get("MRL_SKIP_UNIT") != "1":
        return
    config.hook.pytest_deselected(items=[item for item in items if _is_unit_test(item)])
    items[:] = [item for item in items if not _is_unit_test(item)]


def _is_unit_test(item: pytest.Item) -> bool:
    path = item.path.relative_to(Path(__file__).parent)
    needs_more = item.get_closest_marker("needs") is not None or path.as_posix() in NEED_RAY
    return path.parts[0] in UNIT_PACKAGES and not needs_more


def pytest_runtest_setup(item: pytest.Item) -> None:
    if not HAS_RAY and item.get_closest_marker("needs"):
        pytest.skip("needs the installed Ray, Megatron or vLLM: make install, and .venv/bin/python -m pytest")


@pytest.fixture(scope="session")
def run_context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunContext]:
    """A running Ray with one pool of four CPU devices, shared by the roles `actor` and `critic`."""
    # Imported here so that tests without workers start without torch and Ray.
    from mrl.config.schema import ClusterConfig, DeadlinesConfig, PlacementConfig
    from mrl.controller import ResourcePoolManager, RunContext, ray_cluster
    from mrl.events import EventLog

    cluster = ClusterConfig(devices_per_node=NUM_DEVICES, device="cpu")
    deadlines = DeadlinesConfig(resources_s=30, start_s=120, call_s=20, heartbeat_s=1, release_s=1)
    placement = PlacementConfig(pools={"all": NUM_DEVICES}, roles={"actor": "all", "critic": "all"})
    run_directory = tmp_path_factory.mktemp("run")
    events = EventLog(run_directory / "events.jsonl")
    with ray_cluster(cluster):
        resources = ResourcePoolManager(placement, cluster, deadlines)
        resources.create(run_directory, events)
        yield RunContext(run_directory, events, deadlines, resources)
        resources.release()
    events.close()


MakeGroup = Callable[..., "RayWorkerGroup"]


@pytest.fixture(scope="session", params=[False, True], ids=["direct", "by node"])
def rank_workers(run_context: RunContext, request: pytest.FixtureRequest) -> Iterator[RayWorkerGroup]:
    """Four healthy workers, tp 2 x dp 2, for tests that do not break them. They are called one by one, or by node."""
    group = make_rank_workers(by_node(run_context) if request.param else run_context, "actor", greeting="hello")
    yield group
    group.shutdown()


@pytest.fixture
def doomed_workers(run_context: RunContext) -> Iterator[MakeGroup]:
    """Function that makes groups of four workers that a test may break."""
    groups: list[RayWorkerGroup] = []

    def make(in_nodes: bool = False, **kwargs: object) -> RayWorkerGroup:
        groups.append(make_rank_workers(by_node(run_context) if in_nodes else run_context, "critic", **kwargs))
        return groups[-1]

    yield make
    for group in groups:
        group.shutdown()


def by_node(context: RunContext) -> RunContext:
    """Return the context for groups that are called through the agents of their nodes, as groups of many ranks are."""
    return replace(context, many_ranks=2)


def make_rank_workers(context: RunContext, role: str, **kwargs: object) -> RayWorkerGroup:
    from mrl.config.mesh import Mesh
    from mrl.controller import RayClassWithInitArgs, RayWorkerGroup

    worker = RayClassWithInitArgs("tests.rank_workers:RankWorker", **kwargs)
    return RayWorkerGroup(role, worker, Mesh(NUM_DEVICES, tp=2), context)


@pytest.fixture
def run_directory(run_context: RunContext) -> Path:
    """Directory of the log files of the session's workers."""
    return run_context.run_directory
