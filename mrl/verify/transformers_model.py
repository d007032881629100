"""Computation of a model's files with transformers, with one layer in memory at a time, even for models of 70B.

Each layer is transformers' own model with one layer, which loads the layer's tensors by transformers' own rules,
independent of mrl's tables and of Megatron.
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
from mrl.models.fp8_blocks import SCALES
from mrl.models.hf_reader import HfReader
from mrl.models.mla import set_latent_epsilon
from mrl.models.table import EMBEDDING, LM_HEAD, NORM, SCORE, Head

_ROWS_AT_ONCE = 8192
"""Number of vocabulary rows processed at a time for logits."""
_SPREAD = 0.1
"""Lower limit of the spread of a text's log-probs, in nats."""


@dataclass(frozen=True)
class ModelAnswer:
    """A model's output before each token of a text but the first, in float32."""

    hidden_TH: Tensor
    """Hidden states after the last norm."""
    scores_T: Tensor | None = None
    """Log-probs of a language model, or values of a score head; None if the files have no such head."""
    score_norm: float = 0.0
    """Norm of a score head's weight."""

    def first(self, num: int) -> ModelAnswer:
        """Return the answer for the beginning of the text, which does not depend on the rest."""
        scores_T = None if self.scores_T is None else self.scores_T[:num]
        return ModelAnswer(self.hidden_TH[:num], scores_T, self.score_norm)

    def limit(self, head: Head, rounding: float, num_layers: int) -> float:
        """Return the largest expected distance of a model that rounds each operation with this relative error.

        The rounding errors of layers are random, so they grow with the square root of the number of layers. The factor
        is that of `mrl verify layout`, twice the largest value seen over four families. Errors of log-probs are
        relative to their spread.
        """
        spread = 1.0
        if head == "lm" and self.scores_T is not None:
            spread = max(float(self.scores_T.std(correction=0)), _SPREAD)
        return 6 * rounding * math.sqrt(num_layers) * spread

    def difference(self, other: ModelAnswer, head: Head, num_ties: int) -> float:
        """Return the distance of a model's answer from this one, without the `num_ties` tokens with the largest
        distance.

        It is the root mean square of log-probs; for hidden states and scores it is relative to their size.
        """
        scores = None
        if self.scores_T is not None and other.scores_T is not None:
            scores = _rms(other.scores_T - self.scores_T, num_ties)
        if scores is not None and head == "lm":
            return scores
        size = float(self.hidden_TH.square().mean().sqrt())
        hidden_difference = _rms((other.hidden_TH - self.hidden_TH).square().mean(1).sqrt(), num_ties) / size
        return hidden_difference if scores is None else max(hidden_difference, scores / (size * self.score_norm))


def _rms(errors_T: Tensor, num_ties: int) -> float:
    """Return the root mean square, or NaN if any error is not finite, including errors that are left out."""
    if not errors_T.isfinite().all():
        return math.nan
    return float(errors_T.double().abs().sort().values[: len(errors_T) - num_ties].square().mean().sqrt())


def answer(
    path: str | Path, head: Head, token_ids: Tensor, before_layer: Callable[[], None] = lambda: None
) -> ModelAnswer:
    """Compute a model directory on a CPU. `before_layer` may raise an error to stop."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, local_files_only=True).get_text_config()
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
    """Return transformers' model of this layer alone; after the last layer also with the model's final norm."""
    from transformers import MODEL_MAPPING

    prefix = f"model.layers.{layer}."
    others = (".rotary_emb.inv_freq", SCALES)
    names = [name for name in reader if name.startswith(prefix) and not name.endswith(others)]
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
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[key]:
            listed = ", ".join(sorted(map(str, report[key]))[:5])
            problem = f"transformers reports {key.replace('_', ' ')} in layer {layer}: {listed}"
            raise ModelError(problem, where=str(reader.path), fix="check that config.json belongs to these weights")
    set_latent_epsilon(model)
    if layer < config.num_hidden_layers - 1:
        model.norm = torch.nn.Identity()
    return model.eval()


def _of_one_layer(config: Any, layer: int, is_dense: bool) -> Any:
    """Return the configuration of a one-layer model of this layer, with its per-layer settings."""
    one = copy.deepcopy(config)
    one.num_hidden_layers, one.vocab_size, one.pad_token_id = 1, 1, None
    if hasattr(one, "quantization_config"):
        del one.quantization_config  # the reader returns the weights in float32
    if getattr(one, "layer_types", None):
        one.layer_types = [one.layer_types[layer]]
    if hasattr(one, "mlp_only_layers"):
        one.mlp_only_layers, one.decoder_sparse_step = [0] if is_dense else [], 1
    if hasattr(one, "first_k_dense_replace"):
        one.first_k_dense_replace = int(is_dense)
    if hasattr(one, "mlp_layer_types"):
        one.mlp_layer_types = ["dense" if is_dense else "sparse"]
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
    """Hide transformers' progress bar for each layer."""
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()
