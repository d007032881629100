"""RLHFDataset: prompts by source and row, checked, rendered, encoded and cut to length. A batch of them is a
DataProto."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Literal

import torch

from mrl.config.data import DataConfig, SourceConfig
from mrl.config.schema import RolloutConfig
from mrl.config.sft import RankedConfig, SftConfig
from mrl.data.chat import ChatTokenizer
from mrl.data.conversation import Continuation, PromptEncoder, prompt_encoder
from mrl.data.learned_rows import read_answered, read_labeled, read_ranked
from mrl.data.rows import PromptRow, ReadRow, read_prompt
from mrl.data.sampler import Draw
from mrl.data.sources import RawRows, open_source
from mrl.errors import BadRow, DataError
from mrl.protocol import DataProto, Jagged
from mrl.protocol.columns import from_rows

CHECKED_AT_ONCE = 1024
_NEXT_RANK = 1 << 48
"""Offset between the row ids of a prompt's responses. No run draws this many prompts."""

Overlong = Literal["error", "drop", "left", "right", "middle"]


@dataclass(frozen=True)
class Prompt:
    draw: Draw
    row: PromptRow
    text: str
    """Rendered text, uncut even if the token ids were cut."""
    ids: list[int]
    answers: tuple[Continuation, ...] = ()
    """Answers for supervised training: one, or ranked responses, best first."""


@dataclass(frozen=True)
class SkippedRow:
    """A row without a usable prompt: malformed or too long."""

    draw: Draw
    error: DataError | None
    """None if the prompt was too long and the configuration drops it."""
    num_tokens: int = 0


