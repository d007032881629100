"""Samples of a step: draw prompts, generate and score responses, and adjust the scores."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from mrl.algos.advantages import overlong_penalty
from mrl.algos.groups import Outcomes, filter_groups
from mrl.config.schema import Config
from mrl.data.prompt_loader import PromptLoader
from mrl.errors import RewardError
from mrl.protocol import DataProto
from mrl.trainer.generation import Generator, ScoredBatch
from mrl.trainer.model_scores import ModelScores
from mrl.trainer.step_metrics import written_lengths


class Collector:
    """Collects whole batches, or draws prompts and finishes samples if generation happens elsewhere in between."""

    def __init__(self, config: Config, prompts: PromptLoader, generator: Generator, models: ModelScores) -> None:
        self._config = config
        self._prompts, self.generator, self._models = prompts, generator, models

    def collect(self, step: int) -> ScoredBatch:
        scored = full_batch(self._config, self._prompts, lambda prompts: self.generate(prompts, step))
        return self._penalized(scored)

    def draw(self) -> DataProto:
        """Return the prompts of the next batch, one row for each sample."""
        return self._prompts.next_batch().repeat(self._config.batch.samples_per_prompt)

    def learn(self, batch: DataProto) -> None:
        self._prompts.learn(solved_shares(self._config, batch))

    def finish(self, scored: ScoredBatch) -> ScoredBatch:
        return self._penalized(self._models.add(scored, learn=True))

    def _penalized(self, scored: ScoredBatch) -> ScoredBatch:
        """Return the samples with the length penalty subtracted."""
        overlong = self._config.algorithm.overlong
        if overlong is None:
            return scored
        lengths_B = torch.from_numpy(written_lengths(scored.batch))
        longest = self._config.rollout.max_response_tokens
        penalty_B = overlong_penalty(lengths_B, longest, overlong.buffer_tokens, overlong.factor)
        batch = scored.batch.with_column("scores", scored.batch["scores"] + penalty_B)
        return ScoredBatch(batch, scored.metrics | {"reward/overlong_penalty": float(penalty_B.mean())})

    def generate(self, prompts: DataProto, step: int) -> ScoredBatch:
        """Generate samples for these prompts; for ReMax also the greedy answers, whose scores are the baseline.

        Reward models score after both. On the engines' devices this puts the engines to sleep until the next request.
        """
        generator, models = self.generator, self._models
        scored = generator.run(prompts.repeat(self._config.batch.samples_per_prompt), generator.training, step)
        self.learn(scored.batch)
        if self._config.algorithm.advantage != "remax":
            return models.add(scored, learn=True)
        unscored = generator.run(prompts, generator.greedy, step)
        scored, greedy = models.add(scored, learn=True), models.add(unscored).batch
        baseline = dict(zip(greedy["uid"], greedy["scores"].tolist(), strict=True))
        uids = scored.batch["uid"]
        with_baseline = scored.batch.take([row for row, uid in enumerate(uids) if uid in baseline])
        scores = torch.tensor([baseline[uid] for uid in with_baseline["uid"]], dtype=torch.float64)
        with_baseline = with_baseline.with_column("baseline_scores", scores)
        return ScoredBatch(with_baseline, scored.metrics | {"reward/greedy/mean": float(scores.mean())})


def full_batch(config: Config, prompts: PromptLoader, generate: Callable[[DataProto], ScoredBatch]) -> ScoredBatch:
    """Return scored samples of `batch.prompts_per_step` prompts. DAPO discards groups, up to a limit of rounds."""
    settings, needed = config.algorithm.dynamic_sampling, config.batch.prompts_per_step
    if settings is None:
        return generate(prompts.next_batch())
    rounds: list[ScoredBatch] = []
    kept: list[DataProto] = []
    num_kept = num_uniform = 0
    while num_kept < needed:
        if len(rounds) == settings.most_rounds:
            raise RewardError(
                f"only {num_kept} of {needed} prompts have samples with different scores after {len(rounds)} rounds of "
                f"{needed} prompts each; {num_uniform} prompts have equal scores in all samples",
                where="algorithm.dynamic_sampling",
                fix="choose harder or easier tasks for this model, or raise algorithm.dynamic_sampling.most_rounds",
            )
        scored = generate(prompts.next_batch())
        rounds.append(scored)
        scores, lengths = scored.batch["scores"], torch.from_numpy(written_lengths(scored.batch))
        groups = filter_groups(Outcomes(scores, list(scored.batch["uid"]), lengths))
        number = min(needed - num_kept, len(groups.kept_uids))
        kept.append(scored.batch.take(groups.take(number).numpy()))
        num_kept += number
        num_uniform += groups.num_uniform
    metrics = {name: float(np.mean([part.metrics.get(name, np.nan) for part in rounds])) for name in rounds[-1].metrics}
    metrics |= {"sampling/rounds": len(rounds), "sampling/uniform_prompts": num_uniform}
    return ScoredBatch(DataProto.concat([batch for batch in kept if len(batch)]), metrics)


def solved_shares(config: Config, batch: DataProto) -> dict[str, float]:
    """Return the share of each prompt's samples that were solved, by uid.

    Prompts scored only by a reward model are left out: its scores have no threshold for a correct answer.
    """
    sources = [config.reward.scores(name) or config.agent.scores(name) for name in batch["data_source"]]
    batch = batch.take(np.flatnonzero(sources))
    uids, group = np.unique(batch["uid"].astype(str), return_inverse=True)
    solved = np.bincount(group, weights=np.asarray(batch["scores"]) >= config.validation.solved_at)
    return dict(zip(uids.tolist(), (solved / np.bincount(group)).tolist(), strict=True))
