"""Who sends a region to a worker: the worker's own rank, else a rank on its node, else any rank with a copy.

Ranks with a copy take turns. On one node they do so from each group of tensors to the next. Elsewhere each engine has
its own copy, so that a rank has few peers, each with its connection. If there are more copies than engines, an engine
goes round several of them, so that no copy is idle.

A receiver asks for its source, and a sender asks for its workers. Both answers follow from the same rule. A sender
looks only at the workers on its node, and elsewhere at every engine whose turn it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence


class Workers:
    """The workers of all engines, by their position in their engine and the node of their device."""

    def __init__(self, hosts: Sequence[int], nodes: Sequence[int], per_engine: int) -> None:
        self.hosts, self.nodes, self.per_engine = hosts, nodes, per_engine
        self.num_engines = len(hosts) // per_engine
        self._on_node: dict[tuple[int, int], list[int]] = defaultdict(list)
        for worker, host in enumerate(hosts):
            self._on_node[nodes[host], worker % per_engine].append(worker)

    def on_node(self, node: int, position: int) -> Sequence[int]:
        return self._on_node.get((node, position), ())

    def turn(self, position: int, number: int, num_copies: int) -> int:
        """Return the position of the copy, of those on other nodes, that the first engine's worker uses for this group
        of tensors. The next engine uses the next copy."""
        rounds = -(-num_copies // self.num_engines)
        return (position + self.num_engines * (number % rounds)) % num_copies


class Copies:
    """The ranks that hold a region."""

    def __init__(self, ranks: Iterable[int], workers: Workers) -> None:
        self._ranks, self._workers = tuple(ranks), workers
        self._position = {rank: position for position, rank in enumerate(self._ranks)}
        self._by_node: dict[int, list[int]] = defaultdict(list)
        for rank in self._ranks:
            self._by_node[workers.nodes[rank]].append(rank)

    def source(self, worker: int, number: int) -> int:
        """Return the rank that sends the region to a worker."""
        host = self._workers.hosts[worker]
        if host in self._position:
            return host
        engine, position = divmod(worker, self._workers.per_engine)
        if near := self._by_node.get(self._workers.nodes[host]):
            return near[(engine + position + number) % len(near)]
        return self._ranks[(engine + self._workers.turn(position, number, len(self._ranks))) % len(self._ranks)]

    def receivers(self, rank: int, position: int, number: int) -> Iterator[int]:
        """Yield the workers at this position, on other devices, to which a rank with a copy sends the region."""
        workers, nodes = self._workers, self._workers.nodes
        for worker in workers.on_node(nodes[rank], position):
            if workers.hosts[worker] != rank and self.source(worker, number) == rank:
                yield worker
        # Elsewhere it is this rank's turn for every engine at a distance of as many engines as there are copies.
        num_copies = len(self._ranks)
        first = (self._position[rank] - workers.turn(position, number, num_copies)) % num_copies
        for engine in range(first, workers.num_engines, num_copies):
            worker = engine * workers.per_engine + position
            if nodes[workers.hosts[worker]] not in self._by_node:
                yield worker
