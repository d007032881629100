"""Responses in the tokens of a teacher with another tokenizer, and the spans of text that both share."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers.convert_slow_tokenizer import bytes_to_unicode

from mrl.config.resolved.load import load_config
from mrl.config.schema import Config, ModelConfig, TeacherConfig
from mrl.data.chat import load_tokenizer
from mrl.data.teacher_context import Untaught
from mrl.data.teacher_text import AlignedResponse, ResponseAligner, aligned_sizes
from mrl.data.token_bytes import TokenBytes
from mrl.errors import DataError
from tests.data.two_tokenizers import END, SECOND_END, TURN, WORDS, byte_level, sentencepiece

NAMES = ("words", "straddling", "sentencepiece")
UNICODE_BYTES = {symbol: byte for byte, symbol in bytes_to_unicode().items()}
LAPTOP = str(Path(__file__).parents[2] / "configs" / "laptop-distill.yaml")


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("tokenizers")
    return {
        "words": byte_level(directory / "words", 420, words=True),
        "straddling": byte_level(directory / "straddling", 700, words=False),
        "sentencepiece": sentencepiece(directory / "sentencepiece", 200),
    }


def config_of(policy: Path, teacher: Path) -> Config:
    config = load_config(LAPTOP).config
    of_teacher = TeacherConfig(path=str(teacher), max_tokens_per_device=64)
    return replace(config, model=ModelConfig(path=str(policy)), teacher=of_teacher)


def aligner_of(policy: Path, teacher: Path) -> ResponseAligner:
    return ResponseAligner(config_of(policy, teacher), load_tokenizer(str(policy)), str(teacher), "other tokens")


def bytes_of(text: str, *, of_sentencepiece: bool) -> bytes:
    """The bytes of a token, by the tables of transformers."""
    if not of_sentencepiece:
        return bytes(UNICODE_BYTES[symbol] for symbol in text)
    return bytes.fromhex(text[3:5]) if text.startswith("<0x") else text.replace("▁", " ").encode()


class Vocabulary:
    """The tokens of a tokenizer by their bytes."""

    def __init__(self, path: Path) -> None:
        tokenizer, self.of_sentencepiece = load_tokenizer(str(path)), path.name == "sentencepiece"
        self.bytes = {
            token: bytes_of(text, of_sentencepiece=self.of_sentencepiece)
            for text, token in tokenizer.get_vocab().items()
            if token not in tokenizer.added_tokens_decoder
        }

    def pieces(self, ids: list[int]) -> list[bytes]:
        pieces = [self.bytes[token] for token in ids]
        if self.of_sentencepiece and pieces:
            pieces[0] = pieces[0].removeprefix(b" ")
        return pieces

    def drawn(self, text: str, chance: np.random.Generator) -> list[int]:
        """Draw tokens that write a text, as a policy that does not follow its tokenizer's merges may."""
        left, ids = text.encode(), list[int]()
        if self.of_sentencepiece:
            left = b" " + left
        while left:
            fitting = [token for token, piece in self.bytes.items() if piece and left.startswith(piece)]
            ids.append(int(chance.choice(fitting)))
            left = left[len(self.bytes[ids[-1]]) :]
        return ids


def brute_force(pieces: list[bytes], others: list[bytes]) -> tuple[list[int], list[int]]:
    """Try all pairs of prefixes. Return the number of the first equal pair that contains each piece."""
    cuts = [
        (i, j)
        for i in range(1, len(pieces) + 1)
        for j in range(1, len(others) + 1)
        if b"".join(pieces[:i]) == b"".join(others[:j])
    ]
    assert cuts == sorted(cuts)
    return tuple(  # type: ignore[return-value]
        [sum(cut[side] <= at for cut in cuts) for at in range(num)]
        for side, num in ((0, len(pieces)), (1, len(others)))
    )


@pytest.mark.parametrize("teacher", NAMES)
@pytest.mark.parametrize("policy", NAMES)
def test_spans_equal_a_brute_force_search(policy: str, teacher: str, paths: dict[str, Path]) -> None:
    aligner = aligner_of(paths[policy], paths[teacher])
    tokenizer, own, other = load_tokenizer(str(paths[policy])), Vocabulary(paths[policy]), Vocabulary(paths[teacher])
    teachers = load_tokenizer(str(paths[teacher]))
    chance, several = np.random.default_rng(0), 0
    for number in range(60):
        text = "".join(chance.choice([*WORDS, " ", " ", "q", "Ж"], 6)).lstrip(" ") or "?"
        ids = (
            tokenizer([text], add_special_tokens=False)["input_ids"][0] if number % 3 == 0 else own.drawn(text, chance)
        )
        read = aligner.align(ids)
        assert isinstance(read, AlignedResponse)
        assert read.ids == teachers([text], add_special_tokens=False)["input_ids"][0]
        pieces, others = own.pieces(ids), other.pieces(read.ids)
        assert (read.policy_spans, read.spans) == brute_force(pieces, others)
        for span in range(max(read.spans) + 1):
            texts = [
                b"".join(piece for piece, at in zip(cut, spans, strict=True) if at == span)
                for cut, spans in ((pieces, read.policy_spans), (others, read.spans))
            ]
            assert texts[0] == texts[1]
            several += read.spans.count(span) > 1 < read.policy_spans.count(span)
    assert several or policy == teacher, "no span has several tokens of both"


