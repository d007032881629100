"""Small trained tokenizers with different vocabularies: byte-level BPE, and SentencePiece's BPE with fallback bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

WORDS = (
    "the",
    "theory",
    "of",
    "naïve",
    "café",
    "日本語",
    "日本",
    "🙂🙃",
    "🙂",
    "e\u0301",
    "12",
    "123",
    "+",
    "=",
    "\n",
    "()",
)
TEXTS = [f"{a} {b}{c} {a}" for a in WORDS for b in WORDS for c in WORDS]
END, SECOND_END, TURN = "</turn>", "<stop>", "<turn>"
TEMPLATE = (
    "{%- for m in messages %}{{ '" + TURN + "' + m['role'] + ':' + m['content'] + '" + END + "' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '" + TURN + "assistant:' }}{%- endif %}"
)


def byte_level(path: Path, size: int, *, words: bool, texts: Sequence[str] = TEXTS) -> Path:
    """Write a tokenizer whose tokens may straddle words unless `words`, and characters in any case."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return _save(tokenizer, path)


def sentencepiece(path: Path, size: int) -> Path:
    """Write a tokenizer that puts a space before a text, and has bytes for characters that it does not know."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    few = [text for text in TEXTS if "🙂" not in text]
    trained.train_from_iterator(few, trainers.BpeTrainer(vocab_size=size, show_progress=False))
    model: dict[str, Any] = json.loads(trained.to_str())["model"]
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    merges = [tuple(pair) for pair in model["merges"]]
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _save(tokenizer, path, unk_token="<unk>")


def _save(tokenizer: Tokenizer, path: Path, **tokens: str) -> Path:
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        additional_special_tokens=[TURN, SECOND_END],
        clean_up_tokenization_spaces=False,
        **tokens,
    )
    made.chat_template = TEMPLATE
    made.save_pretrained(path)
    return path
