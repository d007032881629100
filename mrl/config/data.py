"""The section `data`: sources of prompts and of rows, and the order in which they are drawn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from mrl.config.bounds import NotNegative, PlainName, Share, Text, component, own_component

SAMPLERS = ("shares", "difficulty")
DATASETS = ("toy", "reasoning_gym")
TOY_TASKS = ("addition", "reversing", "sorting")
FILE_KINDS = (".jsonl", ".parquet")


def _is_own_dataset(name: str) -> bool:
    head, colon, _ = name.partition(":")
    return bool(colon) and head not in DATASETS and not name.endswith(FILE_KINDS)


@dataclass(frozen=True, kw_only=True)
class ColumnsConfig:
    """Columns of a source. A dot selects a nested column (`reward_model.ground_truth`)."""

    prompt: Text = "prompt"
    """Chat messages (a list of `role` and `content`), or one text, which becomes a user message."""
    data_source: Text | None = "data_source"
    """Data source of the row, for rewards and metrics. Null uses the name of the source."""
    ability: Text | None = "ability"
    """Skill that the row tests, for metrics. Null if the source has no such column."""
    ground_truth: Text | None = "reward_model.ground_truth"
    """Correct answer: text, a list of accepted texts, or `{"target": ...}` of either. Null reads none."""
    extra_info: Text | None = "extra_info"
    """Other data for rewards. Null if the source has no such column."""
    id: Text | None = None
    """Unique id of the row. Null if the source has none."""
    chosen: Text = "chosen"
    """For `mrl rm` and `mrl dpo`, the preferred response: text, or a whole conversation that ends with it. For labeled
    responses (`kto`), the response."""
    rejected: Text | None = "rejected"
    """The other response in the same form, or a list of other responses, best first. Null without one."""
    label: Text | None = None
    """A number: the margin by which the preferred response should win (reward.margin), or the value of a response
    (`regression`). It can also be a list with one number for each response. For `kto`: true for a desirable response,
    false for an undesirable one."""


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One source of prompts."""

    dataset: Annotated[str, own_component(_is_own_dataset)]
    """A `.jsonl` or `.parquet` file, or a dataset by name. A pattern (`data/*.parquet`) selects several files. A
    dataset is a known one, such as `toy:addition` or `reasoning_gym:leg_counting`, or your own as
    `package.module:attribute`."""
    weight: Share | None = None
    """Share of the prompts, relative to the other sources. Null weighs sources by their number of rows."""
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    options: dict[str, Any] = field(default_factory=dict)
    """Passed on to a dataset that is not a file."""


def is_file(source: SourceConfig) -> bool:
    """Return whether a source is read from files. Any other source is a dataset with a name."""
    return source.dataset.endswith(FILE_KINDS)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The prompts."""

    train: dict[PlainName, SourceConfig]
    """Name of each source of training prompts -> its dataset."""
    validation: dict[PlainName, SourceConfig] = field(default_factory=dict)
    """Validation sources in the same form. Each is used once per validation."""
    shuffle: bool = True
    """Reshuffle the rows of each source in every epoch."""
    seed: NotNegative = 0
    """Seed of the row order."""
    sampler: Annotated[str, component("sampler", SAMPLERS)] = "shares"
    """How to choose the next row: by the `shares` of the sources; by `difficulty`, which also leaves out prompts that
    were too easy or too hard by the scores of functions and environments; or by your own `PromptSampler`, as
    `package.module:class`."""
    sampler_options: dict[str, Any] = field(default_factory=dict)
    """Passed on to the sampler (`difficulty`: between, rest)."""
    overlong: Literal["error", "drop", "left", "right", "middle"] = "error"
    """Handling of a prompt longer than rollout.max_prompt_tokens: stop the run, drop and count the prompt, or cut
    tokens at the left, at the right (including the template's generation prompt) or in the middle."""
    max_bad_rows: NotNegative = 0
    """Malformed rows that may be skipped, each with an event. One more stops the run."""
    template: dict[str, Any] = field(default_factory=dict)
    """Passed on to the tokenizer's chat template (`enable_thinking: false`)."""
    template_file: Text | None = None
    """A Jinja file to use as the chat template instead of the tokenizer's. Base models have none."""
    tools: Text | None = None
    """A JSON file with a list of tools for the chat template."""
    raw_text: bool = False
    """Treat prompts as plain text, not chats. They are encoded unchanged, after the tokens that the tokenizer puts
    before a text."""

    def sources(self) -> Iterator[tuple[str, SourceConfig]]:
        for part, sources in (("train", self.train), ("validation", self.validation)):
            yield from ((f"data.{part}.{name}", source) for name, source in sources.items())
