"""`ActorCriticWorker`: a rank of the policy, and of a critic with adapters on the policy's frozen model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mrl.config.algorithm import AlgorithmConfig
from mrl.controller import Dispatch, RankInfo, register
from mrl.controller.worker import MethodSpec, registered_methods
from mrl.workers.actor import ActorRolloutRefWorker
from mrl.workers.critic import CriticWorker
from mrl.workers.messages import CRITIC_PREFIX, ModelFacts, ModelSetup


class ActorCriticWorker(ActorRolloutRefWorker):
    """Has each method of `CriticWorker` too, with `CRITIC_PREFIX` before its name."""

    def __init__(
        self, place: RankInfo, setup: ModelSetup, algorithm: AlgorithmConfig, temperature: float, horizon_tokens: int
    ) -> None:
        super().__init__(place, setup, algorithm, temperature, horizon_tokens)
        assert setup.critic is not None, "the critic has a setup"
        self.critic = CriticWorker(place, setup.critic, algorithm, horizon_tokens)

    @register(Dispatch.ONE_TO_ALL)
    def critic_init_model(self) -> ModelFacts:
        """Add the critic to the model, which `init_model` has loaded."""
        return self.critic.init_on(self.engine)


def _forwarded(spec: MethodSpec) -> Callable[..., Any]:
    def call(self: ActorCriticWorker, *arguments: Any, **options: Any) -> Any:
        return getattr(self.critic, spec.name)(*arguments, **options)

    call.__name__ = CRITIC_PREFIX + spec.name
    return register(spec.dispatch, spec.reads, spec.writes, spec.optional, stores=spec.stores)(call)


for _spec in registered_methods(CriticWorker).values():
    if not hasattr(ActorCriticWorker, CRITIC_PREFIX + _spec.name):
        setattr(ActorCriticWorker, CRITIC_PREFIX + _spec.name, _forwarded(_spec))
