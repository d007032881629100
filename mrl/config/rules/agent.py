"""Rules for the section `agent`."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.agent import TEXT_FORMATS, EnvironmentConfig
from mrl.config.rules.problems import problem
from mrl.config.schema import Config
from mrl.errors import Problem


def check_agent(config: Config) -> Iterator[Problem]:
    takes_all = ""
    for label, environment in config.agent.environments.items():
        key = f"agent.environments.{label}"
        if takes_all:
            what = f"{takes_all} comes first and handles every data source"
            yield problem(key, what, f"give {takes_all} sources, or move it to the end")
        takes_all = takes_all or ("" if environment.sources else label)
        if label in ("score", "model", *config.reward.functions):
            yield problem(
                key,
                "metrics already use this name for another part of the score",
                "choose another name for this environment",
            )
        yield from _environment(key, environment, config)
    if config.agent.deterministic and not config.agent.environments:
        what = "there is no environment, and each engine would generate one sample at a time"
        yield problem("agent.deterministic", what, "agent.deterministic=false")


def _environment(key: str, environment: EnvironmentConfig, config: Config) -> Iterator[Problem]:
    if environment.name == "tools" and not environment.tools:
        yield problem(f"{key}.tools", "no tool is configured", f"{key}.tools.calculator.name=calculator")
    if environment.name != "tools" and environment.tools:
        what = f"{environment.name} does not use `tools`; only the environment `tools` does"
        yield problem(f"{key}.tools", what, f"{key}.name=tools, or its own {key}.options")
    room, longest = config.rollout.max_response_tokens, environment.max_observation_tokens
    if longest is not None and longest >= room:
        what = f"an observation of {longest} tokens leaves no room for a turn in a response of {room} tokens"
        fix = f"set a smaller value, or rollout.max_response_tokens above {longest}"
        yield problem(f"{key}.max_observation_tokens", what, fix)
    if config.data.raw_text and environment.format not in TEXT_FORMATS and ":" not in environment.format:
        what = f"the format {environment.format} writes chat roles, but data.raw_text uses no chat template"
        yield problem(f"{key}.format", what, f"{key}.format={TEXT_FORMATS[0]}, or data.raw_text=false")
