"""A tokenizer of one token per byte, made here: real files that transformers and vLLM load like any other's."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

END = "<|end|>"
PAD = "<|pad|>"
ROLE_TOKENS = {role: f"<|{role}|>" for role in ("system", "user", "assistant", "tool")}
TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '" + END + "' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '" + ROLE_TOKENS["assistant"] + "' }}{%- endif %}"
)
MAX_LENGTH = 1 << 20


def save_toy_tokenizer(directory: Path) -> int:
    """Write the tokenizer's files into `directory`; returns the number of tokens that a model of it needs."""
    from transformers import PreTrainedTokenizerFast

    # Every byte has a token, so nothing is unknown and no text is lost.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: number for number, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=list(ROLE_TOKENS.values()),
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = TEMPLATE
    made.save_pretrained(directory)
    return len(made)
