"""The table for CUDA: each branch has an entry, each entry has a branch, and each kind of entry can fail."""

from __future__ import annotations

import ast

import pytest

from tests.contracts.branches import MRL, cuda_branches, cuda_scopes
from tests.contracts.entry import Entry, Kind, resolve
from tests.contracts.stored import ENTRIES, REFRESH, Stored

LIBRARY = """
from enum import Enum
try:
    from fast import kernel
except ImportError:
    kernel = None

class Backend(Enum):
    TRITON = "triton"

class Config:
    fusion: bool = False
    def __init__(self, size, *, device, seed=1):
        self.size = size
    def process(self, layer):
        '''Packs.'''
        if is_cpu():
            pack(layer)
        elif is_xpu():
            layer.pack()
        return layer
"""
OUTLINE = "if is_cpu(): ...\nelif is_xpu(): ...\nreturn layer"
RIGHT_AND_WRONG: list[tuple[Kind, str, str, str, str]] = [
    ("name", "kernel", "", "Config.kernel", ""),
    ("signature", "Config", "size, *, device", "Config", "size"),  # device is also required
    ("signature", "Config.process", "layer", "Config.process", "layer, weights"),
    ("field", "Config.fusion", "bool", "Config.fusion", "int"),
    ("default", "Config.fusion", "False", "Config.fusion", "True"),
    ("default", "Config.__init__.seed", "1", "Config.__init__.device", "1"),
    ("member", "Backend.TRITON", "'triton'", "Backend.TRITON", "'TRITON'"),
    ("outline", "Config.process", OUTLINE, "Config.process", OUTLINE.replace("\nreturn layer", "")),
    ("statement", "Config.process", "layer.pack()", "Config.process", "layer.unpack()"),
]


@pytest.mark.parametrize(("kind", "name", "relied", "wrong_name", "wrong"), RIGHT_AND_WRONG)
def test_a_wrong_entry_of_each_kind_is_caught(kind: Kind, name: str, relied: str, wrong_name: str, wrong: str) -> None:
    right, other = (Entry("a.py:f", kind, "library.py", *pair) for pair in ((name, relied), (wrong_name, wrong)))
    assert right.complaint(right.look_up(LIBRARY)) == ""
    assert other.complaint(other.look_up(LIBRARY)).startswith("library.py")


def test_the_stored_copy_answers_every_question_as_mrl_relies_on_it() -> None:
    """Works without a package index. After adding or changing an entry, refresh the stored copy."""
    stored = Stored.read()
    assert [str(why) for entry in ENTRIES if (why := stored.complaint(entry))] == []


def test_the_stored_copy_has_nothing_that_nobody_asks() -> None:
    stored = Stored.read()
    for library in {entry.library for entry in ENTRIES} | stored.facts.keys():
        questions = {entry.question for entry in ENTRIES if entry.library == library}
        assert stored.facts[library].keys() == questions, f"{library}: {REFRESH}"


@pytest.mark.parametrize(
    "code", ["torch.cuda.synchronize()", "y = x.is_cuda", "y = x.type == 'cuda'", "torch.device('cuda', 1)", "is_cpu()"]
)
def test_a_branch_for_cuda_is_found_by_its_words(code: str) -> None:
    assert cuda_scopes(f"class A:\n    def f(self, x):\n        {code}") == {"A.f"}
    assert cuda_scopes("from torch.cuda import Stream\ndef f(x):\n    return 'cuda, among other things'") == set()


def test_every_branch_for_cuda_has_an_entry() -> None:
    assert sorted(cuda_branches() - {entry.branch for entry in ENTRIES}) == []


def test_every_entry_belongs_to_code_of_mrl() -> None:
    for entry in ENTRIES:
        file, _, name = entry.branch.partition(":")
        tree = ast.parse((MRL / file).read_text())
        assert name == "<module>" or resolve(tree, name.split(".")), f"mrl/{file} has no {name}"
