"""The single controller: pools of devices, groups of workers, calls that end, and reports that name the culprit."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

if "ray" not in sys.modules:
    # Ray decides how it authenticates while it is loaded, so this must come before its first import.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    # Every failed call is explained by mrl itself; Ray would add each rank's error once more, later.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    # A process that asks for no accelerator keeps the devices that its environment shows (Ray's coming default).
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Nobody hears of a run but those it was told to speak to.
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
"""Each is loaded when something of it is first asked for: a node's agent, which all else waits for, needs no torch."""

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
