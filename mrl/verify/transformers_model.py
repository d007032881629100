"""What transformers computes of a model's files, one layer in memory at a time, so that 70B need no more than a layer.

Each layer is transformers' own model with one layer, which reads the layer's tensors by transformers' own rules: no
table of mrl's and nothing of Megatron takes part.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrl.errors import ModelError
from mrl.models.hf_reader import HfReader
from mrl.models.table import EMBEDDING, LM_HEAD, NORM, SCORE, Head

_ROWS_AT_ONCE = 8192
"""Of the vocabulary, while logits are made."""
_SPREAD = 0.1
"""Nats: log-probs of a text count as at least so different from each other."""


@dataclass(frozen=True)
class ModelAnswer:
    """What a model says of a text, before each token but the first, in float32."""

    hidden_TH: Tensor
    """After the last norm."""
    scores_T: Tensor | None = None
    """Log-probs of a language model; values of a score head, none where the files hold no such head."""
    score_norm: float = 0.0
    """The length of a score head's weight."""

    def first(self, num: int) -> ModelAnswer:
        """Return the answer to the beginning of the text, which depends on nothing behind it."""
        scores_T = None if self.scores_T is None else self.scores_T[:num]
        return ModelAnswer(self.hidden_TH[:num], scores_T, self.score_norm)

    def limit(self, head: Head, rounding: float, num_layers: int) -> float:
        """Return how far a model may be from this one that rounds each operation so, relatively.

        Every layer rounds anew and at random, so errors grow with the root of the layers; the factor is that of `mrl
        verify layout`, twice what was seen over four families. Log-probs are off by a share of their own spread.
        """
        spread = 1.0
        if head == "lm" and self.scores_T is not None:
            spread = max(float(self.scores_T.std(correction=0)), _SPREAD)
        return 6 * rounding * math.sqrt(num_layers) * spread

    def difference(self, found: ModelAnswer, head: Head, num_ties: int) -> float:
        """Return how far a model's answer is from this, without the tokens that are farthest off.

        That is the root mean square of log-probs; of hidden states, and of scores, relative to their size.
        """
        scores = None
        if self.scores_T is not None and found.scores_T is not None:
            scores = _rms(found.scores_T - self.scores_T, num_ties)
        if scores is not None and head == "lm":
            return scores
        size = float(self.hidden_TH.square().mean().sqrt())
        of_hidden = _rms((found.hidden_TH - self.hidden_TH).square().mean(1).sqrt(), num_ties) / size
        return of_hidden if scores is None else max(of_hidden, scores / (size * self.score_norm))


def _rms(errors_T: Tensor, num_ties: int) -> float:
    """Not a number where any error is none, also among those left out."""
    if not errors_T.isfinite().all():
        return math.nan
    return float(errors_T.double().abs().sort().values[: len(errors_T) - num_ties].square().mean().sqrt())


def answer(
    path: str | Path, head: Head, token_ids: Tensor, before_layer: Callable[[], None] = lambda: None
) -> ModelAnswer:
    """Compute a model of a directory on a CPU; `before_layer` may raise to end it."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, local_files_only=True)
    reader = HfReader(path)
    hidden_1TH = torch.cat([reader.rows(EMBEDDING, token, token + 1) for token in token_ids.tolist()]).float()[None]
    with torch.no_grad(), _quiet():
        for layer in range(config.num_hidden_layers):
            before_layer()
            hidden_1TH = _layer(reader, config, layer)(inputs_embeds=hidden_1TH, use_cache=False).last_hidden_state
        hidden_TH = hidden_1TH[0, :-1]
        if head == "lm":
            return ModelAnswer(hidden_TH, _log_probs(reader, hidden_TH, token_ids[1:]))
        if SCORE not in reader:
            return ModelAnswer(hidden_TH)
        weight_H = reader.whole(SCORE).float()[0]
        return ModelAnswer(hidden_TH, hidden_TH @ weight_H, float(weight_H.norm()))


def _layer(reader: HfReader, config: Any, layer: int) -> Any:
    """Return transformers' model of that layer alone, with the model's last norm behind the last one."""
    from transformers import MODEL_MAPPING

    prefix = f"model.layers.{layer}."
    names = [name for name in reader if name.startswith(prefix) and not name.endswith(".rotary_emb.inv_freq")]
    tensors = {f"layers.0.{name.removeprefix(prefix)}": reader.whole(name) for name in names}
    tensors["norm.weight"] = reader.whole(NORM)
    tensors["embed_tokens.weight"] = torch.zeros(1, config.hidden_size)
    model, report = MODEL_MAPPING[type(config)].from_pretrained(
        None,
        state_dict=tensors,
        config=_of_one_layer(config, layer, any(name.endswith(".mlp.gate_proj.weight") for name in names)),
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
    )
    for wrong in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[wrong]:
            some = ", ".join(sorted(map(str, report[wrong]))[:5])
            what = f"transformers reports {wrong.replace('_', ' ')} in layer {layer}: {some}"
            raise ModelError(what, where=str(reader.path), fix="do config.json and the weights belong together?")
    if layer < config.num_hidden_layers - 1:
        model.norm = torch.nn.Identity()
    return model.eval()


def _of_one_layer(config: Any, layer: int, is_dense: bool) -> Any:
    """Return the configuration of a model of that layer; what a file says layer by layer is said of the only one."""
    one = copy.deepcopy(config)
    one.num_hidden_layers, one.vocab_size, one.pad_token_id = 1, 1, None
    if getattr(one, "layer_types", None):
        one.layer_types = [one.layer_types[layer]]
    if hasattr(one, "mlp_only_layers"):
        one.mlp_only_layers, one.decoder_sparse_step = [0] if is_dense else [], 1
    return one


def _log_probs(reader: HfReader, hidden_TH: Tensor, labels_T: Tensor) -> Tensor:
    name = LM_HEAD if LM_HEAD in reader else EMBEDDING
    vocab = reader.shape(name)[0]
    logits = [
        hidden_TH @ reader.rows(name, begin, min(begin + _ROWS_AT_ONCE, vocab)).float().T
        for begin in range(0, vocab, _ROWS_AT_ONCE)
    ]
    return torch.cat(logits, 1).log_softmax(-1).gather(1, labels_T.long()[:, None])[:, 0]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from drawing a bar for each layer."""
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()
