"""Which tokens of a conversation the assistant says, as its chat template renders them.

A turn begins where the template would call for it: behind what it makes of the messages before, which must stand in the
whole conversation unchanged. It ends with the first control token behind, which is the end that the model is to write;
what the template puts after that (a line break) nobody says. A template that renders former turns otherwise than the
model read or wrote them (it drops their thinking) would teach what never happens: such a row is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from mrl.data.chat import PromptEncoder
from mrl.data.rlhf_dataset import Continuation
from mrl.data.rows import PromptRow
from mrl.errors import BadRow, DataError

_FIX = "batch.loss_on=last, options in data.template, or a template that keeps it in data.template_file"


class ConversationEncoder(PromptEncoder):
    """Encodes prompts, and what follows them."""

    def answer(self, row: PromptRow, prompt: str, prompt_ids: list[int]) -> Continuation:
        """Return the tokens from the rendered prompt to the end of the last turn, and which of them are learned."""
        if self._raw_text:
            (ids,) = self._tokenizer([row.said[0]["content"]], add_special_tokens=False)["input_ids"]
            assert self._tokenizer.eos_token_id is not None, "load_tokenizer refuses one without"
            return Continuation([*ids, self._tokenizer.eos_token_id], [True] * (len(ids) + 1))
        messages = [*row.messages, *row.said]
        whole = self._applied(messages, row.where, calls_for_answer=False)
        places = range(len(row.messages), len(messages))
        turns = {at: self._turn(messages, at, whole, row) for at in places if messages[at]["role"] == "assistant"}
        tokens = self._with_places(whole)
        num_before = sum(end <= len(prompt) for _, (_, end) in tokens)
        is_same = [token for token, _ in tokens[:num_before]] == prompt_ids
        for at, (start, _) in turns.items():
            if not is_same or any(begin < start < end for _, (begin, end) in tokens):
                what = f"message {at} (assistant) begins within a token, which is one with what stands before it"
                raise BadRow(what, where=row.where, fix="take line breaks and spaces from its beginning")
        last = max(end for _, end in turns.values())
        said = [(token, place) for token, place in tokens[num_before:] if place[1] <= last]
        is_learned = [any(a <= begin and end <= b for a, b in turns.values()) for _, (begin, end) in said]
        return Continuation([token for token, _ in said], is_learned)

    def _turn(self, messages: Sequence[dict[str, str]], at: int, whole: str, row: PromptRow) -> tuple[int, int]:
        """Return where in the whole text a turn begins and ends."""
        before = self._applied(messages[:at], row.where, calls_for_answer=True)
        what = f"message {at} (assistant): the chat template"
        if not whole.startswith(before):
            what += " renders what stands before it otherwise than when it called for this answer"
            raise BadRow(what, where=row.where, fix=_FIX)
        end = self._control.search(whole, len(before))
        if end is None:
            raise BadRow(f"{what} ends it with no control token", where=row.where, fix="another data.template_file")
        # Templates trim and add line breaks; what is said stays.
        if "".join(messages[at]["content"].split()) not in "".join(whole[len(before) : end.end()].split()):
            raise BadRow(f"{what} leaves out some of it, such as its thinking", where=row.where, fix=_FIX)
        return len(before), end.end()

    def _with_places(self, text: str) -> list[tuple[int, tuple[int, int]]]:
        """Return the tokens of a text, each with where its characters begin and end."""
        try:
            encoded = self._tokenizer([text], add_special_tokens=False, return_offsets_mapping=True)
        except NotImplementedError as error:
            what = "the tokenizer does not say which characters a token stands for"
            raise DataError(what, where="model.path", fix="save it as tokenizer.json") from error
        return list(zip(encoded["input_ids"][0], encoded["offset_mapping"][0], strict=True))
