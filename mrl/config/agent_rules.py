"""Rules of the section `agent`: what no conversation could go by is said before anything starts."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.agent import EnvironmentConfig
from mrl.config.names import TEXT_FORMATS
from mrl.config.rules import problem
from mrl.config.schema import Config
from mrl.errors import Problem


def check_agent_rules(config: Config) -> Iterator[Problem]:
    """Yield every problem of the section."""
    takes_all = ""
    for label, environment in config.agent.environments.items():
        key = f"agent.environments.{label}"
        if takes_all:
            what = f"{takes_all} stands before it and takes every data source"
            yield problem(key, what, f"give {takes_all} sources, or let it stand last")
        takes_all = takes_all or ("" if environment.sources else label)
        if label in ("score", "model", *config.reward.functions):
            yield problem(key, "metrics call another part of the score so", "choose another name for this environment")
        yield from _tools(key, environment)
        yield from _room(key, environment, config)
    if config.agent.deterministic and not config.agent.environments:
        what = "nothing is an agent here, and each engine would generate one sample at a time"
        yield problem("agent.deterministic", what, "agent.deterministic=false")


def _tools(key: str, environment: EnvironmentConfig) -> Iterator[Problem]:
    if environment.name == "tools" and not environment.tools:
        yield problem(f"{key}.tools", "names no tool", f"{key}.tools.calculator.name=calculator")
    if environment.name != "tools" and environment.tools:
        what = f"{environment.name} offers no tools: the environment `tools` does"
        yield problem(f"{key}.tools", what, f"{key}.name=tools, or its own {key}.options")


def _room(key: str, environment: EnvironmentConfig, config: Config) -> Iterator[Problem]:
    room, longest = config.rollout.max_response_tokens, environment.max_observation_tokens
    if longest is not None and longest >= room:
        what = f"an observation of {longest} tokens leaves no room for a turn in the {room} of a response"
        yield problem(
            f"{key}.max_observation_tokens", what, f"less, or more than rollout.max_response_tokens={longest}"
        )
    if config.data.raw_text and environment.format not in TEXT_FORMATS and ":" not in environment.format:
        what = f"the format {environment.format} answers in roles, and data.raw_text has no chat template"
        yield problem(f"{key}.format", what, f"{key}.format={TEXT_FORMATS[0]}, or data.raw_text=false")
