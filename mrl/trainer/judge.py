"""The judge's engines of a run: started in their pool, known to the reward workers alone, and ended with the run."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from mrl.config.mesh import Mesh
from mrl.config.reward import JUDGE, KEY_VARIABLE, URLS_VARIABLE, JudgeConfig
from mrl.controller import RayClassWithInitArgs, RayWorkerGroup, RunContext
from mrl.errors import RewardError, WorkerDied


@contextmanager
def judge_served(judge: JudgeConfig, device: str, context: RunContext) -> Iterator[dict[str, str]]:
    """Start a server for each engine; yield what reward workers must have in their environment to ask them.

    Where too few samples have a reward and a server has ended meanwhile, that is the reason, and a loss.
    """
    deadlines, slots = context.deadlines, context.resources.device_slots(JUDGE)
    addresses = [context.resources.node(device.node_id).network.address for device in slots.devices]
    worker = RayClassWithInitArgs(
        "mrl.rollout.judge_server:JudgeServer", judge, deadlines.engine_start_s or deadlines.call_s
    )
    group = RayWorkerGroup(JUDGE, worker, Mesh(len(addresses)), context)
    try:
        gpus = group.visible_gpus() if device == "gpu" else []
        key = secrets.token_urlsafe(32)
        urls = [url for url in group.serve(addresses, gpus, key) if url]
        yield {URLS_VARIABLE: " ".join(urls), KEY_VARIABLE: key}
    except RewardError as error:
        ended = {rank: how for rank, how in enumerate(group.ends()) if how}
        if not ended:
            raise
        said = "\n".join(f"the judge's server of rank {rank} has ended {how}" for rank, how in ended.items())
        fix = "mend what ended it; training.max_restarts has a run go on by itself"
        raise WorkerDied(f"{said}\n{error.what}", fix=fix, role=JUDGE, ranks=list(ended)) from error
    finally:
        group.shutdown()
