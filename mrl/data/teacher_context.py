"""The prompt of a teacher that sees more than the policy, such as the answer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from enum import Enum

from mrl.config.arithmetic import shows_success
from mrl.config.schema import Config
from mrl.data.chat import ChatTokenizer
from mrl.data.conversation import PromptEncoder, prompt_encoder
from mrl.data.rlhf_dataset import RLHFDataset, SkippedRow, shorten, to_batch
from mrl.data.rows import GroundTruth, Message, PromptRow, first_answer
from mrl.data.successes import other_successes
from mrl.errors import DataError
from mrl.protocol import DataProto

_KEY = "algorithm.distillation.context"
_PLACE = re.compile(r"\{(prompt|ground_truth|success)\}")
_NUM_CHECKED = 256


class Untaught(Enum):
    """Why a sample has no teacher."""

    NO_SUCCESS = "no_success"
    """No other sample of the prompt is a success."""
    CONTROL_TOKEN = "control_token"
    """The success contains a control token, which would speak in another role. With another tokenizer: the response
    contains one before its end, which is no text."""
    TOO_LONG = "too_long"
    """The teacher's prompt has more than `context_tokens`, and `data.overlong` does not shorten it. With another
    tokenizer: prompt and response have more tokens than the teacher reads at once."""
    NOT_TEXT = "not_text"
    """With another tokenizer: the response is not valid UTF-8."""
    OTHER_TEXT = "other_text"
    """With another tokenizer: the teacher's tokens are another text, because its tokenizer has no token for a part of
    the response, or rewrites it."""


OF_SUCCESS = (Untaught.NO_SUCCESS, Untaught.CONTROL_TOKEN, Untaught.TOO_LONG)
"""Reasons with {success}."""
OF_TEXT = (Untaught.CONTROL_TOKEN, Untaught.TOO_LONG, Untaught.NOT_TEXT, Untaught.OTHER_TEXT)
"""Reasons with another tokenizer, which a context excludes."""


class TeacherContext:
    """Writes `algorithm.distillation.context` in place of the user's last message."""

    def __init__(self, config: Config, encoder: PromptEncoder) -> None:
        distillation = config.algorithm.distillation
        assert distillation is not None, "a context belongs to distillation"
        assert distillation.context is not None, "it is configured"
        self._text, self._encoder, self._overlong = distillation.context, encoder, config.data.overlong
        self._limit = distillation.context_tokens or config.rollout.max_prompt_tokens
        self._success_at, self._success_after = distillation.success_at, distillation.success_after
        self.shows_success = shows_success(config.algorithm)

    def prompts(self, samples: DataProto) -> list[list[int] | Untaught]:
        """Return the token ids of the teacher's prompt of each sample, or why it has no teacher."""
        if not self.shows_success:
            return list(self.prompts_of_rows(samples))
        assert self._success_at is not None, "the rules require it with {success}"
        others = other_successes(list(samples["uid"]), samples["scores"].tolist(), self._success_at)
        texts = samples["response_text"]
        shown = [Untaught.NO_SUCCESS if other is None else self._shown(texts[other]) for other in others]
        return [
            prompt if isinstance(prompt, Untaught) else self._cut(*prompt) or Untaught.TOO_LONG
            for prompt in self._write(samples, shown)
        ]

    def prompts_of_rows(self, rows: DataProto) -> list[list[int]]:
        """Return the prompts without a sample: with an empty success. Raise an error if one is too long."""
        found = []
        for prompt in self._write(rows, [""] * len(rows)):
            assert not isinstance(prompt, Untaught), "every row has an empty success"
            if (ids := self._cut(*prompt)) is None:
                fix = f"{_KEY}_tokens={len(prompt[0])}, or data.overlong=left, right or middle, which shorten it"
                what = f"the teacher's prompt has {len(prompt[0])} tokens; at most {self._limit}"
                raise DataError(what, where=prompt[1].where, fix=fix)
            found.append(ids)
        return found

    def _shown(self, response: str) -> str | Untaught:
        text = response if self._success_after is None else response.rpartition(self._success_after)[2]
        return Untaught.CONTROL_TOKEN if self._encoder.has_control_token(text) else text

    def _write(
        self, rows: DataProto, successes: Sequence[str | Untaught]
    ) -> list[tuple[list[int], PromptRow] | Untaught]:
        """Return the token ids of each row with its success. Equal prompts of a group are written once."""
        written: dict[tuple[str, str], PromptRow] = {}
        columns = zip(rows["uid"], rows["messages"], rows["ground_truth"], rows["data_source"], successes, strict=True)
        for uid, messages, truth, source, success in columns:
            if not isinstance(success, Untaught) and (uid, success) not in written:
                said = self._messages(messages, truth, success, uid)
                written[uid, success] = PromptRow(said, source, None, truth, {}, None, _where(uid))
        ids = self._encoder.encode([self._encoder.render(row) for row in written.values()])
        prompts = dict(zip(written, zip(ids, written.values(), strict=True), strict=True))
        pairs = zip(rows["uid"], successes, strict=True)
        return [success if isinstance(success, Untaught) else prompts[uid, success] for uid, success in pairs]

    def _messages(
        self, messages: Sequence[Message], truth: GroundTruth | None, success: str, uid: str
    ) -> tuple[Message, ...]:
        last = max((at for at, message in enumerate(messages) if message["role"] == "user"), default=None)
        if last is None:
            raise DataError("has no message of the user, whose last one the context replaces", where=_where(uid))
        if truth is None and "{ground_truth}" in self._text:
            fix = f"set columns.ground_truth, or {_KEY} without {{ground_truth}}"
            raise DataError("has no ground truth, which the context shows to the teacher", where=_where(uid), fix=fix)
        values = {"prompt": messages[last]["content"], "ground_truth": first_answer(truth), "success": success}
        # In one pass, so that placeholders inside a message are not filled in.
        text = _PLACE.sub(lambda place: values[place[1]], self._text)
        return (*messages[:last], {**messages[last], "content": text}, *messages[last + 1 :])

    def _cut(self, ids: list[int], row: PromptRow) -> list[int] | None:
        """Return the prompt, shortened if `data.overlong` says so, or None if it is too long."""
        if len(ids) <= self._limit:
            return ids
        return None if self._overlong == "error" else shorten(ids, self._limit, self._overlong, row.where)


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
            context.prompts_of_rows(to_batch(prompts))


def _where(uid: str) -> str:
    return f"prompt {uid}"
