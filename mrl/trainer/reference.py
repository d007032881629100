"""Reference log-probs of ranked responses, computed once before training and stored in one file of the run directory.

Groups of responses are identified by their tokens. If the tokens have changed since then (another tokenizer, template,
limit or row), the group counts as missing. It never gets the log-probs of another group.
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
"""Calls a method of the workers that writes columns for rows."""
_FORMAT = b"mrl-reference-1\n"
_HASHED_FROM = len(_FORMAT) + hashlib.sha256().digest_size
_TIMES_SHOWN = 10
_RECOMPUTE = "move the file away: mrl recomputes it with the model as it was before training"


class ReferenceLogProbs:
    """Log-probs of the response tokens of each group, and how many rows have been read to compute them."""

    def __init__(self, directory: Path, config: DpoConfig) -> None:
        """Load the log-probs computed so far. Raise an error if the file is damaged or belongs to another model."""
        self.path = directory / FILE
        self.num_read = 0
        """Number of prompts of `data.train` that have been read, each with its responses."""
        self.reader: dict[str, Any] | None = None
        """State of the reader of these prompts."""
        self.identity, self.layout = _identity(config), _layout(config)
        self.layout_then = self.layout
        self._groups: dict[str, Tensor] = {}
        if self.path.exists():
            self._read()

    def __len__(self) -> int:
        return len(self._groups)

    def lacks(self, batch: DataProto) -> bool:
        return any(key not in self._groups for key in _keys(batch))

    def add(self, batch: DataProto, log_probs: Jagged) -> None:
        """Store the log-probs of these rows. Groups that are stored already keep their first log-probs."""
        tokens = np.add.reduceat(log_probs.lengths, _starts(batch)).tolist()
        values = torch.split(log_probs.values.clone(), tokens)  # copies, so that the object store can free the batch
        for key, value in zip(_keys(batch), values, strict=True):
            self._groups.setdefault(key, value)

    def joined(self, batch: DataProto) -> DataProto:
        keys = _keys(batch)
        if lacking := [number for number, key in enumerate(keys) if key not in self._groups]:
            first_uid = batch["uid"][_starts(batch)[lacking[0]]]
            problem = f"{len(lacking)} of {len(keys)} prompts with their responses are missing"
            fix = f"restore the tokenizer, chat template, limits and rows that it was computed with, or {_RECOMPUTE}"
            message = f"{problem} (source/epoch/row of the first: {first_uid}); their tokens have changed"
            raise CheckpointError(message, where=str(self.path), fix=fix)
        values = torch.cat([self._groups[key] for key in keys])
        return batch.with_column(COLUMN, Jagged(values, batch.lengths("responses")))

    def save(self) -> None:
        """Replace the file, atomically."""
        metadata = {"said_by": self.identity, "layout": self.layout, "num_read": self.num_read, "reader": self.reader}
        columns = {"log_probs": from_rows(list(self._groups.values()))}
        batch = DataProto.from_dict(columns, {"group": list(self._groups)})
        content = batch_to_bytes(batch.columns(), batch.row_ids, metadata)
        try:
            files.write_bytes(self.path, _FORMAT + hashlib.sha256(content).digest() + content, mode=0o600)
        except OSError as error:
            problem = f"cannot write the log-probs of the reference: {error.strerror}"
            raise CheckpointError(problem, where=str(self.path), fix="free space on that disk") from error

    def _read(self) -> None:
        try:
            data = files.read_bytes(self.path, self.path.stat().st_size)
            content = data[_HASHED_FROM:]
            if data[:_HASHED_FROM] != _FORMAT + hashlib.sha256(content).digest():
                raise ValueError(f"the checksum of these {len(data)} bytes is wrong")
            columns, row_ids, metadata = batch_from_bytes(content)
            batch = DataProto(columns, row_ids, {})
            self._groups = dict(zip(batch["group"], batch["log_probs"].rows(), strict=True))
            saved_identity, self.layout_then = metadata["said_by"], metadata["layout"]
            self.num_read, self.reader = metadata["num_read"], metadata["reader"]
        except (OSError, WireError, ValueError, KeyError, TypeError) as error:
            problem = f"cannot read the log-probs of the reference: {error}"
            raise CheckpointError(problem, where=str(self.path), fix=_RECOMPUTE) from error
        if changes := _changes(saved_identity, self.identity):
            problem = f"these log-probs were computed by another reference: {changes}"
            raise CheckpointError(problem, where=str(self.path), fix=f"undo the change, or {_RECOMPUTE}")


def compute_reference(
    kept: ReferenceLogProbs, to_come: Iterable[tuple[DataProto, Score]], at_most: int, run: Run[SftConfig]
) -> bool:
    """Compute and store the missing log-probs with the current weights. Return False if the run must stop."""
    if changes := _changes(kept.layout_then, kept.layout):
        run.warn(
            "preference.reference", f"the log-probs were computed with another layout and round differently: {changes}"
        )
    num_before, num_shown, is_stopped = len(kept), len(kept), False
    with run.clock("reference"):
        for rows, score in to_come:
            if kept.lacks(rows):
                scores = score("compute_ref_log_prob", rows).select(COLUMN)
                kept.add(rows, fetch(scores, run.config.deadlines.call_s)[COLUMN])
            run.clock.progress(len(kept), at_most)
            if len(kept) - num_shown >= at_most / _TIMES_SHOWN:
                num_shown = len(kept)
                run.console.print(f"reference: computed {num_shown} of at most {at_most} prompts with their responses")
            if is_stopped := run.should_stop():
                break
    if len(kept) > num_before:
        kept.save()
        run.console.print(f"reference: stored {len(kept)} prompts with their responses in {kept.path}")
    return not is_stopped


def _identity(config: DpoConfig) -> dict[str, Any]:
    """Return what determines log-probs besides the tokens. A model of the hub is represented by its commit."""
    hub, directory = HubName.parse(config.model.path), Path(config.model.path).expanduser()
    weights = [] if hub else [directory / "config.json", *sorted(directory.glob("*.safetensors"))]
    content = hashlib.sha256(" ".join(files.sha256(path) for path in weights).encode()).hexdigest()
    options = {name: value for name, value in config.actor.megatron.items() if not name.startswith("recompute_")}
    settings = {"actor.dtype": config.actor.dtype, "actor.megatron": json.loads(json.dumps(options))}
    return {"model.path": str(hub or f"sha256 {content}"), **settings}


def _layout(config: DpoConfig) -> dict[str, Any]:
    sizes = {"devices": role_devices(config, "actor"), "max_tokens_per_device": config.actor.max_tokens_per_device}
    strategy = {"strategy": "fsdp"} if config.actor.strategy == "fsdp" else {}
    return asdict(config.actor.parallel) | sizes | strategy


def _changes(saved: dict[str, Any], current: dict[str, Any]) -> str:
    before = {"strategy": "megatron", **saved}
    return "; ".join(f"{key} was {before[key]}, now {value}" for key, value in current.items() if before[key] != value)


def num_groups(batch: DataProto) -> int:
    return len(_starts(batch))


def _starts(batch: DataProto) -> npt.NDArray[np.int64]:
    sizes = group_sizes(batch)
    assert sizes is not None, "ranked responses come in groups"
    return np.cumsum(sizes) - sizes


def _keys(batch: DataProto) -> list[str]:
    """Return a digest of the tokens of each group: its prompt and its responses."""
    prompts, responses = batch["prompts"].rows(), batch["responses"].rows()
    starts = _starts(batch).tolist()
    keys = []
    for begin, end in zip(starts, [*starts[1:], len(batch)], strict=True):
        parts = [prompts[begin], *responses[begin:end]]
        digest = hashlib.blake2b(np.asarray([len(part) for part in parts], "<i8").tobytes(), digest_size=16)
        digest.update(torch.cat(parts).numpy().astype("<i4").tobytes())
        keys.append(digest.hexdigest())
    return keys
