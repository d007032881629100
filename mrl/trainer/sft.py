"""Supervised training with PPO's engine: packed rows; prompts are read, responses are learned."""

from __future__ import annotations

import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import compress, takewhile
from pathlib import Path
from typing import Any

import numpy as np

from mrl.config.arithmetic import role_mesh
from mrl.config.data import SAMPLERS
from mrl.config.resolved.load import in_directories
from mrl.config.resolved.run_directory import CHECKPOINTS, checkpoint_of
from mrl.config.schema import BatchConfig
from mrl.config.sft import DpoConfig, SftConfig
from mrl.controller import RayClassWithInitArgs, RayWorkerGroup
from mrl.controller.transport import fetch
from mrl.data.chat import ChatTokenizer, load_tokenizer, model_end_tokens
from mrl.data.prompt_loader import PromptLoader, SkipLog, one_pass
from mrl.data.rlhf_dataset import open_sft_dataset
from mrl.data.row_files import write_samples
from mrl.dtypes import torch_dtype
from mrl.errors import DataError
from mrl.observe.console import printable
from mrl.protocol import DataProto
from mrl.protocol.columns import from_rows
from mrl.protocol.step_record import StepRecord
from mrl.trainer.checkpoint_score import CheckpointScore
from mrl.trainer.checkpoints import read_checkpoint
from mrl.trainer.model_probe import ModelProbe
from mrl.trainer.nodes import placed_run
from mrl.trainer.recorder import StepRecorder
from mrl.trainer.reference import ReferenceLogProbs, Score, compute_reference, num_groups
from mrl.trainer.role_client import Metrics, RoleClient, SupervisedClient
from mrl.trainer.run import Run, load_checkpoint
from mrl.trainer.supervised_tasks import supervised_setup, task_of, warnings_of

MODEL, ROLE = "model", "actor"
_NUM_AVERAGED = 10
_NUM_SHOWN = 60


def train_sft(run: Run[SftConfig], on_update: Callable[[int, Metrics], None]) -> Path | None:
    """Train from the newest checkpoint. Return the model in Hugging Face format; None if the run stopped early."""
    with _started(run) as components, ExitStack() as stack:
        thread = stack.enter_context(ThreadPoolExecutor(1, "rows"))
        stack.callback(run.finish_save)  # also after a failed update: the workers still run
        run.best_by = components.task.best_by
        if not components.compute_reference(run):  # before the weights of a checkpoint are loaded
            run.console.print("stopped before the reference was computed; run the same command to resume")
            return None
        num_done = run.resume(components)
        every, keep_best = run.config.validation.every, run.config.validation.keep_best
        if every and not num_done:
            run.record(0, _validated(run, components, 0))
        recorder, coming = StepRecorder(run), thread.submit(components.read)
        while not components.is_done(num_done):
            (rows, reader), coming = coming.result(), thread.submit(components.read)  # read while the workers compute
            metrics = components.recorded_update(recorder, num_done + 1, rows, reader)
            if components.held_out and not components.held_out.isdisjoint(_prompts_of([rows])):
                run.warn_once(
                    "data.validation", "some of its prompts are also trained on (split by prompt, not by row)"
                )
            num_done += 1
            is_last = components.is_done(num_done)
            is_due = bool(every) and (is_last or num_done % every == 0)
            figures = _validated(run, components, num_done) if is_due else {}
            run.record(num_done, metrics | figures)
            on_update(num_done, metrics | figures)
            score = CheckpointScore(components.task.sign * figures[components.task.best], num_done) if figures else None
            stop = not is_last and run.should_stop()
            if is_last or stop or (keep_best and run.is_best(score)) or run.save_is_due(num_done):
                run.save(components, num_done, score, wait=is_last or stop)
            run.publish_save()
            if stop:
                run.console.print(f"stopped after {num_done} updates; run the same command to resume")
                return None
    return _export(run, checkpoint_of(run.directory / CHECKPOINTS, num_done))


