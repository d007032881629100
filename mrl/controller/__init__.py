"""The single controller: pools of devices, groups of workers, calls that end, and reports that name the culprit."""

from __future__ import annotations

import os
import sys

if "ray" not in sys.modules:
    # Ray decides how it authenticates while it is loaded, so this must come before its first import.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    # Every failed call is explained by mrl itself; Ray would add each rank's error once more, later.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    # A process that asks for no accelerator keeps the devices that its environment shows (Ray's coming default).
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

from mrl.controller.cluster import ray_cluster
from mrl.controller.dispatch import Dispatch, register
from mrl.controller.resource_pool import RayResourcePool, ResourcePoolManager, Seats
from mrl.controller.worker import Place, Rendezvous, Worker
from mrl.controller.worker_group import DataProtoFuture, RayClassWithInitArgs, RayWorkerGroup, RunContext

__all__ = [
    "DataProtoFuture",
    "Dispatch",
    "Place",
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "Rendezvous",
    "ResourcePoolManager",
    "RunContext",
    "Seats",
    "Worker",
    "ray_cluster",
    "register",
]
