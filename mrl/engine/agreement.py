"""A failure of one rank is everybody's: no rank waits for one that has given up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from mrl.errors import EngineError, MrlError


@contextmanager
def raise_on_all_ranks(what: str) -> Iterator[None]:
    """The block succeeds on all ranks, or raises on all of them. The ranks do not talk to each other inside it."""
    error: MrlError | OSError | None = None
    try:
        yield
    except (MrlError, OSError) as raised:
        error = raised
    said: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(said, None if error is None else str(error))
    if error is not None:
        raise error
    if failed := [f"rank {rank}: {message}" for rank, message in enumerate(said) if message is not None]:
        raise EngineError(f"{what} failed on {len(failed)} of {len(said)} ranks; {failed[0]}")
