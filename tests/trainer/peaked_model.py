"""A tiny model with the two things of trained ones that show rounding: sure predictions, and large logits."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch

from mrl.demo.model import make_model

_STEPS, _ROWS, _LENGTH = 120, 16, 40
_LOGITS = 40.0
"""Times as large as a new model's."""


def make_peaked(directory: Path) -> Path:
    """Write the demo's model after some steps on sums with random digits, so that it is certain of all other tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    make_model(directory, seed=1)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    model.lm_head.weight.data *= _LOGITS
    optimizer, chance = torch.optim.AdamW(model.parameters(), lr=2e-3), torch.Generator().manual_seed(0)
    for _ in range(_STEPS):
        numbers = torch.randint(100, 1000, (_ROWS, 8), generator=chance).tolist()
        texts = ["".join(f"{one}+{other}=?;" for one, other in pairwise(row)) for row in numbers]
        ids = torch.tensor([tokenizer(text)["input_ids"][:_LENGTH] for text in texts])
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(directory)
    return directory