@pytest.mark.parametrize("end", [END, SECOND_END])
def test_the_policys_end_is_a_span_with_the_teachers_end(end: str, paths: dict[str, Path]) -> None:
    policy, teacher = paths["words"], paths["straddling"]
    (paths["words"] / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [load_tokenizer(str(policy)).get_vocab()[text] for text in (END, SECOND_END)]})
    )
    tokenizer, aligner = load_tokenizer(str(policy)), aligner_of(policy, teacher)
    (said,) = tokenizer(["the 12"], add_special_tokens=False)["input_ids"]
    ended, cut = aligner.align([*said, tokenizer.get_vocab()[end]]), aligner.align(said)
    assert isinstance(ended, AlignedResponse)
    assert isinstance(cut, AlignedResponse)
    last = max(cut.spans) + 1
    assert ended.ids == [*cut.ids, load_tokenizer(str(teacher)).get_vocab()[END]]
    assert ended.spans == [*cut.spans, last]
    assert ended.policy_spans == [*cut.policy_spans, last]
    assert aligner.align([tokenizer.get_vocab()[end]]) == AlignedResponse(ended.ids[-1:], [0], [0])
    assert aligner.align([]) == AlignedResponse([], [], [])


def test_a_control_token_in_a_response_has_no_text(paths: dict[str, Path]) -> None:
    aligner, vocab = aligner_of(paths["words"], paths["straddling"]), load_tokenizer(str(paths["words"])).get_vocab()
    for inside in (TURN, END):
        assert aligner.align([vocab["t"], vocab[inside], vocab["t"]]) is Untaught.CONTROL_TOKEN
    assert aligner.align([vocab["t"], vocab[TURN]]) is Untaught.CONTROL_TOKEN, "it does not end a turn"


def test_text_that_looks_like_a_control_token_is_no_end_of_a_turn(paths: dict[str, Path]) -> None:
    aligner, teacher = aligner_of(paths["words"], paths["straddling"]), load_tokenizer(str(paths["straddling"]))
    own = Vocabulary(paths["words"])
    read = aligner.align(own.drawn(f"1{END}2", np.random.default_rng(1)))
    assert isinstance(read, AlignedResponse)
    assert teacher.get_vocab()[END] not in read.ids
    assert teacher.decode(read.ids) == f"1{END}2"


@pytest.mark.parametrize("policy", ["words", "sentencepiece"])
def test_only_a_cut_response_may_end_inside_a_character(policy: str, paths: dict[str, Path]) -> None:
    tokenizer, aligner = load_tokenizer(str(paths[policy])), aligner_of(paths[policy], paths["straddling"])
    single = {piece: token for token, piece in Vocabulary(paths[policy]).bytes.items() if len(piece) == 1}

    def ids(text: bytes) -> list[int]:
        return [single[text[at : at + 1]] for at in range(len(text))]

    end = tokenizer.get_vocab()[END]
    cut = aligner.align(ids("a🙂".encode()[:-1]))
    assert isinstance(cut, AlignedResponse)
    assert cut.policy_spans == [0], "the bytes of the character have no span"
    assert aligner.align([*ids("a🙂".encode()[:-1]), end]) is Untaught.NOT_TEXT
    assert aligner.align(ids(b"a\xff")) is Untaught.NOT_TEXT, "no character begins like this"
    assert aligner.align(ids(b"a\x80b")) is Untaught.NOT_TEXT
    assert aligner.align(ids("🙂".encode()[:2])) is Untaught.NOT_TEXT, "nothing is left"
    assert isinstance(aligner.align([*ids("a🙂".encode()), end]), AlignedResponse)


def test_tokens_of_a_matrix_without_text_are_not_text(paths: dict[str, Path]) -> None:
    aligner = aligner_of(paths["words"], paths["straddling"])
    assert aligner.align([len(load_tokenizer(str(paths["words"]))) + 3]) is Untaught.NOT_TEXT


def test_a_teacher_that_rewrites_or_does_not_know_the_text_is_no_teacher(
    paths: dict[str, Path], tmp_path: Path
) -> None:
    own = Vocabulary(paths["words"])
    for name, change in (("nfc", {"normalizer": {"type": "NFC"}}), ("small", {})):
        path = byte_level(tmp_path / name, 300, words=True)
        tokenizer = json.loads((path / "tokenizer.json").read_text()) | change
        if name == "small":
            tokenizer["model"]["vocab"].pop("q")
        (path / "tokenizer.json").write_text(json.dumps(tokenizer))
        aligner, chance = aligner_of(paths["words"], path), np.random.default_rng(0)
        text = "cafe\u0301" if name == "nfc" else "a q"
        assert aligner.align(own.drawn(text, chance)) is Untaught.OTHER_TEXT
        assert isinstance(aligner.align(own.drawn("caf", chance)), AlignedResponse)


def test_a_tokenizer_whose_tokens_are_no_bytes_is_refused(paths: dict[str, Path], tmp_path: Path) -> None:
    path = byte_level(tmp_path / "lower", 300, words=True)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Replace", "pattern": {"String": "o"}, "content": "u"}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(DataError, match="its tokens do not add up to their text: 'one, two") as caught:
        TokenBytes(load_tokenizer(str(path)), str(path))
    assert caught.value.fix == "use a model with byte-level BPE, or SentencePiece"


def test_sizes_count_tokens_and_spans_of_the_rows_that_have_a_teacher() -> None:
    read = [AlignedResponse([1, 2, 3], [0, 1, 1], [0, 0, 1, 1]), Untaught.NOT_TEXT, AlignedResponse([], [], [])]
    assert aligned_sizes(read) == {"tokens_per_token": 3 / 4, "spans_per_token": 2 / 4}
    assert aligned_sizes(read[1:]) == {}
