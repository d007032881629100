"""The section `agent`: environments that answer the model, and the processes that run them."""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from mrl.config.bounds import Count, NotNegative, PlainName, Proportion, Seconds, Text, at_least, component

ENVIRONMENTS = {
    "tools": "mrl.agents.tools:ToolEnvironment",
    "search_r1": "mrl.agents.search:SearchR1",
    "program": "mrl.agents.program:Program",
}
TEXT_FORMATS = ("search_r1",)
"""Formats that write text without chat roles."""
FORMATS = {
    "hermes": "mrl.agents.formats:Hermes",
    "llama3_json": "mrl.agents.formats:Llama3Json",
    "harmony": "mrl.agents.formats:Harmony",
    "qwen3_coder": "mrl.agents.published_formats:QwenCoder",
    "glm45": "mrl.agents.published_formats:Glm45",
    "deepseek_v3": "mrl.agents.published_formats:DeepSeekV3",
    "deepseek_v31": "mrl.agents.published_formats:DeepSeekV31",
    "kimi_k2": "mrl.agents.published_formats:KimiK2",
    "search_r1": "mrl.agents.formats:SearchR1Tags",
}
TOOLS = {
    "calculator": "mrl.agents.built_in_tools:calculator",
    "python": "mrl.agents.built_in_tools:python",
    "search": "mrl.agents.search:search",
}


@dataclass(frozen=True, kw_only=True)
class ToolConfig:
    """A tool of the environment `tools`."""

    name: Annotated[str, component("tool", TOOLS)]
    """A built-in tool (`calculator`, `python`, `search`), or your own function as `package.module:function`. Its type
    hints and its docstring are shown to the model."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for the function, not shown to the model."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """The environment that answers the model, and its limits."""

    name: Annotated[str, component("environment", ENVIRONMENTS)] = "tools"
    """`tools`, which calls functions; `search_r1`; `program`, your own command, which reaches the model at an
    OpenAI-compatible address; or your own class as `package.module:class`."""
    sources: list[Text] | None = None
    """Patterns (`nq`, `math/*`) of the data sources that it handles; null or an empty list handles all. If several
    match, the first one handles the source. Prompts of a source without an environment are answered in one turn."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for the class."""
    tools: dict[PlainName, ToolConfig] = field(default_factory=dict)
    """Name of each tool for the model -> the tool."""
    format: Annotated[str, component("format", FORMATS)] = "hermes"
    """How the model writes tool calls: `hermes` (Qwen 2.5 and 3), `qwen3_coder` (also Qwen3.5), `llama3_json`, `glm45`
    (GLM-4.5 to 4.7), `deepseek_v3`, `deepseek_v31`, `kimi_k2`, `harmony` (gpt-oss), `search_r1`, or your own as
    `package.module:class`."""
    max_turns: Annotated[int, at_least(2)] = 4
    """Largest number of turns of the model, including its final answer. A call in the last turn gets no answer."""
    max_turn_tokens: Count | None = None
    """Longest turn. Null is limited only by `rollout.max_response_tokens`, which all turns and observations share."""
    max_observation_tokens: Count | None = None
    """Longest observation. A longer one is cut as text and counted. Null is limited only by
    `rollout.max_response_tokens`: an observation that does not fit ends the conversation."""
    weight: float = 1.0
    """Weight of the environment's own score, which is added to the score of the functions."""

    def takes(self, data_source: str) -> bool:
        return not self.sources or any(fnmatchcase(data_source, pattern) for pattern in self.sources)

    def full_turns(self, max_response_tokens: int) -> int | None:
        """Return how many turns of full length fit into a response, with observations of full length between them.
        Return None if a limit is missing."""
        if self.max_turn_tokens is None or self.max_observation_tokens is None:
            return None
        both = self.max_turn_tokens + self.max_observation_tokens
        return (max_response_tokens + self.max_observation_tokens) // both

    def whole_response_tokens(self) -> int | None:
        """Return the tokens of the longest conversation after its prompt. Return None if a limit is missing."""
        if self.max_turn_tokens is None or self.max_observation_tokens is None:
            return None
        return self.max_turns * self.max_turn_tokens + (self.max_turns - 1) * self.max_observation_tokens


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """Conversations of several turns: the environments and the processes that run them."""

    environments: dict[PlainName, EnvironmentConfig] = field(default_factory=dict)
    """Name of each environment in metrics -> the environment. If empty, each prompt is answered once."""
    num_workers: Count = 4
    """Number of processes that run environments."""
    concurrency: Count = 256
    """Conversations that each process handles at once. `async def` code of an environment waits without blocking the
    others; computation blocks them."""
    limit_s: Seconds = 30.0
    """Time for an environment to answer one turn."""
    start_limit_s: Seconds = 60.0
    """Time for a worker to import the environments."""
    memory_bytes: Annotated[int, at_least(1 << 27)] = 2 << 30
    """Limit of a worker's address space."""
    max_samples_per_s: Seconds | None = None
    """Conversations started per second, for a service with a rate limit. Null sets no limit."""
    samples_per_worker: Count = 10_000
    """Conversations after which a worker process is replaced."""
    retries: NotNegative = 1
    """How often a conversation is restarted, with the same seeds, after its environment failed."""
    on_failure: Literal["drop", "stop"] = "drop"
    """Whether a conversation whose environment failed on every try is left out of the update and counted, or stops the
    run. It never gets score 0."""
    max_failed_share: Proportion = 0.05
    """Share of the conversations of a step that may fail. More stop the run."""
    deterministic: bool = False
    """Make each engine generate one conversation at a time, without its prefix cache. Tokens and log-probs are then
    bit-identical for any number of engines and any speed of the tools. Slow: nothing is batched."""
    environment: dict[PlainName, Text] = field(default_factory=dict)
    """Environment variables for the environments. Variables of the run that may hold secrets are not passed on."""

    def name_for(self, data_source: str) -> str | None:
        return next((name for name, environment in self.environments.items() if environment.takes(data_source)), None)

    def scores(self, data_source: str) -> bool:
        """Return whether an environment with a nonzero weight handles the prompts of a data source."""
        name = self.name_for(data_source)
        return name is not None and self.environments[name].weight != 0
