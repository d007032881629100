"""The bytes of each token, and the shortest spans of a text that begin and end with a token in two tokenizers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

from mrl.data.chat import ChatTokenizer
from mrl.errors import DataError

_PROBE = "one, two: 1 + 2 = 3"
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(0x100) if byte not in _PRINTABLE]
_BYTE_OF_SYMBOL = {chr(byte): byte for byte in _PRINTABLE} | {chr(0x100 + at): byte for at, byte in enumerate(_OTHERS)}
"""Bytes by their symbol in byte-level BPE: bytes that are no printable character of Latin-1 get the next free ones."""
_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
_MARK = "\u2581"
"""A space in SentencePiece."""


_Form = Callable[[str | None], bytes | None]


class TokenBytes:
    """Returns the bytes of tokens, in byte-level BPE and in SentencePiece with its bytes as fallback."""

    def __init__(self, tokenizer: ChatTokenizer, path: str) -> None:
        """Find out how the vocabulary writes bytes. Refuse a tokenizer whose tokens do not add up to their text."""
        added = tokenizer.added_tokens_decoder
        self.added = frozenset(added)
        self.control = frozenset(number for number, token in added.items() if token.special)
        self._own = {number: str(token.content).encode() for number, token in added.items()}
        self._tokens = {number: token for token, number in tokenizer.get_vocab().items()}
        (ids,) = tokenizer([_PROBE], add_special_tokens=False)["input_ids"]
        forms: tuple[_Form, ...] = (_of_byte_level, _of_sentencepiece)
        for form in forms:
            text = b"".join(piece or b"" for piece in map(form, map(self._tokens.get, ids)))
            if text.lstrip(b" ") == _PROBE.encode():
                self._form, self._adds_space = form, text.startswith(b" ")
                return
        what = f"its tokens do not add up to their text: {_PROBE!r} is {[self._tokens.get(token) for token in ids]}"
        raise DataError(what, where=path, fix="use a model with byte-level BPE, or SentencePiece")

    def pieces(self, ids: Sequence[int]) -> list[bytes] | None:
        """Return the bytes of each token, or None if a token does not exist.

        Some tokenizers write a space before a text. Like their decoder, leave out the first space of the first token.
        """
        pieces = []
        for token in ids:
            piece = self._own.get(token)
            if piece is None and (piece := self._form(self._tokens.get(token))) is None:
                return None
            pieces.append(piece)
        if self._adds_space and pieces:
            pieces[0] = pieces[0].removeprefix(b" ")
        return pieces


def _of_byte_level(token: str | None) -> bytes | None:
    if token is None or any(symbol not in _BYTE_OF_SYMBOL for symbol in token):
        return None
    return bytes(_BYTE_OF_SYMBOL[symbol] for symbol in token)


def _of_sentencepiece(token: str | None) -> bytes | None:
    if token is None:
        return None
    byte = _FALLBACK.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(_MARK, " ").encode()


def shared_spans(pieces: Sequence[bytes], others: Sequence[bytes]) -> tuple[list[int], list[int]]:
    """Return the number of the span of each piece, for two ways to cut the same bytes.

    A span ends where a piece ends in both. A piece without bytes belongs to the span that its place ends or is in.
    """
    ends, ends_of_others = (np.cumsum([len(piece) for piece in cut], dtype=np.int64) for cut in (pieces, others))
    shared = np.intersect1d(ends, ends_of_others)
    return np.searchsorted(shared, ends).tolist(), np.searchsorted(shared, ends_of_others).tolist()
