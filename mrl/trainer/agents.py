"""What the trainer speaks with environments by: their processes, formats and templates, as the section `agent` says."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict

from mrl.agents.client import EnvironmentClient
from mrl.agents.environment import Start
from mrl.agents.formats import load_format
from mrl.agents.loop import Dialog, Dialogs, Speaker
from mrl.agents.observation import ObservationEncoder, TurnTemplate
from mrl.agents.worker import MAX_ANSWER_BYTES
from mrl.config.agent import AgentConfig
from mrl.config.schema import Config
from mrl.data.chat import ChatTokenizer, template_options
from mrl.errors import AgentError
from mrl.events import Event
from mrl.rewards.pool import WorkerPool


def open_dialogs(
    config: Config, tokenizer: ChatTokenizer, write: Callable[[Event], None], stack: ExitStack
) -> Dialogs | None:
    """Return what drives conversations with environments, whose processes end with the stack; None without any."""
    if not config.agent.environments:
        return None
    speakers = {name: _speaker(name, config, tokenizer) for name in config.agent.environments}
    environments: EnvironmentClient[Dialog] = EnvironmentClient(environment_pool(config.agent), write)
    stack.callback(environments.close)
    return Dialogs(config.agent, environments, speakers, tokenizer.decode, write)


def environment_pool(config: AgentConfig) -> WorkerPool:
    told = json.dumps(asdict(config)).encode()
    return WorkerPool("agent", "mrl.agents.worker", told, config.environment, MAX_ANSWER_BYTES + 1024)


def has_stops(config: AgentConfig) -> bool:
    return any(load_format(each.format).stops for each in config.environments.values())


def _speaker(name: str, config: Config, tokenizer: ChatTokenizer) -> Speaker:
    environment = config.agent.environments[name]
    form, options = load_format(environment.format), template_options(config.data)
    template = None if config.data.raw_text else TurnTemplate(tokenizer, options)
    limit = environment.max_observation_tokens or config.rollout.max_response_tokens

    def render(start: Start) -> tuple[str, list[int]]:
        if config.data.raw_text:
            what = "the environment begins with messages of its own, and data.raw_text has no template for them"
            raise AgentError(what, where=f"agent.environments.{name}")
        text = TurnTemplate(tokenizer, options, start.tools).render(start.messages, calls_for_answer=True)
        return text, tokenizer([text], add_special_tokens=False)["input_ids"][0]

    observations = ObservationEncoder(tokenizer, form, template, max_tokens=limit)
    return Speaker(form, observations, render, config.rollout.max_prompt_tokens)
