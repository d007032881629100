"""A model measured as validation measures it, by engines that load its files: nothing is trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from mrl.config.model_names import in_directories
from mrl.config.schema import Config
from mrl.config.validation import ValidationConfig
from mrl.data.chat import load_tokenizer
from mrl.data.rlhf_dataset import open_dataset
from mrl.events import EventLog
from mrl.rollout.file_engine import FileEngine, engines_alone
from mrl.trainer.agents import has_stops, open_dialogs
from mrl.trainer.components import check_model, manager_class, model_setup
from mrl.trainer.generation import Generator
from mrl.trainer.judge import judge_served
from mrl.trainer.nodes import placed_run
from mrl.trainer.validation import Validator


def evaluate(
    config: Config, settings: Sequence[ValidationConfig], directory: Path, events: EventLog, say: Callable[[str], None]
) -> list[dict[str, float]]:
    """Return the figures of each of these, which are those of a run's validation at the same weights."""
    config = in_directories(engines_alone(config))
    tokenizer = load_tokenizer(config.model.path, config.data)
    check_model(model_setup("actor", config))
    dataset = open_dataset(config.data.validation, config.data, config.rollout, tokenizer)
    with ExitStack() as stack:
        reward, in_environments = config.validation_reward(), bool(config.agent.environments)
        if config.judge is None:
            rewards = stack.enter_context(manager_class(reward)(reward, events, others_score=in_environments))
        dialogs = open_dialogs(config, tokenizer, events.write, stack)
        context = stack.enter_context(placed_run(config, directory, events))
        engines = FileEngine(config, context, reads_text=has_stops(config.agent))
        stack.callback(engines.close)
        if config.judge is not None:
            reward = reward.told(stack.enter_context(judge_served(config.judge, config.cluster.device, context)))
            rewards = stack.enter_context(manager_class(reward)(reward, events, others_score=in_environments))
        found = []
        with engines.rollout_mode():
            for number, validation in enumerate(settings, 1):
                each = replace(config, validation=validation)
                generator = Generator(each, engines, rewards, tokenizer, lambda done, total: None, dialogs)
                validator = Validator(each, dataset, generator, directory, events)
                found.append(validator.run(0))
                for message in [*validator.warnings, f"{number} of {len(settings)} done"]:
                    say(message)
    return found
