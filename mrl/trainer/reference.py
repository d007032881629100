"""What a policy said before training of ranked responses: computed once, and kept in one file of the run's directory.

A group of responses is found by its tokens. What has come to be other tokens since, by another tokenizer, template,
limit or row, is not found, and never takes what was said of something else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mrl import files
from mrl.config.arithmetic import role_devices
from mrl.config.sft import DpoConfig, SftConfig
from mrl.controller.transport import fetch
from mrl.errors import CheckpointError, WireError
from mrl.hub import HubName
from mrl.protocol import DataProto, Jagged
from mrl.protocol.batch_file import batch_from_bytes, batch_to_bytes
from mrl.protocol.columns import from_rows
from mrl.trainer.role_client import group_sizes
from mrl.trainer.run import Run

FILE, COLUMN = "reference.bin", "ref_log_probs"
Score = Callable[[str, DataProto], DataProto]
"""Has a method of the workers write columns for rows."""
_FORMAT = b"mrl-reference-1\n"
_HASHED_FROM = len(_FORMAT) + hashlib.sha256().digest_size
_TIMES_SHOWN = 10
_ANEW = "move the file away: it is computed anew, by the model as it was before training"


class ReferenceLogProbs:
    """The log-probs of each group's response tokens, and how far rows have been read for them."""

    def __init__(self, directory: Path, config: DpoConfig) -> None:
        """Take up what the run has computed before; a file that is damaged, or of another model, is an error."""
        self.path = directory / FILE
        self.num_read = 0
        """Prompts of data.train that have been read, each with its responses."""
        self.reader: dict[str, Any] | None = None
        """Where their reader stands."""
        self.said_by, self.layout = _said_by(config), _layout(config)
        self.layout_then = self.layout
        self._groups: dict[str, Tensor] = {}
        if self.path.exists():
            self._read()

    def __len__(self) -> int:
        return len(self._groups)

    def lacks(self, batch: DataProto) -> bool:
        return any(key not in self._groups for key in _keys(batch))

    def add(self, batch: DataProto, log_probs: Jagged) -> None:
        """Keep what was said of these rows; of a group that is there already, what was said first."""
        tokens = np.add.reduceat(log_probs.lengths, _starts(batch)).tolist()
        values = torch.split(log_probs.values.clone(), tokens)  # else the object store could not let go of them
        for key, value in zip(_keys(batch), values, strict=True):
            self._groups.setdefault(key, value)

    def joined(self, batch: DataProto) -> DataProto:
        keys = _keys(batch)
        if lacking := [number for number, key in enumerate(keys) if key not in self._groups]:
            first = batch["uid"][_starts(batch)[lacking[0]]]
            what = f"it lacks {len(lacking)} of {len(keys)} prompts with their responses (source/epoch/row: {first})"
            fix = f"the tokenizer, chat template, limits and rows that it was computed of, or {_ANEW}"
            raise CheckpointError(f"{what}: they are other tokens than then", where=str(self.path), fix=fix)
        values = torch.cat([self._groups[key] for key in keys])
        return batch.with_column(COLUMN, Jagged(values, batch.lengths("responses")))

    def save(self) -> None:
        """Write the file anew, whole or not at all."""
        told = {"said_by": self.said_by, "layout": self.layout, "num_read": self.num_read, "reader": self.reader}
        columns = {"log_probs": from_rows(list(self._groups.values()))}
        batch = DataProto.from_dict(columns, {"group": list(self._groups)})
        content = batch_to_bytes(batch.columns(), batch.row_ids, told)
        try:
            files.write_bytes(self.path, _FORMAT + hashlib.sha256(content).digest() + content, mode=0o600)
        except OSError as error:
            what = f"the reference's log-probs cannot be written: {error.strerror}"
            raise CheckpointError(what, where=str(self.path), fix="free space there") from error

    def _read(self) -> None:
        try:
            data = files.read_bytes(self.path, self.path.stat().st_size)
            content = data[_HASHED_FROM:]
            if data[:_HASHED_FROM] != _FORMAT + hashlib.sha256(content).digest():
                raise ValueError(f"these {len(data)} bytes are not what was written")
            columns, row_ids, told = batch_from_bytes(content)
            batch = DataProto(columns, row_ids, {})
            self._groups = dict(zip(batch["group"], batch["log_probs"].rows(), strict=True))
            then, self.layout_then = told["said_by"], told["layout"]
            self.num_read, self.reader = told["num_read"], told["reader"]
        except (OSError, WireError, ValueError, KeyError, TypeError) as error:
            what = f"the reference's log-probs cannot be read: {error}"
            raise CheckpointError(what, where=str(self.path), fix=_ANEW) from error
        if changes := _changes(then, self.said_by):
            what = f"these log-probs are not the reference's: {changes}"
            raise CheckpointError(what, where=str(self.path), fix=f"set it back, or {_ANEW}")


