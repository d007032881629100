"""A role's checkpoint as a Hugging Face directory, from file to file: no Megatron, no GPU, and a tensor at a time."""

from __future__ import annotations

from pathlib import Path

import torch

from mrl.engine.checkpoint_files import SavedFiles
from mrl.models.families import read_spec
from mrl.models.hf_writer import HfWriter
from mrl.models.regions import whole
from mrl.models.table import Head, hf_tensors

_MAX_FILE_BYTES = 5 * 10**9


def export_checkpoint(saved: Path, source: Path, head: Head, dtype: torch.dtype, target: Path) -> int:
    """Write the weights in `saved`, with the tokenizer and settings of the model `source`; the number of tensors.

    The files' hashes are compared first. The directory appears when it is whole, or not at all.
    """
    spec = read_spec(source)
    files = SavedFiles(saved)
    files.check_manifest()
    shapes = hf_tensors(spec, head)
    files.check_model(shapes)
    files.check_files(0, 1)
    with HfWriter(target, spec, source, head, dtype, _MAX_FILE_BYTES) as writer:
        for name, shape in shapes.items():
            tensor = torch.empty(shape, dtype=torch.float32)  # what the optimizer keeps
            files.read(name, whole(shape), {"param": tensor})
            writer.write(name, tensor.to(dtype))
    return len(shapes)
