"""The engine of a worker, by `ROLE.strategy`. A process imports Megatron only if its model needs it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from mrl.config.schema import MegatronModelConfig
from mrl.models.families import FAMILIES, read_spec
from mrl.models.open_model import require_table
from mrl.workers.messages import ModelSetup


def open_groups(settings: MegatronModelConfig, seed: int) -> AbstractContextManager[Any]:
    """Create the process groups of the layout for a block."""
    if settings.strategy == "fsdp":
        from mrl.fsdp.parallel import shard_groups

        return shard_groups(settings.parallel, settings.fsdp.shard_size, seed)
    from mrl.engine.parallel import model_parallel

    return model_parallel(settings.parallel, seed)


def make_engine(setup: ModelSetup, groups: Any, actor: Any = None) -> Any:
    """Return a `MegatronEngine` or an `FsdpEngine`, without weights; with `actor`, on the model of that engine."""
    spec = read_spec(setup.path)
    if setup.settings.strategy == "fsdp":
        from mrl.fsdp.engine import FsdpEngine, FsdpRequest

        return FsdpEngine(FsdpRequest(spec, setup.head, setup.settings, setup.new_head, setup.seed), groups)
    require_table(spec, "its role", FAMILIES)
    from mrl.engine.engine import EngineRequest, MegatronEngine

    request = EngineRequest(
        spec,
        setup.head,
        setup.settings,
        new_head=setup.new_head,
        seed=setup.seed,
        replays_routes=setup.replays_routes,
    )
    if actor is None:
        return MegatronEngine(request, groups)
    from mrl.engine.shared_model import SharedModel

    return MegatronEngine(request, groups, SharedModel(actor))
