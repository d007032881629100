"""Places of experts inside tensors that hold all experts of a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mrl.models.regions import Region, Shape

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """A matrix or vector of one expert, in a tensor [experts, ..., rows] with transposed matrices.

    The rows of several such parts may alternate: this one has each `step`-th row, from `first`.
    """

    file: str
    """Name of the tensor in the files."""
    expert: int
    first: int = 0
    step: int = 1

    def file_shape(self, num_experts: int, shape: Shape) -> Shape:
        """Return the shape of the file's tensor, from that of the part."""
        rows, *rest = shape
        return (num_experts, *reversed(rest), rows * self.step)

    def shape(self, file_shape: Shape) -> Shape:
        """Return the shape of the part, from that of the file's tensor."""
        _, *rest, rows = file_shape
        return (rows // self.step, *reversed(rest))

    def box(self, box: Region) -> Region:
        """Return the box of the file's tensor around a box of the part."""
        (start, stop), *rest = box
        return ((self.expert, self.expert + 1), *reversed(rest), (start * self.step, stop * self.step))

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part, or a box of it, as a view of the file's tensor or of the box around it."""
        own = tensor[self.expert if len(tensor) > 1 else 0]
        return own[..., self.first :: self.step].movedim(-1, 0)


def as_in_files(
    tensors: Mapping[str, torch.Tensor], stored: Callable[[str], ExpertPart | None], num_experts: int
) -> dict[str, torch.Tensor]:
    """Return tensors as the files hold them, from all parts of all experts."""
    made: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        part = stored(name)
        if part is None:
            made[name] = tensor
            continue
        if part.file not in made:
            made[part.file] = tensor.new_empty(part.file_shape(num_experts, tuple(tensor.shape)))
        part.view(made[part.file]).copy_(tensor)
    return made
