"""Dense retrieval with an encoder of transformers, used like E5: prefixes, means over tokens, inner products."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mrl.agents.retriever import Found
from mrl.data.chat import load_tokenizer
from mrl.errors import ModelError, SetupError

_MAX_TOKENS, _BATCH = 256, 128


class DenseIndex:
    """Passages as vectors in memory, in float16 on a GPU."""

    def __init__(self, encoder: Path, texts: Sequence[str], device: str = "cpu") -> None:
        """Encode the texts on a device: `cpu`, `cuda` or `cuda:N`. A run on this machine may need all of its GPUs."""
        from transformers import AutoModel

        self._device = _checked_device(device)
        self._tokenizer = _tokenizer_that_pads(encoder)
        try:
            model: Any = AutoModel.from_pretrained(encoder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ModelError(f"not an encoder of transformers: {error}", where=str(encoder)) from error
        self._model = model.eval().to(self._device, torch.float32 if device == "cpu" else torch.float16)
        self._lock = threading.Lock()  # one batch at a time is faster than many that share the device
        self._vectors = self._encoded([f"passage: {text}" for text in texts])

    def find(self, queries: Sequence[str], topk: int) -> list[Found]:
        with self._lock, torch.inference_mode():
            scores = self._encoded([f"query: {query}" for query in queries]) @ self._vectors.T
            best = scores.topk(min(topk, len(self._vectors)))
            return [
                list(zip(places, values, strict=True))
                for places, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
            ]

    @torch.inference_mode()
    def _encoded(self, texts: Sequence[str]) -> torch.Tensor:
        return torch.cat([self._batch(texts[at : at + _BATCH]) for at in range(0, len(texts), _BATCH)])

    def _batch(self, texts: Sequence[str]) -> torch.Tensor:
        """Return the mean of the last hidden states over the tokens of each text, as unit vectors."""
        inputs = self._tokenizer(
            list(texts), padding=True, truncation=True, max_length=_MAX_TOKENS, return_tensors="pt"
        ).to(self._device)
        mask = inputs["attention_mask"].unsqueeze(-1)
        hidden = self._model(**inputs).last_hidden_state * mask
        mean = hidden.sum(1, dtype=torch.float32) / mask.sum(1)
        return torch.nn.functional.normalize(mean, dim=-1).to(hidden.dtype)


def _checked_device(name: str) -> torch.device:
    kind, _, number = name.partition(":")
    num_gpus = torch.cuda.device_count()
    known = ["cpu", *(["cuda"] if num_gpus else []), *(f"cuda:{index}" for index in range(num_gpus))]
    if name not in known:
        what = f'device is "{name}", but this machine has {num_gpus} GPUs'
        raise SetupError(what, where="retriever", fix=f"use one of {', '.join(known)}")
    return torch.device(kind, int(number)) if number else torch.device(kind)


def _tokenizer_that_pads(encoder: Path) -> Any:
    tokenizer = load_tokenizer(str(encoder), renders=False)
    if getattr(tokenizer, "pad_token_id", None) is None:
        raise ModelError("its tokenizer has no padding token", where=str(encoder), fix="use an encoder such as E5")
    return tokenizer
