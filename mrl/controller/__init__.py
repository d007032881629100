"""The single controller: device pools, worker groups, calls with deadlines, and reports that name the failed rank."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

if "ray" not in sys.modules:
    # Ray chooses its authentication while it is imported, so this must come before the first import.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    # mrl explains every failed call itself. Ray would report each rank's error again, later.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    # A process without accelerators keeps the devices in its environment (the future default of Ray).
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # No usage statistics are sent.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

if TYPE_CHECKING:
    from mrl.controller.cluster import ray_cluster
    from mrl.controller.resource_pool import DeviceSlots, RayResourcePool, ResourcePoolManager
    from mrl.controller.worker import Dispatch, RankInfo, Rendezvous, Worker, register, register_call
    from mrl.controller.worker_group import DataProtoFuture, RayClassWithInitArgs, RayWorkerGroup, RunContext

_MODULES = {
    "cluster": ("ray_cluster",),
    "resource_pool": ("RayResourcePool", "ResourcePoolManager", "DeviceSlots"),
    "worker": ("Dispatch", "RankInfo", "Rendezvous", "Worker", "register", "register_call"),
    "worker_group": ("DataProtoFuture", "RayClassWithInitArgs", "RayWorkerGroup", "RunContext"),
}
"""Modules that are loaded on first use. A node's agent, which everything waits for, needs no torch."""

__all__ = [
    "DataProtoFuture",
    "DeviceSlots",
    "Dispatch",
    "RankInfo",
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "Rendezvous",
    "ResourcePoolManager",
    "RunContext",
    "Worker",
    "ray_cluster",
    "register",
    "register_call",
]


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
