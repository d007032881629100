"""One ending of each kind, drawn with a seed. `make sweep` runs all of them."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.endings.endings import ENDINGS, Ending, Workplace, complaints, identities, leftovers, with_shared_memory

SEED = int(os.environ.get("MRL_ENDINGS_SEED", "1"))
TARGETS = ("group", "supervisor", "raylet", "gcs_server")  # tests/controller kills the driver
DRAWN = [random.Random(SEED).choice([ending for ending in ENDINGS if ending.target == target]) for target in TARGETS]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return Workplace(tmp_path_factory.mktemp("endings"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "ending", [*DRAWN[:1], *(pytest.param(ending, marks=pytest.mark.on_demand) for ending in DRAWN[1:])], ids=str
)
def test_a_run_that_is_ended_leaves_nothing_and_goes_on(place: Workplace, ending: Ending) -> None:
    assert complaints(place, ending) == []


def test_the_witness_sees_what_stays(tmp_path: Path) -> None:
    (shared := tmp_path / "shared").mkdir()
    command = with_shared_memory(shared, [sys.executable, "-c", "open('/dev/shm/segment', 'w')"])
    subprocess.run(command, check=True)
    left = leftovers(set(identities({os.getpid()})), shared)
    assert [line.split()[0] for line in left] == ["process", f"{shared}/segment"]
    assert not Path("/dev/shm/segment").exists(), "the machine's own is left alone"
