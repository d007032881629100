"""Calls of a replica that wait for its samples."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from mrl.controller import RayWorkerGroup
from mrl.errors import RolloutError
from mrl.rollout.requests import Generated, GenerationRequest, Sampling
from mrl.rollout.stored_routes import with_stored

WAIT_S = 0.5
"""Longest wait of a replica for a finished sample before it answers."""


def poll(replica: RayWorkerGroup, *args: Any) -> list[Generated] | RolloutError:
    answer: list[Generated] | RolloutError = replica.submit_and_poll(*args)
    return answer


def poll_with_routes(replica: RayWorkerGroup, *args: Any) -> list[Generated] | RolloutError:
    answer, part = replica.submit_and_poll_routes(*args)
    return answer if isinstance(answer, RolloutError) else with_stored(answer[0], part, answer[1])


def timed(call: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    begin = time.monotonic()
    return call(*args), time.monotonic() - begin


def probe_replica(replica: RayWorkerGroup, request: GenerationRequest, sampling: Sampling, version: int) -> Generated:
    answer: list[Generated] | RolloutError = replica.submit_and_poll([request], sampling, version, WAIT_S)
    while not answer:
        answer = replica.submit_and_poll([], sampling, version, WAIT_S)
    if isinstance(answer, RolloutError):
        raise answer
    return answer[0]
