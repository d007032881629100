"""A policy's response as a model with another tokenizer reads it: its text, in that model's tokens and template.

The prompt is rendered by that model's template, which writes the token that begins a text itself, so the tokenizer adds
none. The response is cut into tokens by itself, as a policy writes it, and what looks like a control token in it stays
text: nobody ends a turn, or begins another, who is not asked to. Behind it stands the token that ends a turn of the
assistant, but not behind a response that its length cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mrl.config.schema import DataConfig
from mrl.data.chat import load_tokenizer
from mrl.data.conversation import ConversationEncoder
from mrl.data.rows import PromptRow

Message = dict[str, str]


class ResponseEncoder:
    """Encodes samples for a model, of whose template the options are not those of the policy's."""

    def __init__(self, path: str, data: DataConfig) -> None:
        """Read the model's tokenizer; a template that ends no turn is refused."""
        tokenizer = self._tokenizer = load_tokenizer(path, replace(data, template_file=None))
        self._prompts = ConversationEncoder(tokenizer, {}, raw_text=data.raw_text)
        asked = _row([{"role": "user", "content": "?"}], said="!")
        text = self._prompts.render(asked)
        (ids,) = self._prompts.encode([text])
        self._end = self._prompts.answer(asked, text, ids).ids[-1]

    def encode(self, messages: Sequence[Message], response: str, is_truncated: bool) -> tuple[list[int], list[int]]:
        """Return the tokens of the prompt and of the response; the score is read at the last."""
        (prompt,) = self._prompts.encode([self._prompts.render(_row(messages))])
        (ids,) = self._tokenizer([response], add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return prompt, ids if is_truncated and ids else [*ids, self._end]


def _row(messages: Sequence[Message], said: str = "") -> PromptRow:
    answer = ({"role": "assistant", "content": said},) if said else ()
    return PromptRow(tuple(messages), "", None, None, {}, None, "the prompt of a reward model", answer)
