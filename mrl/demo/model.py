"""A model with 400,000 parameters in two layers and a tokenizer of bytes, created here without any download.

The files are real ones that transformers and vLLM load like those of other models.
"""

from __future__ import annotations

from pathlib import Path

import torch
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
MAX_LENGTH = 64


def make_model(directory: Path, seed: int, num_layers: int = 2, max_length: int = MAX_LENGTH) -> Path:
    """Write a random model with Qwen3's architecture in Hugging Face format."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    directory.mkdir(parents=True)
    vocab = save_toy_tokenizer(directory)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=max_length,
        tie_word_embeddings=False,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def save_toy_tokenizer(directory: Path) -> int:
    """Write the tokenizer's files into `directory`. Return the number of tokens that its model needs."""
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
        model_max_length=1 << 20,
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = TEMPLATE
    made.save_pretrained(directory)
    return len(made)
