"""The samples of a step: prompts drawn, responses generated and scored, and what is changed of their scores."""

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
    """Collects a batch whole, or draws its prompts and finishes its samples where others generate in between."""

    def __init__(self, config: Config, prompts: PromptLoader, generator: Generator, models: ModelScores) -> None:
        self._config = config
        self._prompts, self.generator, self._models = prompts, generator, models

    def collect(self, step: int) -> ScoredBatch:
        scored = full_batch(self._config, self._prompts, lambda prompts: self.generate(prompts, step))
        return self._penalized(scored)

    def draw(self) -> DataProto:
        """Return the prompts of the next batch, a row for each sample."""
        return self._prompts.next_batch().repeat(self._config.batch.samples_per_prompt)

    def learn(self, batch: DataProto) -> None:
        self._prompts.learn(solved_shares(self._config, batch))

    def finish(self, scored: ScoredBatch) -> ScoredBatch:
        return self._penalized(self._models.add(scored, learn=True))

    def _penalized(self, scored: ScoredBatch) -> ScoredBatch:
        """Return the samples with what their lengths cost them."""
        overlong = self._config.algorithm.overlong
        if overlong is None:
            return scored
        lengths_B = torch.from_numpy(written_lengths(scored.batch))
        longest = self._config.rollout.max_response_tokens
        penalty_B = overlong_penalty(lengths_B, longest, overlong.buffer_tokens, overlong.factor)
        batch = scored.batch.with_column("scores", scored.batch["scores"] + penalty_B)
        return ScoredBatch(batch, scored.metrics | {"reward/overlong_penalty": float(penalty_B.mean())})

    def generate(self, prompts: DataProto, step: int) -> ScoredBatch:
        """Generate samples of these prompts; for ReMax also the greedy answer, whose score is the baseline.

        Reward models score when both are there: on the engines' devices, these sleep until they are asked again.
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
        kept = scored.batch.take([row for row, uid in enumerate(uids) if uid in baseline])
        scores = torch.tensor([baseline[uid] for uid in kept["uid"]], dtype=torch.float64)
        kept = kept.with_column("baseline_scores", scores)
        return ScoredBatch(kept, scored.metrics | {"reward/greedy/mean": float(scores.mean())})


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
        scores, lengths = scored.batch["scores"], torch.from_numpy(written_lengths(scored.batch))
        found = filter_groups(Outcomes(scores, list(scored.batch["uid"]), lengths))
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
