"""Routes on their way from an engine to the trainer. They stay in the object store, and the driver has references."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from mrl.controller.transport import ColumnStore, bundle, fetch
from mrl.errors import RolloutError
from mrl.protocol import DataProto, RemoteColumn
from mrl.protocol.columns import jagged
from mrl.rollout.requests import Generated, Routes, StoredRoutes

ROUTES = "routes"
_FETCH_S = 600.0


def routes_of(stored: StoredRoutes) -> Routes:
    """Return stored routes, from this node's store or another one's."""
    column = column_of([stored])
    routes: Routes = fetch(DataProto({ROUTES: column}, np.zeros(1, np.int64), {}), _FETCH_S)[ROUTES].values.numpy()
    return routes


def take_out(samples: Sequence[Generated], earlier: Mapping[str, Routes]) -> tuple[list[Generated], ColumnStore | None]:
    """Return the samples without their routes, and the routes as one stored part.

    Tokens of earlier turns keep the routes that drew their next token.
    """
    if not samples:
        return [], None
    routes = []
    for sample in samples:
        if sample.routes is None:
            raise RolloutError("the engine returned no routes", where=sample.key)
        before = earlier.get(sample.key, sample.routes[:0])
        routes.append(torch.from_numpy(np.concatenate([before, sample.routes[len(before) :]])))
    column = jagged(torch.cat(routes), [len(of_sample) for of_sample in routes])
    return [replace(sample, routes=None) for sample in samples], bundle({ROUTES: column})


def with_stored(samples: Sequence[Generated], part: object, lengths: Sequence[int]) -> list[Generated]:
    """Return the samples with references to their routes, which are the rows of the part."""
    return [
        replace(sample, stored_routes=StoredRoutes(part, row, len(samples), length))
        for row, (sample, length) in enumerate(zip(samples, lengths, strict=True))
    ]


def column_of(stored: Sequence[StoredRoutes]) -> RemoteColumn:
    """Return the column of these samples' routes."""
    parts: dict[object, int] = {}
    sizes = {routes.part: routes.num_rows for routes in stored}
    part_of_row = [parts.setdefault(routes.part, len(parts)) for routes in stored]
    return RemoteColumn(
        tuple(parts),
        tuple(sizes[part] for part in parts),
        np.array(part_of_row, np.int32),
        np.array([routes.row for routes in stored], np.int32),
        np.array([routes.length for routes in stored], np.int32),
    )
