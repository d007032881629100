"""READ THIS FIRST. One step of PPO and its relatives: prompts in, a better policy out.

The trainer holds row ids, lengths and scalars. Responses, log-probs, values and advantages go from the workers that
make them to the workers that read them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mrl.algos.core_algos import overlong_penalty
from mrl.config.arithmetic import needs_old_log_probs
from mrl.config.schema import Config
from mrl.controller.transport import store
from mrl.protocol import DataProto
from mrl.trainer import step_metrics
from mrl.trainer.audit import check_invariants
from mrl.trainer.components import Components, build_components
from mrl.trainer.dynamic_sampling import full_batch
from mrl.trainer.engine_probe import Answers
from mrl.trainer.generation import ScoredBatch
from mrl.trainer.model_role import ModelRole, mean_of
from mrl.trainer.model_scores import add_model_scores
from mrl.trainer.run import Run
from mrl.trainer.start_progress import show_start_progress
from mrl.workers.messages import WholeBatch

TRAIN_COLUMNS = ("prompts", "responses", "rollout_log_probs", "scores")
OPTIONAL_TRAIN_COLUMNS = ("baseline_scores", "response_mask")


@dataclass(frozen=True)
class StepReport:
    """What one step did: its samples, as the driver knows them, and its figures."""

    step: int
    batch: DataProto
    metrics: dict[str, float]


class RayPPOTrainer:
    """Trains a policy by PPO, GRPO, RLOO, REINFORCE++, ReMax, DAPO, and what else their pieces make."""

    config: Config

    def __init__(self, run: Run) -> None:
        self.config, self.clock, self.run = run.config, run.clock, run
        self.num_steps_done = 0

    @contextmanager
    def init_workers(self) -> Iterator[Components]:
        """Start all roles for the length of the block, and go on from the run's checkpoint where there is one."""
        with ExitStack() as stack:
            with show_start_progress(self.run):
                team = build_components(self.config, self.run.directory, self.run.events, self.clock)
                self.team = stack.enter_context(team)
            self.actor, self.critic, self.hybrid = self.team.actor, self.team.critic, self.team.hybrid
            self.reward_model = self.team.reward_model
            if reason := self.hybrid.full_tensor_reason:
                self.run.warn("rollout", f"weights travel as whole tensors: {reason}")
            self.num_steps_done = self.run.resume(self.team)
            yield self.team

    def fit(self) -> dict[str, float]:
        """All steps that are left; the figures of the last validation."""
        run, validation = self.run, self.config.validation
        self.clock.pop_seconds()  # what came before belongs to no step
        validated: dict[str, float] = {}
        if validation.every and validation.first and not self.num_steps_done:
            validated = self.validate()
            run.record_validation(0, validated)
        while self.num_steps_done < self.config.training.steps:
            report = self.step()
            is_last = report.step == self.config.training.steps
            is_due = bool(validation.every) and (is_last or report.step % validation.every == 0)
            figures = self.validate() if is_due else {}  # of this step alone: no other has them, and no checkpoint
            validated = figures or validated
            stop = run.should_stop()
            run.record(report.step, report.batch, report.metrics | figures)
            if is_last or stop or run.save_is_due(report.step):
                run.save(self.team, report.step, figures)
            if stop:
                break
        return validated

    def step(self) -> StepReport:
        """One step. Every line is a phase, and every phase is timed."""
        step = self.clock.step = self.num_steps_done + 1
        algorithm = self.config.algorithm
        with self.clock("rollout"), self.hybrid.rollout_mode():  # Megatron's layout -> vLLM's, and back to sleep
            samples = self.collect(step)  # responses, rollout_log_probs, scores
            answers = self.team.engine_probe.ask(step)
        self.compare_engines(step, answers)
        if self.reward_model is not None:
            with self.clock("reward_model"):
                written = self.reward_model.run("compute_rm_score", samples.batch)
                samples = add_model_scores(self.config, samples, written)
        batch, metrics = store(samples.batch.select(*self._train_columns(samples.batch))), dict(samples.metrics)
        if needs_old_log_probs(self.config):
            with self.clock("old_log_prob"):
                batch = batch.union(_pop_metrics(self.actor.run("compute_log_prob", batch), "mismatch", metrics))
        if algorithm.kl.where != "none":
            with self.clock("ref_log_prob"):
                batch = batch.union(self.actor.run("compute_ref_log_prob", batch))
        if self.critic is not None:
            with self.clock("values"):
                batch = batch.union(self.critic.run("compute_values", batch))
        with self.clock("advantage"):
            uids = list(samples.batch.non_tensor_batch["uid"])
            batch = batch.union(_pop_metrics(self.estimate_advantages(batch, uids), "reward", metrics))
        updates: dict[str, list[dict[str, float]]] = {}
        if self.critic is not None:
            with self.clock("update_critic"):
                updates["critic"] = self.update(self.critic, "update_critic", batch)
        if step > self.config.training.critic_warmup_steps:
            with self.clock("update_actor"):
                updates["actor"] = self.update(self.actor, "update_actor", batch)
            self.hybrid.weights_changed()
        for role, of_role in updates.items():
            metrics |= mean_of(of_role, role)
        check_invariants(self.config, step, metrics, updates.get("actor", []), _num_written(samples.batch))
        self.team.kl.update(metrics["reward/kl"], len(batch))
        self.num_steps_done = step
        metrics |= step_metrics.batch_metrics(samples.batch, self.config.rollout.max_response_tokens)
        seconds = self.clock.pop_seconds()
        metrics |= step_metrics.timing_metrics(seconds, samples.batch, self.config.cluster)
        num_trained = int(metrics["perf/total_num_tokens"]) * self.config.batch.epochs_per_step
        for name, trained in self.team.roles.items():
            metrics |= step_metrics.training_metrics(trained, name, seconds.get(f"update_{name}", 0.0), num_trained)
        return StepReport(step, samples.batch, metrics | self.hybrid.metrics())

    def validate(self) -> dict[str, float]:
        """The policy as it is now on the validation prompts."""
        with self.clock("validation"), self.hybrid.rollout_mode():
            figures = self.team.validator.run()
            answers = self.team.engine_probe.ask(self.num_steps_done)
        self.compare_engines(self.num_steps_done, answers)
        return figures

    def compare_engines(self, step: int, answers: Answers) -> None:
        """See that the engines that were asked compute what the trainer computes, before anything is learnt."""
        if answers:
            with self.clock("probe"):
                self.team.engine_probe.compare(step, answers)

    def collect(self, step: int) -> ScoredBatch:
        """The step's samples with their scores."""
        scored = full_batch(self.config, self.team.prompts, lambda prompts: self.generate(prompts, step))
        overlong = self.config.algorithm.overlong
        if overlong is None:
            return scored
        lengths_B = torch.from_numpy(scored.batch.lengths("responses").astype(np.int64))
        longest = self.config.rollout.max_response_tokens
        penalty_B = overlong_penalty(lengths_B, longest, overlong.buffer_tokens, overlong.factor)
        batch = scored.batch
        scores_B = batch.pop("scores").batch["scores"] + penalty_B
        batch = batch.union(DataProto.from_dict({"scores": scores_B}, row_ids=batch.row_ids))
        return ScoredBatch(batch, scored.metrics | {"reward/overlong_penalty": float(penalty_B.mean())})

    def generate(self, prompts: DataProto, step: int) -> ScoredBatch:
        """Samples of these prompts; for ReMax also the greedy answer, whose score is the baseline."""
        generator = self.team.generator
        scored = generator.run(prompts.repeat(self.config.batch.samples_per_prompt), generator.training, step)
        if self.config.algorithm.advantage != "remax":
            return scored
        greedy = generator.run(prompts, generator.greedy, step).batch
        baseline = dict(zip(greedy.non_tensor_batch["uid"], greedy.batch["scores"].tolist(), strict=True))
        uids = scored.batch.non_tensor_batch["uid"]
        kept = scored.batch.take([row for row, uid in enumerate(uids) if uid in baseline])
        scores = torch.tensor([baseline[uid] for uid in kept.non_tensor_batch["uid"]], dtype=torch.float64)
        column = DataProto.from_dict({"baseline_scores": scores}, row_ids=kept.row_ids)
        return ScoredBatch(kept.union(column), scored.metrics | {"reward/greedy/mean": float(scores.mean())})

    def estimate_advantages(self, batch: DataProto, uids: list[str]) -> DataProto:
        """Advantages, on the critic's ranks where there is one: its values are there."""
        position = DataProto.from_dict({"position": torch.arange(len(batch))}, row_ids=batch.row_ids)
        role = self.critic or self.actor
        return role.evenly("compute_advantages", batch.union(position), WholeBatch(uids, self.team.kl.coef))

    def update(self, role: ModelRole, method: str, batch: DataProto) -> list[dict[str, float]]:
        """All optimizer steps of a role; what each says."""
        parts = self.updates(batch)
        figures: list[dict[str, float]] = []
        for rows in parts:
            self.clock.progress(len(figures), len(parts))
            figures.append(role.update(method, rows))
        return figures

    def updates(self, batch: DataProto) -> list[DataProto]:
        """The rows of each optimizer step, drawn anew in each epoch over the batch."""
        num_updates = max(1, round(len(batch) / self.config.batch.samples_per_update))
        parts = []
        for epoch in range(self.config.batch.epochs_per_step):
            chance = np.random.default_rng([self.config.training.seed, self.num_steps_done, epoch])
            order = chance.permutation(len(batch)) if num_updates > 1 else np.arange(len(batch))
            parts += [batch.take(rows) for rows in np.array_split(order, num_updates)]
        return parts

    @staticmethod
    def _train_columns(batch: DataProto) -> list[str]:
        return [*TRAIN_COLUMNS, *(name for name in OPTIONAL_TRAIN_COLUMNS if name in batch.columns())]


def _num_written(batch: DataProto) -> int:
    """The response tokens that the model wrote itself: all, where no mask says otherwise."""
    if "response_mask" in batch.columns():
        return int(batch.values("response_mask").sum())
    return int(batch.lengths("responses").sum())


def _pop_metrics(written: DataProto, prefix: str, metrics: dict[str, Any]) -> DataProto:
    """The columns that workers wrote; what they said beside them goes into the metrics."""
    metrics |= {f"{prefix}/{name}": value for name, value in written.meta_info.items()}
    written.meta_info = {}
    return written