def replay_updates(run: Run[SftConfig], source: Path, checkpoint: int) -> None:
    """Make the recorded updates of another run again, after one of its checkpoints, up to the last step of this run."""
    with _started(run) as components:
        run.resume(components)  # a new run: it opens the files of the metrics
        if checkpoint:
            load_checkpoint(read_checkpoint(source / CHECKPOINTS, checkpoint), components)
        recorder = StepRecorder(run)
        for step in range(checkpoint + 1, (run.config.training.steps or 0) + 1):
            rows = StepRecord.read(source, step).samples
            run.record(step, components.recorded_update(recorder, step, rows))


def _validated(run: Run[SftConfig], components: _SftComponents, step: int) -> Metrics:
    """Return the figures of a validation. Print and save sample answers."""
    if samples := components.sample():
        prompt, response = (printable(samples[name][0]) for name in ("prompt", "response"))
        run.console.print(f"sample of step {step}: {prompt[-_NUM_SHOWN:]} -> {response[:_NUM_SHOWN]}")
        with run.may_be_lost("samples"):
            write_samples(run.directory / "samples", step, samples, "validation")
    figures = components.task.measure(components.client, components.validation)
    if step:  # an untrained model gets no warnings
        for about, message in warnings_of(figures):
            run.warn_once(about, message)
    return figures


def _export(run: Run[SftConfig], checkpoint: Path) -> Path:
    """Export the last checkpoint as a model directory, as `mrl export` does."""
    from mrl.engine.adapter_files import export_merged
    from mrl.engine.checkpoint_files import export_checkpoint

    model = run.directory / MODEL
    shutil.rmtree(model, ignore_errors=True)  # an earlier export of this run
    config = in_directories(run.config)
    saved, source, dtype = checkpoint / ROLE, Path(config.model.path), torch_dtype(config.actor.dtype)
    if config.actor.lora is None:
        export_checkpoint(saved, source, task_of(config).head, dtype, model)
    else:
        _, loss = export_merged(saved, source, config.actor, dtype, model)
        run.console.print(f"merged the adapters into {model}: {loss}; `mrl export` writes PEFT's files")
    return model


