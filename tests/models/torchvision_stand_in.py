"""A stand-in for torchvision, which vLLM's Qwen3.5 imports for pictures that no test has.

CPU installations have no torchvision: its wheels are CUDA builds. Processes that vLLM starts find the stand-in by
`PYTHONPATH`.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

_FILES = ("", "io", "transforms", "transforms/functional", "transforms/v2", "transforms/v2/functional")
_ANY_NAME = """
class Names(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Names(name, (), {})


__version__, _names = "0.0.1", Names("torchvision", (), {})


def __getattr__(name):
    return getattr(_names, name)
"""


def provide(directory: Path, patch: pytest.MonkeyPatch) -> None:
    """Make `import torchvision` work here and in child processes, unless it is installed."""
    if importlib.util.find_spec("torchvision") is not None:
        return
    for file in _FILES:
        path = directory / "torchvision" / file / "__init__.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_ANY_NAME)
    patch.syspath_prepend(str(directory))
    patch.setenv("PYTHONPATH", os.pathsep.join([str(directory), *sys.path]))
