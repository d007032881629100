"""Supervised fine-tuning on the engine that PPO uses: packed rows, prompts read and not learnt."""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mrl.config.arithmetic import role_mesh
from mrl.config.model_names import in_directories
from mrl.config.run_directory import CHECKPOINTS
from mrl.config.schema import BatchConfig
from mrl.config.sft import SftConfig
from mrl.controller import RayClassWithInitArgs, RayWorkerGroup, ResourcePoolManager, RunContext, ray_cluster
from mrl.data.chat import ChatTokenizer, PromptEncoder, load_tokenizer
from mrl.data.prompt_loader import PromptLoader
from mrl.data.rlhf_dataset import RLHFDataset
from mrl.data.rows import RowParser
from mrl.data.sft_rows import ANSWER, PROMPT, MessageRows, with_responses
from mrl.data.sources import open_source
from mrl.events import EventLog, Warned
from mrl.observe.metrics import MetricsFile
from mrl.protocol import DataProto
from mrl.trainer.checkpoints import CheckpointManager
from mrl.trainer.node_models import fetch_models
from mrl.trainer.resume_config import describe_changes, resume_config
from mrl.trainer.role_client import SftClient
from mrl.trainer.shutdown import ShutdownSignal
from mrl.workers.messages import ModelSetup

MODEL, ROLE = "model", "actor"
_AVERAGED = 10


def train_sft(
    config: SftConfig,
    directory: Path,
    events: EventLog,
    stopping: ShutdownSignal,
    on_step: Callable[[int, dict[str, float]], None],
    say: Callable[[str], None],
) -> Path | None:
    """Train from the newest checkpoint on; the trained model in Hugging Face format, or None if told to stop before."""
    local = in_directories(config)
    tokenizer = load_tokenizer(local.model.path)
    batch = BatchConfig(
        prompts_per_step=config.batch.rows_per_update,
        samples_per_prompt=1,
        samples_per_update=config.batch.rows_per_update,
    )
    rows = PromptLoader(_open(config, tokenizer), config.data, batch, events)
    with ExitStack() as stack:
        stack.enter_context(ray_cluster(config.cluster))
        resources = ResourcePoolManager(config.placement, config.cluster, config.deadlines)
        resources.create(directory, events)
        stack.callback(resources.release)
        fetch_models(local, resources, events)
        setup = ModelSetup(local.model.path, "lm", config.actor, config.training.seed, config.deadlines.call_s)
        worker = RayClassWithInitArgs("mrl.workers.sft:SftWorker", setup)
        context = RunContext(directory, events, config.deadlines, resources)
        group = RayWorkerGroup(ROLE, worker, role_mesh(config, ROLE), context)
        stack.callback(group.shutdown)
        run = _SftRun(config, directory, events, rows, SftClient(group, config.actor))
        run.resume(say)
        thread = stack.enter_context(ThreadPoolExecutor(1, "rows"))

        def next_rows() -> _Read:
            return _Read(
                with_responses(rows.next_batch(), tokenizer, config.batch.max_response_tokens), rows.state_dict()
            )

        coming = thread.submit(next_rows)
        while not run.is_done:
            present, coming = coming.result(), thread.submit(next_rows)  # read while the workers compute
            on_step(*run.step(present))
            reason = stopping.reason()
            if reason or run.save_is_due:
                run.save(present)
            if reason and not run.is_done:
                say(f"{reason}: saved and stopped after {run.num_done} updates; the same command goes on")
                return None
        model = directory / MODEL
        shutil.rmtree(model, ignore_errors=True)  # of this run when it was shorter; it follows from the checkpoint
        group.export(str(model))
    return model


@dataclass(frozen=True)
class _Read:
    """Rows, and where their reader stood after them."""

    batch: DataProto
    state: dict[str, Any]


class _SftRun:
    """What is done of a run, and what of it is on disk."""

    def __init__(
        self, config: SftConfig, directory: Path, events: EventLog, rows: PromptLoader, role: SftClient
    ) -> None:
        self._config, self._events, self._rows, self._role = config, events, rows, role
        self._snapshots = CheckpointManager(directory / CHECKPOINTS, config.training.keep, events)
        self._metrics_path = directory / "metrics.jsonl"
        self._metrics: MetricsFile
        self._losses: deque[float] = deque(maxlen=_AVERAGED)
        self.num_done = 0

    def resume(self, say: Callable[[str], None]) -> None:
        """Go on from the newest checkpoint, where there is one."""
        found = self._snapshots.newest() if self._config.training.resume == "auto" else None
        warnings = describe_changes(found.state["config"], self._config, found.step) if found is not None else {}
        if found is None and self._metrics_path.exists():
            warnings["resume"] = "this run began here before and left no checkpoint: it begins again"
        for about, warning in warnings.items():
            self._events.write(Warned(about, warning))
            say(f"warning: {about}: {warning}")
        if found is not None:
            self._role.group.load_checkpoint(str(found.path / ROLE))
            self._rows.load_state_dict(found.state["rows"])
            self._losses.extend(found.state["losses"])
            self.num_done = found.step
            say(f"resumed from {found.path}")
        self._metrics = MetricsFile(self._metrics_path, self.num_done + 1)

    @property
    def is_done(self) -> bool:
        """Whether all updates are done, or the loss is as low as it need be."""
        training = self._config.training
        is_low = (
            training.until_loss is not None
            and len(self._losses) == _AVERAGED
            and sum(self._losses) / _AVERAGED <= training.until_loss
        )
        return is_low or self.num_done >= training.steps

    @property
    def save_is_due(self) -> bool:
        """Whether the configuration wants a checkpoint now."""
        every = self._config.training.save_every
        return self.is_done or (every > 0 and self.num_done % every == 0)

    def step(self, read: _Read) -> tuple[int, dict[str, float]]:
        """One update; its number and its figures."""
        figures = self._role.update_sft(read.batch)
        self.num_done += 1
        self._losses.append(figures["loss"])
        self._metrics.write(self.num_done, figures)
        return self.num_done, figures

    def save(self, read: _Read) -> None:
        """Write a checkpoint after the update with these rows."""
        state = {"config": resume_config(self._config), "rows": read.state, "losses": list(self._losses)}
        self._snapshots.save(self.num_done, {ROLE: self._role}, state, is_best=False)


def _open(config: SftConfig, tokenizer: ChatTokenizer) -> RLHFDataset:
    sources = {}
    for name, source in config.data.train.items():
        rows, columns = open_source(source), source.columns
        if config.batch.messages is not None:
            rows = MessageRows(rows, config.batch.messages)
            columns = replace(columns, prompt=PROMPT, ground_truth=ANSWER)
        sources[name] = (rows, RowParser(columns, name))
    encoder = PromptEncoder(tokenizer, config.data.template)
    return RLHFDataset(sources, encoder, config.batch.max_prompt_tokens, config.data.overlong)
