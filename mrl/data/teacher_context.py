"""The prompt of a teacher that sees more than the policy, such as the answer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import torch

from mrl.config.schema import Config
from mrl.data.chat import ChatTokenizer
from mrl.data.conversation import PromptEncoder, prompt_encoder
from mrl.data.rlhf_dataset import RLHFDataset, SkippedRow, shorten, to_batch
from mrl.data.rows import GroundTruth, Message, PromptRow, first_answer
from mrl.errors import DataError
from mrl.protocol import DataProto, Jagged
from mrl.protocol.columns import from_rows

_KEY = "algorithm.distillation.context"
_PLACE = re.compile(r"\{(prompt|ground_truth)\}")
_NUM_CHECKED = 256


class TeacherContext:
    """Writes `algorithm.distillation.context` in place of the user's last message."""

    def __init__(self, config: Config, encoder: PromptEncoder) -> None:
        distillation = config.algorithm.distillation
        assert distillation is not None, "a context belongs to distillation"
        assert distillation.context is not None, "it is configured"
        self._text, self._encoder, self._overlong = distillation.context, encoder, config.data.overlong
        self._limit = distillation.context_tokens or config.rollout.max_prompt_tokens

    def prompts(self, rows: DataProto) -> Jagged:
        """Return the token ids of the teacher's prompt of each row."""
        columns = zip(rows["uid"], rows["messages"], rows["ground_truth"], rows["data_source"], strict=True)
        written = [
            PromptRow(self._messages(messages, truth, uid), source, None, truth, {}, None, _where(uid))
            for uid, messages, truth, source in columns
        ]
        ids = self._encoder.encode([self._encoder.render(row) for row in written])
        return from_rows([torch.tensor(self._cut(*pair), dtype=torch.int32) for pair in zip(ids, written, strict=True)])

    def _messages(self, messages: Sequence[Message], truth: GroundTruth | None, uid: str) -> tuple[Message, ...]:
        last = max((at for at, message in enumerate(messages) if message["role"] == "user"), default=None)
        if last is None:
            raise DataError("has no message of the user, whose last one the context replaces", where=_where(uid))
        if truth is None and "{ground_truth}" in self._text:
            fix = f"set columns.ground_truth, or {_KEY} without {{ground_truth}}"
            raise DataError("has no ground truth, which the context shows to the teacher", where=_where(uid), fix=fix)
        values = {"prompt": messages[last]["content"], "ground_truth": first_answer(truth)}
        # In one pass, so that placeholders inside a message are not filled in.
        text = _PLACE.sub(lambda place: values[place[1]], self._text)
        return (*messages[:last], {**messages[last], "content": text}, *messages[last + 1 :])

    def _cut(self, ids: list[int], row: PromptRow) -> list[int]:
        if len(ids) <= self._limit:
            return ids
        kept = None if self._overlong == "error" else shorten(ids, self._limit, self._overlong, row.where)
        if kept is None:
            fix = f"{_KEY}_tokens={len(ids)}, or data.overlong=left, right or middle, which shorten it"
            what = f"the teacher's prompt has {len(ids)} tokens; at most {self._limit}"
            raise DataError(what, where=row.where, fix=fix)
        return kept


def teacher_context(config: Config, tokenizer: ChatTokenizer) -> TeacherContext | None:
    """Return the context of the teachers, or None if they read the policy's prompts."""
    distillation = config.algorithm.distillation
    if distillation is None or distillation.context is None:
        return None
    return TeacherContext(config, prompt_encoder(tokenizer, config.data))


def check_context(config: Config, tokenizer: ChatTokenizer, datasets: Iterable[RLHFDataset]) -> None:
    """Raise an error if the teachers' prompt cannot be made for one of the first rows of a data set."""
    if (context := teacher_context(config, tokenizer)) is None:
        return
    for dataset in datasets:
        read = dataset.read(dataset.draws(0, _NUM_CHECKED))
        if prompts := [prompt for prompt in read if not isinstance(prompt, SkippedRow)]:
            context.prompts(to_batch(prompts))


def _where(uid: str) -> str:
    return f"prompt {uid}"
