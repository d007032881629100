"""One ending of each kind, drawn with a seed. `make sweep` runs all of them."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.endings.endings import ENDINGS, Ending, Workplace, complaints, identities, leftovers

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


def test_every_process_is_ended_in_every_phase() -> None:
    assert len(ENDINGS) == len(set(map(str, ENDINGS))) == 105


def test_the_witness_sees_what_stays(tmp_path: Path) -> None:
    (tmp_path / "token").touch()
    left = leftovers(set(identities({os.getpid()})), tmp_path, set(os.listdir("/dev/shm")))
    assert [line.split()[0] for line in left[:2]] == ["process", f"{tmp_path}/token"]
