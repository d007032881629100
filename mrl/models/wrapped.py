"""Where files of a model with vision keep the tensors of its language model, and what else they hold.

Tables name tensors as in a language model's own files. A model with vision has them below another prefix, and may stack
the experts of a layer: gates above ups of all experts in one tensor, downs in another.
"""

from __future__ import annotations

import re
from collections.abc import Container
from typing import NamedTuple

from mrl.models.regions import Region, Shape

_PREFIX, _WRAPPED_PREFIX = "model.", "model.language_model."
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_STACKED = re.compile(r".+\.experts\.(gate_up|down)_proj")


class Place(NamedTuple):
    """A tensor in the files: all of an entry, or one expert of a stacked one."""

    entry: str
    expert: int | None = None
    part: str = ""
    """Gate, up or down, of an expert."""

    def box(self, box: Region, entry_shape: Shape) -> Region:
        """Return the box of the entry that holds a box of the tensor."""
        if self.expert is None:
            return box
        (start, stop), columns = box
        first = entry_shape[1] // 2 if self.part == "up" else 0
        return ((self.expert, self.expert + 1), (first + start, first + stop), columns)

    def shape(self, entry_shape: Shape) -> Shape:
        """Return the shape of the tensor."""
        if self.expert is None:
            return entry_shape
        _, rows, columns = entry_shape
        return (rows if self.part == "down" else rows // 2, columns)


def own_name(entry: str) -> str:
    """Return the name of an entry as in a language model's own files."""
    return _PREFIX + entry.removeprefix(_WRAPPED_PREFIX) if entry.startswith(_WRAPPED_PREFIX) else entry


def is_stacked(name: str) -> bool:
    """Return whether an entry of this name holds all experts of a layer."""
    return _STACKED.fullmatch(name) is not None


def find(name: str, names: Container[str]) -> Place | None:
    """Return the place of a tensor among entries with these names, or None."""
    if name in names:
        return Place(name)
    if match := _EXPERT.fullmatch(name):
        experts, number, part = match.groups()
        stacked = f"{experts}.{'down' if part == 'down' else 'gate_up'}_proj"
        if stacked in names:
            return Place(stacked, int(number), part)
    return None
