"""A reward model's part in the scores: whether it reads what the policy writes, and how its scores are added."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mrl.config.schema import Config
from mrl.data.chat import ChatTokenizer, compare_tokenizer
from mrl.errors import ModelError, RewardError
from mrl.models.families import read_spec
from mrl.protocol import DataProto
from mrl.trainer.generation import ScoredBatch
from mrl.trainer.step_metrics import summary_metrics


def check_reward_model(config: Config, tokenizer: ChatTokenizer) -> Iterator[str]:
    """Refuse a reward model that cannot read the policy's token ids; what else there is to be warned of."""
    if config.reward_model is None:
        return
    path = config.reward_model.path
    yield from compare_tokenizer(tokenizer, path)
    known, written = read_spec(path).vocab, read_spec(config.model.path).vocab
    if known < written:
        what = f"has embeddings for {known} tokens, but the policy writes {written}"
        raise ModelError(what, where=path, fix="a reward model that was made from a model of the policy's family")


def add_model_scores(config: Config, samples: ScoredBatch, written: DataProto) -> ScoredBatch:
    """Add the reward model's scores to the samples'; a score that is no number stops the run."""
    assert config.reward_model is not None, "only a reward model that is there scores"
    batch = samples.batch
    model_scores = batch.union(written)["rm_scores"].double()
    for row in np.flatnonzero(~np.isfinite(model_scores.numpy()))[:1].tolist():
        sample = f"sample {batch.row_ids[row]} of prompt {batch['uid'][row]}"
        response = batch["response_text"][row]
        raise RewardError(
            f"the reward model gives {sample} a score of {float(model_scores[row])}; response {response!r:.200}",
            where="reward_model",
            fix="are its weights whole, and is reward_model.dtype the one that it was made for?",
        )
    batch = batch.with_column("scores", batch["scores"] + config.reward_model.weight * model_scores)
    return ScoredBatch(batch, samples.metrics | summary_metrics("reward/model", model_scores.numpy()))
