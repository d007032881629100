"""A step's samples: one round of generation, or with DAPO as many as fill the batch with prompts that teach."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mrl.algos.groups import Outcomes, filter_groups
from mrl.config.schema import Config
from mrl.data.prompt_loader import PromptLoader
from mrl.errors import RewardError
from mrl.protocol import DataProto
from mrl.trainer.generation import ScoredBatch
from mrl.trainer.step_metrics import written_lengths


def full_batch(config: Config, prompts: PromptLoader, generate: Callable[[DataProto], ScoredBatch]) -> ScoredBatch:
    """Return the scored samples of `batch.prompts_per_step` prompts. DAPO discards rounds, counted and bounded."""
    settings, wanted = config.algorithm.dynamic_sampling, config.batch.prompts_per_step
    if settings is None:
        return generate(prompts.next_batch())
    rounds: list[ScoredBatch] = []
    kept: list[DataProto] = []
    num_kept = num_uniform = 0
    while num_kept < wanted:
        if len(rounds) == settings.most_rounds:
            raise RewardError(
                f"{num_kept} of {wanted} prompts have samples that score differently, after {len(rounds)} rounds of "
                f"{wanted} prompts each; all samples of {num_uniform} prompts score the same",
                where="algorithm.dynamic_sampling",
                fix="the task is too easy or too hard for this model; or raise algorithm.dynamic_sampling.most_rounds",
            )
        scored = generate(prompts.next_batch())
        rounds.append(scored)
        found = filter_groups(_outcomes(scored.batch))
        number = min(wanted - num_kept, len(found.kept_uids))
        kept.append(scored.batch.take(found.take(number).numpy()))
        num_kept += number
        num_uniform += found.num_uniform
    metrics = {name: float(np.mean([each.metrics.get(name, np.nan) for each in rounds])) for name in rounds[-1].metrics}
    metrics |= {"sampling/rounds": len(rounds), "sampling/uniform_prompts": num_uniform}
    return ScoredBatch(DataProto.concat([batch for batch in kept if len(batch)]), metrics)


def solved_shares(config: Config, batch: DataProto) -> dict[str, float]:
    """Return the share of each prompt's samples that were solved, by its uid.

    Prompts that a reward model alone scores are not there: its scores have no mark from which they are right.
    """
    sources = [config.reward.scores(name) or config.agent.scores(name) for name in batch["data_source"]]
    batch = batch.take(np.flatnonzero(sources))
    uids, group = np.unique(batch["uid"].astype(str), return_inverse=True)
    solved = np.bincount(group, weights=np.asarray(batch["scores"]) >= config.validation.solved_at)
    return dict(zip(uids.tolist(), (solved / np.bincount(group)).tolist(), strict=True))


def _outcomes(batch: DataProto) -> Outcomes:
    scores = batch["scores"]
    return Outcomes(scores, list(batch["uid"]), scores.new_tensor(written_lengths(batch).tolist()))
