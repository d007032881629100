"""The packages of requirements-cuda.txt, read from the package index without installing or importing them.

If the index does not answer, the stored copy is used, which must have every fact. No test is skipped.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from typing import TypeVar

import pytest

from tests.config.test_fields import FEWEST_FIELDS, TARGETS, undecided
from tests.contracts.index import IndexSilent, url_of
from tests.contracts.refresh import asked, look_up, plain, read_extension, read_fields, resolve
from tests.contracts.stored import CUDA_PINS, ENTRIES, PINS, REFRESH, ROOT, Stored

pytestmark = [pytest.mark.slow, pytest.mark.on_demand]
T = TypeVar("T")


def fresh_or_stored(look: Callable[[], T], stored: T) -> T:
    """Return the index's answer, which must equal the stored one, or the stored one if the index does not answer."""
    try:
        fresh = look()
    except IndexSilent as silent:
        print(f"the stored copy is used: {silent}", file=sys.stderr)
        return stored
    assert fresh == stored, f"the stored copy is out of date: {REFRESH}"
    return fresh


@pytest.mark.parametrize("library", sorted({entry.library for entry in ENTRIES}))
def test_a_library_is_what_mrl_relies_on(library: str) -> None:
    stored = Stored.read()
    stored.facts[library] = fresh_or_stored(lambda: look_up(library), stored.facts[library])
    complaints = [why for entry in ENTRIES if entry.library == library and (why := stored.complaint(entry))]
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize("section", TARGETS)
def test_every_field_of_a_class_is_taken_set_or_refused(section: str) -> None:
    """Check the versions for GPUs, which are not installed where the other tests run."""
    fields = fresh_or_stored(lambda: read_fields(section), Stored.read().fields[section])
    assert len(fields) >= FEWEST_FIELDS[section]
    assert not undecided(TARGETS[section], fields)


def test_the_installer_speaks_to_the_extension_in_its_own_words() -> None:
    stored = Stored.read()
    known, _ = fresh_or_stored(read_extension, (stored.extension_words, stored.extension_requires))
    used = set(re.findall(r"NVTE_\w+", (ROOT / "launch/install.py").read_text()))
    assert used
    assert used <= {*known}


def test_the_requirements_are_all_that_pip_would_install() -> None:
    """The requirements of `pyproject.toml` and of Transformer Engine's extension are included."""
    stored = Stored.read()
    requirements = asked(stored.extension_requires)
    assert requirements == stored.asked, f"the stored copy was asked for something else: {REFRESH}"
    resolved = fresh_or_stored(lambda: resolve(requirements), stored.resolved)
    assert resolved == {plain(name): version for name, version in CUDA_PINS.items()}


def test_an_index_that_does_not_answer_is_no_reason_to_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = subprocess.CompletedProcess([], 1, stdout="", stderr="ERROR: no route")
    monkeypatch.setattr("subprocess.run", lambda *_, **__: refused)
    with pytest.raises(IndexSilent, match="no route"):
        url_of("torch", PINS["torch"])
    assert fresh_or_stored(lambda: look_up("torch"), {"name a": "there"}) == {"name a": "there"}


def test_a_stored_copy_that_is_out_of_date_fails() -> None:
    with pytest.raises(AssertionError, match="out of date"):
        fresh_or_stored(lambda: {"name a": "there"}, {"name a": None})
