"""Samples of the training prompts without training, and the data sets that follow from their scores."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mrl.config.resolved.load import in_directories
from mrl.config.schema import Config
from mrl.data.prompt_loader import SkipLog, one_pass
from mrl.data.rlhf_dataset import open_dataset
from mrl.errors import DataError
from mrl.events import EventLog
from mrl.protocol import DataProto
from mrl.trainer.evaluation import EngineSession, engines_alone
from mrl.trainer.step_metrics import sample_columns, written_lengths

Row = dict[str, Any]


@dataclass(frozen=True)
class Rollouts:
    """Samples with their scores, and figures about them and the engines."""

    rows: list[Row]
    figures: dict[str, float]


def roll_out(
    config: Config, num_prompts: int | None, directory: Path, events: EventLog, say: Callable[[str], None]
) -> Rollouts:
    """Generate `batch.samples_per_prompt` samples of each of the first prompts, or of all, and score them."""
    config = in_directories(engines_alone(config))
    session = EngineSession(config, config.reward, directory, events, say)
    dataset = open_dataset(config.data.train, config.data, config.rollout, session.tokenizer)
    prompts = one_pass(dataset, config.batch.prompts_per_step, SkipLog(config.data.max_bad_rows, events))
    sampled, seconds = [], 0.0
    with session.started():
        with session.engines.rollout_mode():
            generator = session.generator(config)
            for number, batch in enumerate(_first(prompts, num_prompts), 1):
                began = time.perf_counter()
                rows = batch.repeat(config.batch.samples_per_prompt)
                sampled.append((len(rows), generator.run(rows, generator.training, number)))
                seconds += time.perf_counter() - began
                say(f"{sum(num for num, _ in sampled)} samples")
        models = session.scores()
        scored = [models.add(part).batch for _, part in sampled]
    devices = config.placement.pools[config.placement.roles["rollout"]]
    num_asked = sum(num for num, _ in sampled)
    return Rollouts([row for batch in scored for row in _rows(batch)], _figures(scored, num_asked, seconds, devices))


def _first(batches: Iterator[DataProto], num_prompts: int | None) -> Iterator[DataProto]:
    left = num_prompts
    for batch in batches:
        if left is not None:
            batch, left = batch.take(range(min(left, len(batch)))), max(0, left - len(batch))
        if len(batch):
            yield batch
        if left == 0:
            return


def _rows(batch: DataProto) -> Iterator[Row]:
    columns = sample_columns(batch) | {"messages": list(batch["messages"])}
    yield from (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))


def _figures(scored: Sequence[DataProto], num_asked: int, seconds: float, devices: int) -> dict[str, float]:
    """Return counts, scores, and the throughput of the engines while they generated."""
    scores = np.concatenate([batch["scores"].numpy() for batch in scored])
    lengths = np.concatenate([written_lengths(batch) for batch in scored])
    if not len(scores):
        raise DataError("no sample has a score", fix="see the reasons in the log above, and reward.on_failure")
    return {
        "prompts": float(len({uid for batch in scored for uid in batch["uid"]})),
        "samples": float(len(scores)),
        "samples_without_score": float(num_asked - len(scores)),
        "score/mean": float(scores.mean()),
        "score/max": float(scores.max()),
        "response_length/mean": float(lengths.mean()),
        "seconds": seconds,
        "tokens_per_s": float(lengths.sum()) / seconds,
        "tokens_per_s_and_device": float(lengths.sum()) / seconds / devices,
        "samples_per_s": len(scores) / seconds,
    }


def best_rows(rows: Sequence[Row], least: float) -> list[Row]:
    """Return the best sample of each prompt if its score is at least `least`, as a row for `mrl sft`.

    Of equal scores, the first sample counts. Responses that are blank or were cut off are left out.
    """
    best = (max(group, key=lambda row: row["score"]) for group in _by_prompt(rows) if group)
    return [
        _prompt(row) | {"reward_model": {"ground_truth": row["response"]}, "score": row["score"]}
        for row in best
        if row["score"] >= least
    ]


def pairs(rows: Sequence[Row], margin: float) -> list[Row]:
    """Return the best and the worst sample of each prompt whose scores differ by more than `margin`, for `mrl dpo`."""
    found = []
    for group in _by_prompt(rows):
        best, worst = (choose(group, key=lambda row: row["score"]) for choose in (max, min)) if group else (None, None)
        if best is not None and worst is not None and best["score"] - worst["score"] > margin:
            texts = {"chosen": best["response"], "rejected": worst["response"]}
            found.append(_prompt(best) | texts | {"margin": best["score"] - worst["score"]})
    return found


def _by_prompt(rows: Sequence[Row]) -> list[list[Row]]:
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        usable = row["response"].strip() and not row["truncated"]
        groups[row["uid"]] += [row] if usable else []
    return [*groups.values()]


def _prompt(row: Mapping[str, Any]) -> Row:
    messages = [dict(message) for message in row["messages"]]
    return {"prompt": messages, "data_source": row["data_source"]}
