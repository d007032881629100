"""Recording of steps: the chosen ones, and those in which a metric leaves its usual range."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

import mrl
from mrl.config.resolved.run_directory import CHECKPOINTS, steps_in
from mrl.config.schema import Config
from mrl.config.sft import AnyConfig
from mrl.config.training import MetricRangeConfig, RecordConfig
from mrl.controller.transport import fetch
from mrl.errors import BatchError, did_you_mean
from mrl.events import Saved
from mrl.libraries import versions
from mrl.protocol import DataProto
from mrl.protocol.step_record import (
    AFTER,
    BEFORE,
    Moment,
    Placed,
    RankRecord,
    finite,
    host_name,
    record_of,
    write_record,
)
from mrl.redaction import redact
from mrl.trainer.run import Run
from mrl.trainer.sample_stream import stored_form

_FETCH_S = 600.0
_COMPARED_STEPS, _LEAST_COMPARED = 10, 2


class RecordedRole(Protocol):
    """A trained model, as the recorder sees it."""

    @property
    def micro_batches(self) -> list[list[list[int]]]:
        """Row ids of the last update, by data-parallel rank and micro-batch."""

    def record(self, method: str, *arguments: Any) -> list[RankRecord]:
        """Call a method of `RecordedWorker` on all ranks."""


@dataclass
class _OpenRecord:
    step: int
    roles: Mapping[str, RecordedRole]
    before: dict[str, list[RankRecord]]
    facts: dict[str, Any]
    updates: dict[str, list[dict[str, Any]]] = field(default_factory=dict)


class StepRecorder:
    """Records a run's steps. All methods do nothing in a step that cannot be recorded."""

    _settings: RecordConfig

    def __init__(self, run: Run[Any]) -> None:
        self._run = run
        self._settings = run.config.training.record
        self._when = run.config.training.record_when
        self._earlier: dict[str, deque[float]] = {name: deque(maxlen=_COMPARED_STEPS) for name in self._when}
        self._open: _OpenRecord | None = None

    def is_due(self, step: int) -> bool:
        every = self._settings.every
        return step in self._settings.steps or (bool(every) and step % every == 0)

    def begin(self, step: int, roles: Mapping[str, RecordedRole], facts: Mapping[str, Any]) -> None:
        """Take prints before the updates, and begin to watch them."""
        if self.is_due(step) or self._when:
            with self._run.clock("record"):
                options = self._settings.gradients, self._settings.activations
                before = {name: role.record("begin_record", *options) for name, role in roles.items()}
            self._open = _OpenRecord(step, roles, before, dict(facts))

    def updated(self, name: str, role: RecordedRole, rows: DataProto, report: Mapping[str, float]) -> None:
        """Note an optimizer step of a role."""
        if self._open is not None:
            ranks, row_ids = role.micro_batches, rows.row_ids.tolist()
            update = {"rows": row_ids, "micro_batches": ranks, "figures": dict(report)}
            self._open.updates.setdefault(name, []).append(update)

    def end(self, samples: DataProto, batch: DataProto, metrics: Mapping[str, float]) -> None:
        """Write the record if the step is due or one of its metrics is unusual."""
        if self._open is None:
            return
        opened, self._open = self._open, None
        reasons = [*(["configured"] if self.is_due(opened.step) else []), *self._unusual(metrics)]
        with self._run.clock("record"):
            if reasons:
                self._write(opened, samples, batch, {"reasons": reasons, "figures": dict(metrics)})
            for role in opened.roles.values():
                role.record("drop_record")

    def _unusual(self, metrics: Mapping[str, float]) -> Iterator[str]:
        """Yield a sentence for each metric that is outside of its range."""
        for name, usual in self._when.items():
            if (value := metrics.get(name)) is None:
                problem = f"this step has no metric {name}: {did_you_mean(name, metrics)}"
                self._run.warn_once("training.record_when", problem, of=name)
                continue
            if reason := outside(value, usual, self._earlier[name]):
                yield f"{name} is {value:.6g}, {reason}"
            self._earlier[name].append(value)

    def _write(self, opened: _OpenRecord, samples: DataProto, batch: DataProto, known: Mapping[str, Any]) -> None:
        run, step = self._run, opened.step
        began = time.monotonic()
        after = {name: role.record("end_record") for name, role in opened.roles.items()}
        prints = [placed for name in after for placed in _placed(name, opened.before[name], after[name])]
        ranks = {name: [record.place | {"host": record.host} for record in records] for name, records in after.items()}
        facts = _facts(run.config, run.directory, step) | opened.facts | dict(known)
        facts |= {"updates": opened.updates, "ranks": ranks}
        local, kept = fetch(batch, _FETCH_S), stored_form(samples)
        local = DataProto({**local.columns()}, local.row_ids, finite(facts))
        try:
            size = write_record(run.directory, step, kept, local, prints, self._settings.max_bytes)
        except (BatchError, OSError) as error:
            run.warn_once("record", f"step {step} is not recorded, the run continues: {error}")
            return
        if not size:
            limit = f"training.record.max_bytes={self._settings.max_bytes}"
            problem = f"step {step} is not recorded: with it, the records would exceed {limit}"
            run.warn_once("record", f"{problem}; raise the limit, or record fewer steps")
            return
        run.events.write(Saved("record", step, str(record_of(run.directory, step)), size, time.monotonic() - began))
        for reason in known["reasons"]:
            if reason != "configured":
                run.warn("record", f"step {step} is recorded: {reason}")


def outside(value: float, usual: MetricRangeConfig, earlier: Sequence[float]) -> str:
    """Say how a value leaves its range; return an empty string if it does not."""
    if not math.isfinite(value):
        return "which is not finite"
    if usual.min is not None and value < usual.min:
        return f"below {usual.min:g}"
    if usual.max is not None and value > usual.max:
        return f"above {usual.max:g}"
    known = [number for number in earlier if math.isfinite(number)]
    if usual.jump is not None and len(known) >= _LEAST_COMPARED and abs(value - fmean(known)) > usual.jump:
        return f"more than {usual.jump:g} from {fmean(known):.6g}, the mean of the {len(known)} steps before"
    return ""


def _placed(role: str, before: Sequence[RankRecord], after: Sequence[RankRecord]) -> Iterator[Placed]:
    for rank, (first, last) in enumerate(zip(before, after, strict=True)):
        for moment, state in ((BEFORE, first.state), (AFTER, last.state)):
            yield from ((role, moment, rank, part) for part in state)
        for update, parts in enumerate(last.updates):
            yield from ((role, Moment(1, update), rank, part) for part in parts)


def _facts(config: AnyConfig, directory: Path, step: int) -> dict[str, Any]:
    seed, epochs = config.training.seed, config.batch.epochs_per_step if isinstance(config, Config) else 0
    return {
        "step": step,
        "config": redact(json.loads(json.dumps(dataclasses.asdict(config)))),
        "versions": {"mrl": mrl.__version__, **versions()},
        "host": host_name(),
        "seeds": {"training": seed, "data": config.data.seed, "orders": [[seed, step - 1, e] for e in range(epochs)]},
        "checkpoints": steps_in(directory / CHECKPOINTS),
    }