class _SftComponents:
    """Reader of rows, workers, and the recent losses, which may end a run early."""

    def __init__(
        self,
        config: SftConfig,
        prompts: PromptLoader,
        validation: Sequence[DataProto],
        client: SupervisedClient,
        sampler: AnswerSampler | None,
        reference: ReferenceLogProbs | None,
    ) -> None:
        self.task = task_of(config)
        self._config, self._prompts, self.validation, self.client = config, prompts, validation, client
        self._sampler, self._reference = sampler, reference
        self._trained_on = prompts.state_dict()
        self._losses: deque[float] = deque(maxlen=_NUM_AVERAGED)
        self.held_out = _prompts_of(validation)

    @property
    def roles(self) -> Mapping[str, RoleClient]:
        return {ROLE: self.client}

    def read(self) -> tuple[DataProto, dict[str, Any]]:
        """Return the rows of the next update, and the state of the reader after them."""
        batch = self._prompts.next_batch()
        if self._reference is not None:
            batch = self._reference.joined(batch)
        return batch, self._prompts.state_dict()

    def compute_reference(self, run: Run[SftConfig]) -> bool:
        """Compute the reference log-probs of all rows, if the task computes them once.

        Return False if the run must stop first.
        """
        if self._reference is None:
            return True
        num_rows, steps = self._prompts.num_rows, self._config.training.steps
        at_most = min(num_rows, steps * self._config.batch.rows_per_update) if steps else num_rows
        at_most += sum(map(num_groups, self.validation))
        is_whole = compute_reference(self._reference, self._rows_to_come(self._reference), at_most, run)
        self._prompts.load_state_dict(self._trained_on)
        if is_whole:
            self.validation = [self._reference.joined(rows) for rows in self.validation]
        return is_whole

    def _rows_to_come(self, kept: ReferenceLogProbs) -> Iterator[tuple[DataProto, Score]]:
        """Yield the rows of validation, then the rows of updates that have no reference yet, until all rows have been
        read.

        They are cut into the same micro-batches as in training, so that in the first epoch reference and policy round
        alike.
        """
        yield from ((rows, self.client.score) for rows in self.validation)
        if kept.reader is not None:
            self._prompts.load_state_dict(kept.reader)
        num_rows = self._config.batch.rows_per_update
        while not self._are_all_read(kept.num_read // num_rows, self._prompts.state_dict()):
            rows = self._prompts.next_batch()
            kept.num_read, kept.reader = kept.num_read + num_rows, self._prompts.state_dict()
            yield rows, self.client.score_groups

    def _are_all_read(self, num_updates: int, reader: Mapping[str, Any]) -> bool:
        drawn, sizes = reader["sampler"]["drawn"], reader["sampler"]["order"]["sizes"]
        # A user's sampler may leave rows of the first epoch for later epochs.
        is_epoch = self._config.data.sampler in SAMPLERS and all(drawn[name] >= size for name, size in sizes.items())
        return is_epoch or self._is_through(num_updates, reader)

    def recorded_update(
        self, recorder: StepRecorder, step: int, rows: DataProto, reader: dict[str, Any] | None = None
    ) -> Metrics:
        """Make one optimizer step on these rows, and record it if it is due.

        `reader` is the state of the reader after them; recorded rows have none.
        """
        prepared = rows if self.task.prepare is None else self.task.prepare(self.client, rows)
        recorder.begin(step, self.roles, {})
        metrics = self.client.update(self.task.update, prepared)
        recorder.updated(ROLE, self.client, prepared, metrics)
        recorder.end(rows, prepared, metrics)
        self._losses.append(metrics["loss"])
        if reader is None:
            return metrics
        self._trained_on = reader
        return metrics | {"epoch": self._epoch(self._trained_on)}

    def sample(self) -> dict[str, list[Any]]:
        return {} if self._sampler is None else self._sampler.columns(self.client)

    def is_done(self, num_updates: int) -> bool:
        training = self._config.training
        is_low = (
            training.until_loss is not None
            and len(self._losses) == _NUM_AVERAGED
            and sum(self._losses) / _NUM_AVERAGED <= training.until_loss
        )
        return is_low or self._is_through(num_updates, self._trained_on)

    def _is_through(self, num_updates: int, reader: Mapping[str, Any]) -> bool:
        """Return whether the run ends after this number of updates, with this reader state."""
        steps, epochs = self._config.training.steps, self._config.training.epochs
        return (epochs is not None and self._epoch(reader) >= epochs) or (steps is not None and num_updates >= steps)

    def _epoch(self, reader: Mapping[str, Any]) -> float:
        drawn: int = sum(reader["sampler"]["drawn"].values())
        return drawn / self._prompts.num_rows

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the reader after the rows of the last update, without the rows read ahead."""
        return {"rows": self._trained_on, "losses": list(self._losses)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._prompts.load_state_dict(state["rows"])
        self._trained_on = state["rows"]
        self._losses.extend(state["losses"])


def _prompts_of(batches: Sequence[DataProto]) -> set[bytes]:
    return {prompt.numpy().tobytes() for rows in batches for prompt in rows["prompts"].rows()}


@contextmanager
def _started(run: Run[SftConfig]) -> Iterator[_SftComponents]:
    config = in_directories(run.config)
    tokenizer = load_tokenizer(config.model.path, config.data)
    batch = BatchConfig(
        prompts_per_step=config.batch.rows_per_update,
        samples_per_prompt=1,
        samples_per_update=config.batch.rows_per_update,
    )
    prompts = PromptLoader(open_sft_dataset(config.data.train, config, tokenizer), config.data, batch, run.events)
    validation: list[DataProto] = []
    if config.validation.every:  # all its rows are read once per run
        held_out = open_sft_dataset(config.data.validation, config, tokenizer)
        skips = SkipLog(config.data.max_bad_rows, run.events)
        validation = list(one_pass(held_out, config.batch.rows_per_update, skips))
        if not validation:
            raise DataError(
                "none of its rows is usable: each was skipped",
                where="data.validation",
                fix="mrl check CONFIG --all-rows",
            )
    answers = task_of(config).update == "update_sft"  # the other tasks compare answers and generate none
    has_samples = answers and bool(validation) and config.validation.samples > 0
    sampler = AnswerSampler(config, tokenizer, DataProto.concat(validation)) if has_samples else None
    reference = None
    if isinstance(run.config, DpoConfig) and run.config.preference.reference == "once":
        reference = ReferenceLogProbs(run.directory, run.config)
    with ExitStack() as stack:
        task, setup = task_of(config), supervised_setup(config)
        setups = {ROLE: setup} if config.model.verify else {}
        probe = stack.enter_context(ModelProbe(setups, tokenizer, run.events, config.deadlines.call_s).asked())
        context = stack.enter_context(placed_run(config, run.directory, run.events))
        worker = RayClassWithInitArgs(config.actor.worker or task.worker, setup, *task.arguments)
        group = RayWorkerGroup(ROLE, worker, role_mesh(config, ROLE), context)
        stack.callback(group.shutdown)
        client = SupervisedClient(group, config.actor)
        probe.compare(ROLE, client)
        yield _SftComponents(config, prompts, validation, client, sampler, reference)


Ids = list[int]


class AnswerSampler:
    """Sample answers of `mrl sft` to a few validation prompts, by the forward pass that measures the loss.

    This is Jacobi decoding: the first guess of an answer is the ground truth. A pass gives the likeliest token after
    each position of the guess, which is the next guess. A token is greedy when all tokens before it are, so each pass
    settles at least one more token. A guess that no longer changes is the model's greedy answer.
    """

    def __init__(self, config: SftConfig, tokenizer: ChatTokenizer, rows: DataProto) -> None:
        self._rows, self._tokenizer = first_by_source(rows, config.validation.samples), tokenizer
        self._ends = {end for ends in model_end_tokens(tokenizer, config.model.path).values() for end in ends}
        self._timeout_s = config.deadlines.call_s
        self._max_tokens = min(config.validation.max_response_tokens, config.batch.max_response_tokens)
        pairs = zip(_lists(self._rows, "responses"), _lists(self._rows, "response_mask"), strict=True)
        # The answer ends where the next message of another role begins.
        self._truths = [list(compress(ids, takewhile(bool, mask))) for ids, mask in pairs]

    def columns(self, client: SupervisedClient) -> dict[str, list[Any]]:
        answers = self._answers(client)
        return {
            "uid": list(self._rows["uid"]),
            "data_source": list(self._rows["data_source"]),
            "prompt": list(self._rows["prompt_text"]),
            "response": [self._text(answer) for answer in answers],
            "ground_truth": [self._text(truth) for truth in self._truths],
            "num_tokens": [len(answer) for answer in answers],
            "truncated": [answer[-1] not in self._ends for answer in answers],
        }

    def _answers(self, client: SupervisedClient) -> list[Ids]:
        num = self._max_tokens
        rooms = (
            client.capacity - self._rows.lengths("prompts")
        ).tolist()  # tokens left in a micro-batch after each prompt
        pairs = zip(self._truths, rooms, strict=True)
        guesses = [(truth + [0] * num)[: min(num, room)] for truth, room in pairs]
        for _ in range(num):
            predicted = client.score(
                "predict_sft", self._rows.select("prompts").with_column("responses", from_rows(guesses))
            )
            predicted = fetch(predicted.select("greedy_tokens"), self._timeout_s)
            previous, guesses = guesses, _lists(predicted, "greedy_tokens")
            answers = [self._until_end(guess) for guess in guesses]
            if all(answer == guess[: len(answer)] for answer, guess in zip(answers, previous, strict=True)):
                break
        return answers

    def _until_end(self, ids: Ids) -> Ids:
        return ids[: next((at for at, token in enumerate(ids, start=1) if token in self._ends), len(ids))]

    def _text(self, ids: Ids) -> str:
        return self._tokenizer.decode(ids[:-1] if ids[-1] in self._ends else ids)


def first_by_source(rows: DataProto, num: int) -> DataProto:
    """Return the first `num` rows, taking one row of each data source in turn."""
    seen: Counter[str] = Counter()
    turns = []
    for source in rows["data_source"]:
        turns.append(seen[source])
        seen[source] += 1
    return rows.take(np.argsort(turns, kind="stable")[:num])


def _lists(rows: DataProto, name: str) -> list[list[int]]:
    return [row.tolist() for row in rows[name].rows()]
