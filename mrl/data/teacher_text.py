"""Responses in the tokens of a teacher with another tokenizer, and the spans of text that both tokenizers share.

A span is the shortest piece of the response that begins and ends with a token in both tokenizers, as in GOLD, on-policy
distillation over model families by Hugging Face. Sums of log-probs over a span can be compared; those of its tokens
cannot. The token that ends a turn is a span, with different tokens for the policy and the teacher.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from mrl.config.schema import Config
from mrl.data.chat import ChatTokenizer, different_tokens, end_tokens, load_tokenizer
from mrl.data.conversation import ResponseEncoder
from mrl.data.teacher_context import Untaught
from mrl.data.token_bytes import TokenBytes, shared_spans
from mrl.errors import ModelError


@dataclass(frozen=True)
class AlignedResponse:
    """A response in the teacher's tokens, and the number of the span of each token."""

    ids: list[int]
    spans: list[int]
    policy_spans: list[int]
    """Spans of the policy's tokens. The last tokens of a response that was cut inside a character have none."""


Read = Sequence[AlignedResponse | Untaught]
"""The response that a teacher reads of each row, or why it reads none."""


class ResponseAligner:
    """Writes a policy's responses in the tokens of a teacher."""

    def __init__(self, config: Config, policy: ChatTokenizer, path: str, difference: str) -> None:
        """Read the tokenizer of the teacher in `path`, whose difference from the policy's is known."""
        self.encoder, self.difference = ResponseEncoder(path, config.data), difference
        self._policy, self._teacher = TokenBytes(policy, config.model.path), TokenBytes(self.encoder.tokenizer, path)
        ends = end_tokens(policy, config.model.path, config.rollout)
        self._ends = self._policy.added.intersection(token for ids in ends.values() for token in ids)

    def align(self, response: Sequence[int]) -> AlignedResponse | Untaught:
        """Return a response in the teacher's tokens, or why it has no teacher."""
        is_ended = bool(response) and response[-1] in self._ends
        said = response[:-1] if is_ended else response
        if not self._policy.control.isdisjoint(said):
            return Untaught.CONTROL_TOKEN
        pieces = self._policy.pieces(said)
        if pieces is None or (text := _text(pieces, is_cut=not is_ended)) is None:
            return Untaught.NOT_TEXT
        ids, pieces = self.encoder.text(text[0]), pieces[: text[1]]
        read = self._teacher.pieces(ids)
        if read is None or b"".join(read) != text[0].encode():
            return Untaught.OTHER_TEXT
        policy_spans, spans = shared_spans(pieces, read)
        if is_ended:
            last = max(spans, default=-1) + 1
            ids, spans, policy_spans = [*ids, self.encoder.end], [*spans, last], [*policy_spans, last]
        return AlignedResponse(ids, spans, policy_spans)


def _text(pieces: Sequence[bytes], *, is_cut: bool) -> tuple[str, int] | None:
    """Return the text of the tokens and their number, or None if this is no text.

    The last tokens of a response that was cut are left out if they are a part of a character.
    """
    with suppress(UnicodeDecodeError):
        codecs.getincrementaldecoder("utf-8")().decode(b"".join(pieces), final=not is_cut)
        for num in range(len(pieces), 0, -1):
            with suppress(UnicodeDecodeError):
                return b"".join(pieces[:num]).decode(), num
        return None if pieces else ("", 0)
    return None


def aligned(read: Read) -> list[AlignedResponse]:
    return [said for said in read if isinstance(said, AlignedResponse)]


def aligned_sizes(read: Read) -> dict[str, float]:
    """Return the numbers of the teacher's tokens and of spans for each of the policy's tokens. Without any, nothing."""
    sizes = [(len(said.policy_spans), len(said.ids), len({*said.spans})) for said in aligned(read)]
    num, *others = (sum(column) for column in zip(*sizes, strict=True)) if sizes else (0,)
    return {f"{name}_per_token": x / num for name, x in zip(("tokens", "spans"), others, strict=True)} if num else {}


def response_aligners(config: Config, policy: ChatTokenizer) -> dict[str, ResponseAligner]:
    """Return the aligner of each teacher with another tokenizer than the policy's, by role.

    Raise an error if the configuration needs the teacher to read the policy's tokens.
    """
    aligners: dict[str, ResponseAligner] = {}
    for role, teacher in config.teaching_models().items():
        if difference := different_tokens(policy, load_tokenizer(teacher.path, renders=False)):
            _refuse(config, teacher.path, difference)
            aligners[role] = ResponseAligner(config, policy, teacher.path, difference)
    return aligners


def _refuse(config: Config, path: str, difference: str) -> None:
    """Raise an error if a teacher that reads texts cannot be used with this configuration."""
    distillation, key = config.algorithm.distillation, "algorithm.distillation"
    assert distillation is not None, "a rule requires it with a teacher"
    form, advantage = distillation.form, f"{key}.form=advantage"
    texts = "it needs texts, but conversations with environments are token ids"
    sampled = "an estimate at each token needs the teacher's log-prob of the token, and it has those of spans of tokens"
    problems = (
        (config.agent.environments, texts, "choose "),
        (form == "sampled", sampled, f"{advantage}, which has the gradient of estimator=k2, or "),
        (form != "advantage", f"{key}.form={form} compares distributions over one vocabulary", f"{advantage}, or "),
        (
            distillation.context,
            f"{key}.context is written in the policy's tokens and template",
            f"{key}.context=null, or ",
        ),
    )
    for is_refused, what, fix in problems:
        if is_refused:
            fix += "a teacher with the policy's tokenizer"
            raise ModelError(f"{difference}; {what}", where=path, fix=fix)