def compute_reference(
    kept: ReferenceLogProbs, to_come: Iterable[tuple[DataProto, Score]], at_most: int, run: Run[SftConfig]
) -> bool:
    """Have the log-probs of all rows to come in the file, by the weights as they are; False if told to stop before."""
    if changes := _changes(kept.layout_then, kept.layout):
        run.warn("preference.reference", f"log-probs were computed, and rounded, in another layout: {changes}")
    num_before, num_shown, is_stopped = len(kept), len(kept), False
    with run.clock("reference"):
        for rows, score in to_come:
            if kept.lacks(rows):
                found = score("compute_ref_log_prob", rows).select(COLUMN)
                kept.add(rows, fetch(found, run.config.deadlines.call_s)[COLUMN])
            run.clock.progress(len(kept), at_most)
            if len(kept) - num_shown >= at_most / _TIMES_SHOWN:
                num_shown = len(kept)
                run.console.print(f"reference: {num_shown} of at most {at_most} prompts with their responses")
            if is_stopped := run.should_stop():
                break
    if len(kept) > num_before:
        kept.save()
        run.console.print(f"reference: {len(kept)} prompts with their responses are in {kept.path}")
    return not is_stopped


def _said_by(config: DpoConfig) -> dict[str, Any]:
    """Return what decides, beside tokens, what a model says of them; the commit stands for a model of the hub."""
    hub, directory = HubName.parse(config.model.path), Path(config.model.path).expanduser()
    weights = [] if hub else [directory / "config.json", *sorted(directory.glob("*.safetensors"))]
    content = hashlib.sha256(" ".join(files.sha256(path) for path in weights).encode()).hexdigest()
    given = {name: value for name, value in config.actor.megatron.items() if not name.startswith("recompute_")}
    settings = {"actor.dtype": config.actor.dtype, "actor.megatron": json.loads(json.dumps(given))}
    return {"model.path": str(hub or f"sha256 {content}"), **settings}


def _layout(config: DpoConfig) -> dict[str, Any]:
    sizes = {"devices": role_devices(config, "actor"), "max_tokens_per_device": config.actor.max_tokens_per_device}
    return asdict(config.actor.parallel) | sizes


def _changes(then: dict[str, Any], now: dict[str, Any]) -> str:
    return "; ".join(f"{key} was {then[key]}, and is {value}" for key, value in now.items() if then[key] != value)


def num_groups(batch: DataProto) -> int:
    return len(_starts(batch))


def _starts(batch: DataProto) -> npt.NDArray[np.int64]:
    sizes = group_sizes(batch)
    assert sizes is not None, "ranked responses stand in groups"
    return np.cumsum(sizes) - sizes


def _keys(batch: DataProto) -> list[str]:
    """Return what tells the tokens of each group, its prompt and its responses, from those of all others."""
    prompts, responses = batch["prompts"].rows(), batch["responses"].rows()
    starts = _starts(batch).tolist()
    keys = []
    for begin, end in zip(starts, [*starts[1:], len(batch)], strict=True):
        parts = [prompts[begin], *responses[begin:end]]
        digest = hashlib.blake2b(np.asarray([len(part) for part in parts], "<i8").tobytes(), digest_size=16)
        digest.update(torch.cat(parts).numpy().astype("<i4").tobytes())
        keys.append(digest.hexdigest())
    return keys
