"""START HERE. One step of PPO and related algorithms: from prompts to an updated policy.

The trainer keeps row ids, lengths and scalars. Responses, log-probs, values and advantages travel directly from the
workers that compute them to the workers that read them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from mrl.config import step_calls
from mrl.config.arithmetic import compares_teacher, has_own_rollout_pool
from mrl.config.schema import Config
from mrl.config.step_calls import OPTIONAL_SAMPLE_COLUMNS, SAMPLE_COLUMNS
from mrl.controller.transport import fetch, store
from mrl.data.row_files import write_samples
from mrl.observe.confidence import with_intervals
from mrl.observe.figures import shown_figure
from mrl.protocol import DataProto
from mrl.registry import load_attribute
from mrl.trainer import step_metrics
from mrl.trainer.audit import ReplayedRun, check_invariants, staleness_metrics, with_staleness
from mrl.trainer.checkpoint_score import CheckpointScore
from mrl.trainer.checkpoints import read_checkpoint
from mrl.trainer.components import Components, build_components
from mrl.trainer.engine_probe import Answers
from mrl.trainer.profiler import Profiler
from mrl.trainer.recorded_samples import build_without_engines
from mrl.trainer.recorder import StepRecorder
from mrl.trainer.role_client import Metrics, mean_of
from mrl.trainer.run import Run, load_checkpoint
from mrl.trainer.sample_stream import drawn_from_bytes, drawn_to_bytes
from mrl.trainer.segments import rows_of_step, whole_batch
from mrl.trainer.start_progress import show_start_progress
from mrl.trainer.step_metrics import preview, sample_columns, tensor_columns
from mrl.trainer.validation import validated_kl

_FETCH_S = 600.0


@dataclass(frozen=True)
class StepReport:
    """Result of one step: its samples, as the driver sees them, and its metrics."""

    step: int
    batch: DataProto
    metrics: dict[str, float]


class RayPPOTrainer:
    """Trains a policy by PPO, GRPO, RLOO, REINFORCE++, ReMax, DAPO and other combinations of their parts."""

    config: Config

    def __init__(self, run: Run[Config]) -> None:
        self.config, self.clock, self.run = run.config, run.clock, run
        self.calls = step_calls.step_calls(run.config)
        self.num_steps_done = 0
        self.own_metrics = {name: load_attribute(name) for name in self.config.training.metrics}
        self.recorder = StepRecorder(run)
        replay = self.config.asynchrony.replay
        self.replayed = ReplayedRun(Path(replay)) if replay else None
        run.best_by = f"the {run.config.validation.best_mode} of {run.config.validation.best}"

    @contextmanager
    def init_workers(self) -> Iterator[Components]:
        """Start all roles for the length of the block. Resume from the run's checkpoint if one exists."""
        with ExitStack() as stack:
            with show_start_progress(self.run):
                build = build_components if self.config.training.samples_from is None else build_without_engines
                team = build(self.config, self.run.directory, self.run.events, self.clock)
                self.components = stack.enter_context(team)
            self.actor, self.critic, self.hybrid = self.components.actor, self.components.critic, self.components.hybrid
            if reason := self.hybrid.fleet.full_tensor_reason:
                self.run.warn("rollout", f"weights travel as whole tensors: {reason}")
            if modules := ", ".join(sorted(self.hybrid.unaligned)):
                self.run.warn("rollout", f"not sent in FP8, because slices are not whole blocks of 128: {modules}")
            self.profiler = Profiler(self.run, self.components.traced, list(self.components.roles.values()))
            self.num_steps_done = self.run.resume(self.components)
            drawn, version = drawn_from_bytes(self.run.drawn_ahead)
            self.hybrid.version = version or self.hybrid.version
            self.components.stream.go_on(self.num_steps_done, drawn)
            stack.callback(self.run.finish_save)  # also after a failed step: the workers still run
            yield self.components

    def begin_after(self, checkpoints: Path, step: int) -> None:
        """Continue after a step of another run, from its checkpoint."""
        load_checkpoint(read_checkpoint(checkpoints, step), self.components)
        self.num_steps_done = step

    def fit(self) -> dict[str, float]:
        """Do all remaining steps. Return the metrics of the last validation."""
        run, validation = self.run, self.config.validation
        self.clock.pop_seconds()  # seconds before the first step belong to no step
        validated: dict[str, float] = {}
        if validation.every and validation.first and not self.num_steps_done:
            validated = self.validate()
            run.record(0, validated)
            self.compare_runs(0, validated)
            self.score_of(0, validated)
        while self.num_steps_done < self.config.training.steps and not run.stopped_by:
            with self.profiler.step(self.num_steps_done + 1):
                validated = self.full_step() or validated
        self.profiler.finish()
        return validated

    def full_step(self) -> dict[str, float]:
        """Do one step with its validation, record and checkpoint, if these are due. Return the metrics of the
        validation."""
        run, validation, report = self.run, self.config.validation, self.step()
        is_last = report.step == self.config.training.steps
        is_due = bool(validation.every) and (is_last or report.step % validation.every == 0)
        figures = self.validate() if is_due else {}  # only for this step's metrics and checkpoint
        run.publish_save()
        stop = run.should_stop()
        self.record(report.step, report.batch, report.metrics | figures)
        score = self.score_of(report.step, figures)
        is_kept = validation.keep_best and run.is_best(score)
        if is_last or stop or is_kept or run.save_is_due(report.step):
            drawn = drawn_to_bytes(self.components.stream.drawn_ahead(), self.hybrid.version)
            run.save(self.components, report.step, score, wait=is_last or stop, drawn_ahead=drawn)
        return figures

    def step(self) -> StepReport:
        """Do one step. Each line is a phase, and each phase is timed."""
        step = self.clock.step = self.num_steps_done + 1
        samples, answers = self.components.stream.next(step)  # responses, rollout_log_probs, scores
        self.compare_engines(step, answers)
        rows, figures = rows_of_step(samples.batch, self.config.algorithm, self.components.role_baselines)
        batch = with_staleness(rows, self.hybrid.version)
        metrics = samples.metrics | figures | staleness_metrics(batch, self.config.asynchrony.ahead)
        optional = [name for name in OPTIONAL_SAMPLE_COLUMNS if name in batch.columns()]
        batch = store(batch.select(*SAMPLE_COLUMNS, *optional))
        for call in self.calls:
            if call in step_calls.OLD_LOG_PROBS:
                with self.clock("old_log_prob"):
                    old_log_probs, mismatch = getattr(self.actor, call.method)(batch)
                    batch, metrics = batch.union(old_log_probs), metrics | mismatch
        if {step_calls.REF_LOG_PROB, step_calls.REFERENCE_LOG_PROB} & {*self.calls}:
            with self.clock("ref_log_prob"):
                batch = batch.union((self.components.reference or self.actor).compute_ref_log_prob(batch))
        for call in self.calls:
            if call.role == "teacher" and (teachers := self.components.teachers) is not None:
                with self.clock("teacher"):
                    columns, figures = teachers.columns(call, batch, rows)
                    batch, metrics = batch.union(columns), metrics | figures
        if self.critic is not None:
            with self.clock("values"):
                batch = batch.union(self.critic.compute_values(batch))
        with self.clock("advantage"):
            whole = whole_batch(rows, self.components.kl.coef, self.config.reward)
            role = self.critic or self.actor  # the critic's values are on its ranks
            positions = torch.arange(len(batch))
            advantages, figures = role.compute_advantages(batch.with_column("position", positions), whole)
            batch, metrics = batch.union(advantages), metrics | figures
        if step in self.config.training.dump_steps:
            with self.run.may_be_lost("tensors"):
                write_samples(self.run.directory / "tensors", step, tensor_columns(fetch(batch, _FETCH_S)))
        known = {"weights_version": self.hybrid.version, "kl_coef": self.components.kl.coef}
        self.recorder.begin(step, self.components.roles, known | {"sampled": samples.metrics})
        updates: dict[str, list[Metrics]] = {}
        if self.critic is not None:
            with self.clock("update_critic"):
                updates["critic"] = self.train("critic", batch, len(samples.batch))
        if step > self.config.training.critic_warmup_steps:
            with self.clock("update_actor"):
                updates["actor"] = self.train("actor", batch, len(samples.batch))
            self.hybrid.weights_changed()
        self.components.turns.end()
        for name, reports in updates.items():
            metrics |= mean_of(reports, name)
        metrics |= step_metrics.distillation_metrics(metrics)
        num_written = int(step_metrics.written_lengths(rows).sum())
        check_invariants(self.config, step, metrics, updates.get("actor", []), num_written)
        if self.config.algorithm.kl.where in ("reward", "both"):
            metrics["reward/kl_coef"] = self.components.kl.coef  # the coefficient used in this step's rewards
        metrics |= self.components.engine_probe.compare_step(step, metrics, updates.get("actor", []))
        self.components.kl.update(metrics["reward/kl"], len(batch))
        self.num_steps_done = step
        metrics |= self._measured(samples.batch, rows) | self.hybrid.metrics()
        self.recorder.end(samples.batch, batch, metrics)
        return StepReport(step, samples.batch, metrics)

    def _measured(self, batch: DataProto, trained: DataProto) -> Metrics:
        longest, solved_at = self.config.rollout.max_response_tokens, self.config.validation.solved_at
        metrics = step_metrics.batch_metrics(batch, longest, solved_at)
        metrics |= step_metrics.own_metrics(self.own_metrics, batch, self._warn_of_metrics)
        seconds = self.clock.pop_seconds()
        metrics |= step_metrics.timing_metrics(seconds, trained, self.config.cluster)
        if has_own_rollout_pool(self.config):
            metrics |= step_metrics.overlap_metrics(seconds, self.hybrid.fleet.generating_s)
            self.hybrid.fleet.generating_s = 0.0
        num_trained = int(metrics["perf/total_num_tokens"]) * self.config.batch.epochs_per_step
        for name, role in self.components.roles.items():
            metrics |= step_metrics.training_metrics(role, name, seconds.get(f"update_{name}", 0.0), num_trained)
        return metrics

    def _warn_of_metrics(self, name: str, reason: str) -> None:
        message = f"the function {name} failed, so its metrics are missing: {reason:.500}"
        self.run.warn_once("training.metrics", message, of=name)

    def record(self, step: int, batch: DataProto, metrics: Metrics) -> None:
        self.run.record(step, metrics)
        self.compare_runs(step, metrics)
        self.run.console.step(step, metrics, preview(batch))
        every = self.config.training.samples_every
        if every and step % every == 0:
            with self.run.may_be_lost("samples"):
                write_samples(self.run.directory / "samples", step, sample_columns(batch))

    def validate(self) -> dict[str, float]:
        """Evaluate the current policy on the validation prompts."""
        with self.clock("validation"), self.components.stream.settled():
            figures = self.components.validator.run(self.num_steps_done, self.components.model_scores)
            answers = self.components.engine_probe.ask(self.num_steps_done)
        teachers = self.components.teachers
        if teachers is not None and compares_teacher(self.config.algorithm):
            with self.clock("validation"):
                samples = self.components.validator.samples
                values, untaught = validated_kl(self.actor, teachers, samples, _FETCH_S)
                kl = {"teacher_kl": values} if values else {}
                self.components.validator.by_prompt.update({f"val/{name}": of_kl for name, of_kl in kl.items()})
                figures |= with_intervals("val", kl) | untaught
            self.components.turns.end()
        while self.components.validator.warnings:
            self.run.warn("validation", self.components.validator.warnings.pop(0))
        self.compare_engines(self.num_steps_done, answers)
        return figures

    def score_of(self, step: int, figures: dict[str, float]) -> CheckpointScore | None:
        """Print the figure that ranks this step's checkpoint. Return its score; None without a validation."""
        validation, name = self.config.validation, self.config.validation.best
        if figures and name not in figures:
            self.run.warn("validation", f"the figure {name} is missing: this checkpoint cannot become the best")
        if name not in figures:
            return None
        self.run.console.note(f"validation after step {step}: {name} {shown_figure(figures, name)}")
        sign = 1 if validation.best_mode == "max" else -1
        by_prompt = self.components.validator.by_prompt[name] if validation.best_beyond_noise else {}
        signed = {prompt: sign * value for prompt, value in by_prompt.items()}
        score = CheckpointScore(sign * figures[name], step, signed)
        if noise := score.noise(self.run.best):
            self.run.console.note(f"{name} is {noise}")
        return score

    def compare_engines(self, step: int, answers: Answers) -> None:
        """Compare the engines' answers with the trainer's log-probs, before anything is learned from samples."""
        if answers:
            with self.clock("probe"):
                self.components.engine_probe.compare(step, answers)

    def compare_runs(self, step: int, metrics: Metrics) -> None:
        if self.replayed is not None:
            self.replayed.compare(step, metrics)
            if step == self.replayed.num_steps:
                self.run.console.print(
                    f"identical to {self.replayed.directory}, bit for bit, up to its last step, {step}"
                )

    def train(self, name: str, batch: DataProto, num_samples: int) -> list[Metrics]:
        """Run all optimizer steps of a role. Return the metrics of each."""
        parts, role = self.updates(batch, num_samples), self.components.roles[name]
        update, reports = getattr(role, f"update_{name}"), list[Metrics]()
        for rows in parts:
            self.clock.progress(len(reports), len(parts))
            reports.append(update(rows))
            self.recorder.updated(name, role, rows, reports[-1])
        return reports

    def updates(self, batch: DataProto, num_samples: int) -> list[DataProto]:
        """Return the rows of each optimizer step, shuffled once per epoch.

        The number of steps depends on the number of samples, not on the number of rows.
        """
        num_updates = max(1, round(num_samples / self.config.batch.samples_per_update))
        parts = []
        for epoch in range(self.config.batch.epochs_per_step):
            chance = np.random.default_rng([self.config.training.seed, self.num_steps_done, epoch])
            order = chance.permutation(len(batch)) if num_updates > 1 else np.arange(len(batch))
            parts += [batch.take(rows) for rows in np.array_split(order, num_updates)]
        return parts
