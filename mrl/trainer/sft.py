"""Supervised fine-tuning on the engine that PPO uses: packed rows, prompts read and not learnt."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from mrl.config.arithmetic import role_mesh
from mrl.config.schema import BatchConfig
from mrl.config.sft import SftConfig
from mrl.controller import RayClassWithInitArgs, RayWorkerGroup, ResourcePoolManager, RunContext, ray_cluster
from mrl.data.answers import ANSWER, PROMPT, MessageRows, with_responses
from mrl.data.chat import ChatTokenizer, PromptEncoder, load_tokenizer
from mrl.data.prompt_loader import PromptLoader
from mrl.data.rlhf_dataset import RLHFDataset
from mrl.data.rows import RowParser
from mrl.data.sources import open_source
from mrl.events import EventLog
from mrl.protocol import DataProto
from mrl.trainer.model_role import ModelRole
from mrl.workers.messages import ModelSetup

MODEL = "model"
_AVERAGED = 10


def train_sft(
    config: SftConfig, directory: Path, events: EventLog, on_step: Callable[[int, dict[str, float]], None]
) -> Path:
    """Train; the directory of the trained model in Hugging Face format."""
    tokenizer = load_tokenizer(config.model.path)
    batch = BatchConfig(
        prompts_per_step=config.batch.rows_per_update,
        samples_per_prompt=1,
        samples_per_update=config.batch.rows_per_update,
    )
    rows = PromptLoader(_open(config, tokenizer), config.data, batch, events)

    def next_rows() -> DataProto:
        return with_responses(rows.next_batch(), tokenizer, config.batch.max_response_tokens)

    with ExitStack() as stack:
        stack.enter_context(ray_cluster(config.cluster))
        resources = ResourcePoolManager(config.placement, config.cluster, config.deadlines)
        resources.create(directory, events)
        stack.callback(resources.release)
        setup = ModelSetup(config.model.path, "lm", config.actor, config.training.seed, config.deadlines.call_s)
        worker = RayClassWithInitArgs("mrl.workers.sft:SftWorker", setup)
        context = RunContext(directory, events, config.deadlines, resources)
        group = RayWorkerGroup("actor", worker, role_mesh(config, "actor"), context)
        stack.callback(group.shutdown)
        role = ModelRole(group, config.actor)
        thread = stack.enter_context(ThreadPoolExecutor(1, "rows"))
        coming = thread.submit(next_rows)
        losses: deque[float] = deque(maxlen=_AVERAGED)
        for step in range(1, config.training.steps + 1):
            present = coming.result()
            if step < config.training.steps:
                coming = thread.submit(next_rows)  # read while the workers compute
            figures = role.update("update_sft", present)
            on_step(step, figures)
            losses.append(figures["loss"])
            if len(losses) == _AVERAGED and sum(losses) / _AVERAGED <= (config.training.until_loss or -math.inf):
                break
        model = directory / MODEL
        group.export(str(model))
    return model


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
