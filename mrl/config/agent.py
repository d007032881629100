"""The section `agent`: environments that answer what the model writes, and the processes that they run in."""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from mrl.config.bounds import Count, NotNegative, PlainName, Proportion, Seconds, Text, at_least


@dataclass(frozen=True, kw_only=True)
class ToolConfig:
    """One of the tools that the environment `tools` offers."""

    name: Text
    """A built-in tool (`calculator`, `python`, `search`), or your own function as `package.module:function`: its type
    hints and its docstring are what the model is told of it."""
    options: dict[str, Any] = field(default_factory=dict)
    """Passed on to the function as keywords, and not shown to the model."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """Who answers what the model writes, and for how long."""

    name: Text = "tools"
    """`tools`, which calls functions, `search_r1`, or `program`, a command of yours that finds the model at an
    OpenAI-compatible address; or your own class as `package.module:class`."""
    sources: list[Text] | None = None
    """The data sources whose prompts it takes, as patterns (`nq`, `math/*`); null or none takes all. The first that
    takes a source has it; a source that none takes is answered in one turn, by nobody."""
    options: dict[str, Any] = field(default_factory=dict)
    """Passed on to the class as keywords."""
    tools: dict[PlainName, ToolConfig] = field(default_factory=dict)
    """What the model calls each tool -> which one it is."""
    format: Text = "hermes"
    """How the model writes calls: `hermes` (Qwen), `llama3_json`, `search_r1`; or your own as
    `package.module:class`."""
    max_turns: Annotated[int, at_least(2)] = 4
    """Turns of the model, its last answer among them; who calls in the last one gets no answer."""
    max_turn_tokens: Count | None = None
    """Longest turn; null is bounded by `rollout.max_response_tokens` alone, which all turns and what they are
    answered share."""
    max_observation_tokens: Count | None = None
    """Longest answer to a turn; what is longer is cut as text and counted. Null is bounded by
    `rollout.max_response_tokens` alone: one that no longer fits ends the conversation."""
    weight: float = 1.0
    """What the score is multiplied by that the environment itself gives; it is added to that of the functions."""

    def takes(self, data_source: str) -> bool:
        return not self.sources or any(fnmatchcase(data_source, pattern) for pattern in self.sources)

    def full_turns(self, max_response_tokens: int) -> int | None:
        """Return how many turns of full length a response holds, with full answers between them; None where a limit is
        missing."""
        if self.max_turn_tokens is None or self.max_observation_tokens is None:
            return None
        both = self.max_turn_tokens + self.max_observation_tokens
        return (max_response_tokens + self.max_observation_tokens) // both

    def whole_response_tokens(self) -> int | None:
        """Return the tokens of the longest conversation behind its prompt; None where a limit is missing."""
        if self.max_turn_tokens is None or self.max_observation_tokens is None:
            return None
        return self.max_turns * self.max_turn_tokens + (self.max_turns - 1) * self.max_observation_tokens


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """Conversations of several turns: the environments, and the processes that run them."""

    environments: dict[PlainName, EnvironmentConfig] = field(default_factory=dict)
    """What metrics call each environment -> which one it is; with none, each prompt is answered once."""
    num_workers: Count = 4
    """Processes that run environments."""
    concurrency: Count = 256
    """Conversations that each of them has in hand. What is `async def` in an environment waits beside the others;
    what computes holds them up."""
    limit_s: Seconds = 30.0
    """For an environment to answer one turn."""
    start_limit_s: Seconds = 60.0
    """For a worker to import the environments."""
    memory_bytes: Annotated[int, at_least(1 << 27)] = 2 << 30
    """Address space of a worker."""
    max_samples_per_s: Seconds | None = None
    """Conversations begun per second, for a service that allows no more; null is no bound."""
    samples_per_worker: Count = 10_000
    """Conversations after which a fresh process takes its place."""
    retries: NotNegative = 1
    """How often a conversation whose environment failed is begun again, with the same seeds."""
    on_failure: Literal["drop", "stop"] = "drop"
    """A conversation whose environment fails for good is left out of the update and counted, or stops the run. It is
    never scored 0."""
    max_failed_share: Proportion = 0.05
    """Share of the conversations of a step that may fail; more stop the run."""
    deterministic: bool = False
    """Have each engine generate one conversation at a time, and nothing from its prefix cache: tokens and log-probs
    are the same to the bit whatever the number of engines and however fast tools answer. Slow: nothing is batched."""
    environment: dict[PlainName, Text] = field(default_factory=dict)
    """Environment variables for the environments; those of the run that may hold secrets are not handed on."""

    def name_for(self, data_source: str) -> str | None:
        return next((name for name, each in self.environments.items() if each.takes(data_source)), None)

    def scores(self, data_source: str) -> bool:
        """Return whether an environment with a weight takes the prompts of a data source."""
        name = self.name_for(data_source)
        return name is not None and self.environments[name].weight != 0