class RLHFDataset:
    """Prompts of several sources. Rows are read on demand."""

    def __init__(
        self,
        sources: Mapping[str, tuple[RawRows, ReadRow]],
        encoder: PromptEncoder,
        max_prompt_tokens: int,
        overlong: Overlong,
        max_response_tokens: int = 0,
    ) -> None:
        """Take the rows and the reader of each source. `max_response_tokens` limits responses that are learned."""
        self._sources = dict(sources)
        self._encoder = encoder
        self._max_prompt_tokens = max_prompt_tokens
        self._overlong = overlong
        self._max_response_tokens = max_response_tokens
        self._starts = list(accumulate(self.sizes.values(), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def sizes(self) -> dict[str, int]:
        return {name: len(rows) for name, (rows, _) in self._sources.items()}

    def read(self, draws: Sequence[Draw]) -> list[Prompt | SkippedRow]:
        parsed: list[tuple[Draw, PromptRow, str] | SkippedRow] = []
        for draw in draws:
            try:
                row = self._row(draw)
                parsed.append((draw, row, self._encoder.render(row)))
            except BadRow as error:
                parsed.append(SkippedRow(draw, error))
        ids = iter(self._encoder.encode([entry[2] for entry in parsed if not isinstance(entry, SkippedRow)]))
        return [entry if isinstance(entry, SkippedRow) else self._prompt(*entry, next(ids)) for entry in parsed]

    def check(self) -> Iterator[SkippedRow]:
        """Go through every row once, and yield the rows that would be skipped, dropped or refused, including duplicate
        ids."""
        seen: dict[str, dict[str | int, str]] = {name: {} for name in self._sources}
        for begin in range(0, len(self), CHECKED_AT_ONCE):
            for entry in self.read(self.draws(begin, begin + CHECKED_AT_ONCE)):
                if isinstance(entry, SkippedRow):
                    yield entry
                elif (row_id := entry.row.id) is not None:
                    first = seen[entry.draw.source].setdefault(row_id, entry.row.where)
                    if first != entry.row.where:
                        what = f'the id "{row_id}" occurs twice, first at {first}'
                        yield SkippedRow(entry.draw, BadRow(what, where=entry.row.where))

    def _row(self, draw: Draw) -> PromptRow:
        rows, read = self._sources[draw.source]
        return read(rows.row(draw.row), rows.where(draw.row))

    def _prompt(self, draw: Draw, row: PromptRow, text: str, ids: list[int]) -> Prompt | SkippedRow:
        try:
            kept = shorten(ids, self._max_prompt_tokens, self._overlong, row.where)
            if kept is None:
                return SkippedRow(draw, None, len(ids))
            answers = [self._answer(name, replace(row, said=said), text, ids) for name, said in row.responses.items()]
            if len({tuple(answer.ids) for answer in answers}) < len(answers):
                what = "two responses have the same tokens: they differ only in characters that the template removes"
                raise BadRow(f"{what}, such as spaces", where=row.where, fix="remove the row, or one of the two")
        except DataError as error:
            return SkippedRow(draw, error, len(ids))
        return Prompt(draw, row, text, kept, tuple(answers))

    def _answer(self, name: str, row: PromptRow, text: str, ids: list[int]) -> Continuation:
        answer = self._encoder.answer(row, text, ids)
        if (num := len(answer.ids)) > self._max_response_tokens:
            what = f"the {name} has {num} tokens; batch.max_response_tokens is {self._max_response_tokens}"
            fix = f"batch.max_response_tokens={num}, or shorten the {name}"
            raise DataError(what, where=row.where, fix=fix)
        return answer

    def draws(self, begin: int, end: int) -> list[Draw]:
        """Return the rows from `begin` to before `end` or to the last row, counted over all sources, as draws of their
        first epoch."""
        draws, names = [], list(self._sources)
        for index in range(begin, min(end, len(self))):
            source = bisect_right(self._starts, index) - 1
            draws.append(Draw(index, names[source], 0, index - self._starts[source]))
        return draws


def open_dataset(
    sources: Mapping[str, SourceConfig], data: DataConfig, rollout: RolloutConfig, tokenizer: ChatTokenizer
) -> RLHFDataset:
    opened: dict[str, tuple[RawRows, ReadRow]] = {
        name: (open_source(source), partial(read_prompt, source.columns, name)) for name, source in sources.items()
    }
    return RLHFDataset(opened, prompt_encoder(tokenizer, data), rollout.max_prompt_tokens, data.overlong)


def open_sft_dataset(sources: Mapping[str, SourceConfig], config: SftConfig, tokenizer: ChatTokenizer) -> RLHFDataset:
    """Return the training or validation rows of `sources`, to learn from."""
    batch, data = config.batch, config.data
    opened: dict[str, tuple[RawRows, ReadRow]] = {}
    for name, source in sources.items():
        if isinstance(config, RankedConfig):
            read_ranks = read_labeled if config.is_labeled() else read_ranked
            opened[name] = (open_source(source, is_ranked=True), partial(read_ranks, source.columns, name))
            continue
        columns = source.columns
        if batch.messages is not None:
            columns = replace(columns, prompt=batch.messages, ground_truth=None)
        opened[name] = (open_source(replace(source, columns=columns)), partial(read_answered, batch, columns, name))
    encoder = prompt_encoder(tokenizer, data)
    return RLHFDataset(opened, encoder, batch.max_prompt_tokens, data.overlong, batch.max_response_tokens)


def to_batch(prompts: Sequence[Prompt]) -> DataProto:
    """Return one row per prompt, or one for each of its answers. The id of the first is the number of its draw."""
    answers = [answer for prompt in prompts for answer in prompt.answers]
    ranks = [rank for prompt in prompts for rank in range(max(1, len(prompt.answers)))]
    prompts = [prompt for prompt in prompts for _ in range(max(1, len(prompt.answers)))]
    tensors: dict[str, torch.Tensor | Jagged] = {}
    tensors["prompts"] = from_rows([torch.tensor(prompt.ids, dtype=torch.int32) for prompt in prompts])
    if answers:
        tensors["responses"] = from_rows([torch.tensor(answer.ids, dtype=torch.int32) for answer in answers])
        tensors["response_mask"] = from_rows([torch.tensor(answer.is_learned) for answer in answers])
    if any(ranks) or any(prompt.row.labels for prompt in prompts):
        labels = [
            prompt.row.labels[rank] if prompt.row.labels else 0.0 for prompt, rank in zip(prompts, ranks, strict=True)
        ]
        tensors |= {"rank": torch.tensor(ranks), "label": torch.tensor(labels)}
    return DataProto.from_dict(
        tensors=tensors,
        non_tensors={
            "uid": [prompt.draw.uid for prompt in prompts],
            "prompt_text": [prompt.text for prompt in prompts],
            "messages": [prompt.row.messages for prompt in prompts],
            "data_source": [prompt.row.data_source for prompt in prompts],
            "ability": [prompt.row.ability for prompt in prompts],
            "ground_truth": [prompt.row.ground_truth for prompt in prompts],
            "extra_info": [prompt.row.extra_info for prompt in prompts],
        },
        row_ids=[prompt.draw.number + rank * _NEXT_RANK for prompt, rank in zip(prompts, ranks, strict=True)],
    )


def shorten(ids: list[int], limit: int, overlong: Overlong, where: str) -> list[int] | None:
    """Return at most `limit` token ids, or None if the prompt should be dropped."""
    if len(ids) <= limit:
        return ids
    match overlong:
        case "error":
            fix = "set data.overlong to drop, left, right or middle, or a larger rollout.max_prompt_tokens"
            raise DataError(f"the prompt has {len(ids)} tokens; at most {limit}", where=where, fix=fix)
        case "drop":
            return None
        case "left":
            return ids[-limit:]
        case "right":
            return ids[:limit]
        case "middle":
            head = limit // 2
            return ids[:head] + ids[len(ids) - (limit - head) :]
