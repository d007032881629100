"""Conversations that a model is to learn from: what SFT reads, and training on ranked responses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mrl.config.schema import ColumnsConfig, SourceConfig
from mrl.config.sft import RankedConfig, SftConfig
from mrl.data.chat import ChatTokenizer, template_options
from mrl.data.conversation import ConversationEncoder
from mrl.data.ranked_rows import RankedParser
from mrl.data.rlhf_dataset import Continuation, Prompt, RLHFDataset, SkippedRow
from mrl.data.rows import PromptRow, RowParser
from mrl.data.sampler import Draw
from mrl.data.sources import RawRows, open_source
from mrl.errors import BadRow, DataError

PROMPT, ANSWER = "prompt", "answer"


class MessageParser(RowParser):
    """Turn rows whose chat messages, those of columns.prompt, end with the answer into prompts with answers."""

    def __init__(self, columns: ColumnsConfig, source_name: str) -> None:
        super().__init__(replace(columns, prompt=PROMPT, ground_truth=ANSWER), source_name)
        self._column = columns.prompt

    def parse(self, raw: object, where: str) -> PromptRow:
        row = raw if isinstance(raw, Mapping) else {}
        messages = row.get(self._column)
        if not isinstance(messages, list) or not messages or not isinstance(messages[-1], Mapping):
            raise BadRow(f"column `{self._column}` must be a list of messages", where=where)
        if (role := messages[-1].get("role")) != "assistant":
            what = f"column `{self._column}` must end with a message of the assistant, not of {role}"
            raise BadRow(what, where=where)
        return super().parse({**row, PROMPT: messages[:-1], ANSWER: messages[-1].get("content")}, where)


class SftDataset(RLHFDataset):
    """Prompts with what follows them in their conversations."""

    def __init__(
        self,
        sources: Mapping[str, tuple[RawRows, RowParser]],
        encoder: ConversationEncoder,
        config: SftConfig,
    ) -> None:
        super().__init__(sources, encoder, config.batch.max_prompt_tokens, config.data.overlong)
        self._answers, self._batch = encoder, config.batch

    def _row(self, draw: Draw) -> PromptRow:
        row = super()._row(draw)
        if row.ground_truth is None:
            raise DataError("there is nothing to learn", where=row.where, fix="columns.ground_truth, or batch.messages")
        if not isinstance(row.ground_truth, str):
            what = "the ground truth is a list of accepted answers: which one is to be learned?"
            raise BadRow(what, where=row.where, fix="name a column of text in columns.ground_truth")
        messages = (*row.messages, {"role": "assistant", "content": row.ground_truth})
        first = len(row.messages)
        if self._batch.loss_on == "all":
            roles = [message["role"] for message in messages]
            first = roles.index("assistant", roles.index("user"))
        return replace(row, messages=messages[:first], said=messages[first:])

    def _responses(self, row: PromptRow) -> dict[str, tuple[dict[str, str], ...]]:
        """Return what may follow the prompt, each of which is learned from by itself, by its name in messages."""
        return {"answer": row.said}

    def _prompt(self, draw: Draw, row: PromptRow, text: str, ids: list[int]) -> Prompt | SkippedRow:
        found = super()._prompt(draw, row, text, ids)
        if isinstance(found, SkippedRow):
            return found
        try:
            answers = [
                self._answer(name, replace(row, said=said), text, ids) for name, said in self._responses(row).items()
            ]
        except DataError as error:
            return SkippedRow(draw, error)
        return replace(found, answers=tuple(answers))

    def _answer(self, name: str, row: PromptRow, text: str, ids: list[int]) -> Continuation:
        answer = self._answers.answer(row, text, ids)
        if (num := len(answer.ids)) > (limit := self._batch.max_response_tokens):
            what = f"the {name} has {num} tokens; batch.max_response_tokens is {limit}"
            fix = f"batch.max_response_tokens={num}, or shorten the {name}"
            raise DataError(what, where=row.where, fix=fix)
        return answer


class RankedDataset(SftDataset):
    """Prompts with the responses that were ranked."""

    def _row(self, draw: Draw) -> PromptRow:
        return RLHFDataset._row(self, draw)

    def _responses(self, row: PromptRow) -> dict[str, tuple[dict[str, str], ...]]:
        chosen, *others = row.said
        found: dict[str, tuple[dict[str, str], ...]] = {"chosen response": (chosen,)}
        for number, message in enumerate(others):
            found["rejected response" if len(others) == 1 else f"rejected response [{number}]"] = (message,)
        return found

    def _prompt(self, draw: Draw, row: PromptRow, text: str, ids: list[int]) -> Prompt | SkippedRow:
        found = super()._prompt(draw, row, text, ids)
        if isinstance(found, Prompt) and len({tuple(answer.ids) for answer in found.answers}) < len(found.answers):
            what = "two responses are the same tokens: they differ in what the chat template takes away, such as spaces"
            return SkippedRow(draw, BadRow(what, where=row.where, fix="remove the row, or one of the two"))
        return found


def open_sft_dataset(sources: Mapping[str, SourceConfig], config: SftConfig, tokenizer: ChatTokenizer) -> SftDataset:
    """Return the rows of `sources`: the training or the validation ones."""
    opened: dict[str, tuple[RawRows, RowParser]] = {}
    for name, source in sources.items():
        if isinstance(config, RankedConfig):
            opened[name] = (open_source(source), RankedParser(source.columns, name))
        elif (column := config.batch.messages) is None:
            opened[name] = (open_source(source), RowParser(source.columns, name))
        else:
            columns = replace(source.columns, prompt=column, ground_truth=None)
            opened[name] = (open_source(replace(source, columns=columns)), MessageParser(columns, name))
    encoder = ConversationEncoder(tokenizer, template_options(config.data), raw_text=config.data.raw_text)
    return (RankedDataset if isinstance(config, RankedConfig) else SftDataset)(opened, encoder, config)
