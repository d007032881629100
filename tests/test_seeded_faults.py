"""The seeded faults fit the current code, and the tests that must detect them exist."""

from __future__ import annotations

import tomllib

from benchmarks.seeded_faults import FAULTS, REPOSITORY, read_faults


def test_every_fault_fits_its_file_once_and_has_an_id_of_its_own() -> None:
    ids = [fault.id for fault in read_faults()]
    assert len(ids) == len(set(ids))


def test_what_is_to_notice_a_fault_is_there() -> None:
    named = tomllib.loads((FAULTS / "tests.toml").read_text())
    paths = [
        *named["deselected"],
        *(path for kind in ("quick", "slow") for paths in named[kind].values() for path in paths),
    ]
    assert [path for path in paths if not (REPOSITORY / path.partition("::")[0]).exists()] == []
