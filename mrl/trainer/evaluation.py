"""Evaluation of a model as validation does it, by engines that load its files; nothing is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from mrl.agents.loop import has_stops, open_dialogs
from mrl.config.arithmetic import has_own_rollout_pool, num_engines, role_devices
from mrl.config.resolved.load import in_directories
from mrl.config.reward import JUDGE, RewardConfig
from mrl.config.schema import Config, PlacementConfig
from mrl.config.training import ValidationConfig
from mrl.data.chat import load_tokenizer
from mrl.data.rlhf_dataset import open_dataset
from mrl.events import EventLog
from mrl.rollout.hybrid_engine import HybridEngine
from mrl.trainer.checks import check_reward_models
from mrl.trainer.components import (
    check_model,
    judge_served,
    manager_class,
    model_probe,
    model_setup,
    started_groups,
    with_models,
)
from mrl.trainer.device_turns import DeviceTurns
from mrl.trainer.generation import Generator
from mrl.trainer.model_scores import ModelScores, scoring_models
from mrl.trainer.nodes import placed_run
from mrl.trainer.validation import Validator


def engines_alone(config: Config) -> Config:
    """Return a configuration with the same number of engines, and no other roles except the judge and reward models.

    Those keep their pools. They may share the engines' pool, because the engines have ended when they start.
    """
    engine_pool = config.placement.roles["rollout" if has_own_rollout_pool(config) else "actor"]
    pools, roles = (
        {engine_pool: num_engines(config) * config.rollout.num_devices},
        {"actor": "nobody", "rollout": engine_pool},
    )
    for role in config.scoring_models():
        pool = roles[role] = config.placement.roles[role]
        pools[pool] = config.placement.pools[pool]
    if config.judge is not None:
        pools[JUDGE], roles[JUDGE] = role_devices(config, JUDGE), JUDGE
    placement = PlacementConfig(pools=pools, roles=roles)
    return replace(config, placement=placement, critic=None, reference=None, teacher=None, teachers={})


class EngineSession:
    """Engines with the files of a model, and everything that scores their samples, until the end of a stack."""

    def __init__(
        self, config: Config, reward: RewardConfig, directory: Path, events: EventLog, say: Callable[[str], None]
    ) -> None:
        """Check the models. `config` comes from `engines_alone`."""
        self.config, self._reward, self._directory, self._events = config, reward, directory, events
        self.tokenizer = load_tokenizer(config.model.path, config.data)
        for role in ("actor", *config.scoring_models()):
            check_model(model_setup(role, config))
        for role, warning in check_reward_models(config, self.tokenizer):
            say(f"{role}: {warning}")

    @contextmanager
    def started(self) -> Iterator[None]:
        """Start engines, rewards and environments, for the length of the block."""
        config, reward, events = self.config, self._reward, self._events
        others_score = bool(config.agent.environments or config.scoring_models())
        with ExitStack() as stack:
            self.rewards = None
            if config.judge is None and reward.functions:
                self.rewards = stack.enter_context(manager_class(reward)(reward, events, others_score=others_score))
            self.dialogs = open_dialogs(config, self.tokenizer, events.write, stack)
            self._context = stack.enter_context(placed_run(config, self._directory, events))
            self.engines = HybridEngine(config, {}, self._context, reads_text=has_stops(config.agent), loads_files=True)
            self._ending = stack.enter_context(ExitStack())
            self._ending.callback(self.engines.close)
            if config.judge is not None:
                served = judge_served(config.judge, config.cluster.device, self._context)
                reward = reward.told(stack.enter_context(served))
                self.rewards = stack.enter_context(manager_class(reward)(reward, events, others_score=others_score))
            self._stack = stack
            yield

    def generator(self, config: Config) -> Generator:
        """Return a generator with these settings of sampling."""
        return Generator(config, self.engines, self.rewards, self.tokenizer, lambda done, total: None, self.dialogs)

    def scores(self) -> ModelScores:
        """End the engines, whose devices the reward models may need, and start these."""
        self._ending.close()
        config, names = self.config, list(self.config.scoring_models())
        probe = self._stack.enter_context(model_probe(config, names, self.tokenizer, self._events))
        groups = self._stack.enter_context(started_groups(config, self._context, names))
        roles = with_models(config, groups, self._events, probe, DeviceTurns(config))
        return ModelScores(scoring_models(config, roles, self.tokenizer))


def evaluate(
    config: Config, settings: Sequence[ValidationConfig], directory: Path, events: EventLog, say: Callable[[str], None]
) -> list[dict[str, float]]:
    """Return the figures for each of these settings, equal to those of a validation of a run with the same weights."""
    config = in_directories(engines_alone(config))
    session = EngineSession(config, config.validation_reward(), directory, events, say)
    dataset = open_dataset(config.data.validation, config.data, config.rollout, session.tokenizer)
    with session.started():
        validators, sampled = [], []
        with session.engines.rollout_mode():
            for number, validation in enumerate(settings, 1):
                settings_config = replace(config, validation=validation)
                generator = session.generator(settings_config)
                validators.append(Validator(settings_config, dataset, generator, directory, events))
                sampled.append(validators[-1].sample())
                say(f"{number} of {len(settings)} done")
        models = session.scores()
        figures = [
            validator.measure(0, batches, models) for validator, batches in zip(validators, sampled, strict=True)
        ]
        for message in (message for validator in validators for message in validator.warnings):
            say(message)
    return figures
