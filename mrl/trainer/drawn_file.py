"""The batches that a checkpoint holds because they are drawn and not trained, as one file."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from mrl.errors import CheckpointError, WireError
from mrl.protocol.batch_file import batch_from_bytes, batch_to_bytes
from mrl.trainer.generation import ScoredBatch
from mrl.trainer.segments import segments_from_json, segments_to_json

_LENGTH = struct.Struct("<Q")


def drawn_to_bytes(drawn: Mapping[int, ScoredBatch], version: int) -> bytes:
    """Return the file's content, at this version of the weights; nothing where nothing is drawn."""
    parts = []
    for number, scored in drawn.items():
        batch = scored.batch
        if "other_segments" in batch.columns():
            batch = batch.with_column("other_segments", [segments_to_json(each) for each in batch["other_segments"]])
        data = batch_to_bytes(batch, {"number": number, "version": version, "metrics": scored.metrics})
        parts += [_LENGTH.pack(len(data)), data]
    return b"".join(parts)


def drawn_from_bytes(content: bytes) -> tuple[dict[int, ScoredBatch], int | None]:
    """Return the batches, and the version of the weights then; None where nothing was drawn.

    Versions are counted on from there: tokens that were drawn before stay as many updates old as they are.
    """
    drawn: dict[int, ScoredBatch] = {}
    version, at = None, 0
    try:
        while at < len(content):
            (size,) = _LENGTH.unpack_from(content, at)
            at += _LENGTH.size
            batch, told = batch_from_bytes(content[at : at + size])
            at += size
            if "other_segments" in batch.columns():
                segments = [segments_from_json(each) for each in batch["other_segments"]]
                batch = batch.with_column("other_segments", segments)
            version = int(told["version"])
            drawn[int(told["number"])] = ScoredBatch(batch, told["metrics"])
    except (struct.error, WireError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the batches that were drawn ahead cannot be read: {error}") from error
    return drawn, version
