"""The benchmark over limited links counts their traffic, and both of its methods deliver every weight."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks.reshard import make_model
from benchmarks.reshard_hosts import crossings, rows_of, stream, world
from benchmarks.reshard_hosts_ranks import INTERFACE, WAYS
from mrl.models.families import read_spec
from mrl.models.table import hf_tensors
from tests.hosts.hosts import hosts, why_not

RATE = 100


@pytest.mark.slow
def test_ways_over_a_limited_link(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    model = make_model("dense", tmp_path)
    with hosts([INTERFACE] * 2) as both:
        for host in both:
            host.limit(RATE)
        assert 1 < stream(both, RATE)["over_limit"] < 1.3
        with world(both, "pp2 -> tp2", model, num_versions=2) as ranks:
            taken = [crossings(ranks, 1) for _ in range(2)][1]
            assert ranks.tell("wrong") == [[]] * 4
    num_bytes = sum(2 * math.prod(shape) for shape in hf_tensors(read_spec(str(model)), "lm").values())
    ours, gather, gather_once = rows_of("pp2 -> tp2", RATE, taken)
    assert [row["way"] for row in (ours, gather, gather_once)] == list(WAYS)
    for row, copies in ((ours, 1), (gather, 2), (gather_once, 1)):
        assert copies * num_bytes < row["bytes"] < 1.1 * copies * num_bytes
        assert row["over_limit"] > 1, "no method is faster than the link"
