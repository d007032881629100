"""Stand-ins for two packages that SGLang imports and that exist only for CUDA, so that it runs on a CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NoReturn


class _Kernels(ModuleType):
    """A module whose functions raise an error when they are called. On a CPU nothing calls them."""

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*args: object, **options: object) -> NoReturn:
            raise NotImplementedError(f"{self.__name__}.{name} needs a GPU")

        return missing


def stand_in() -> None:
    kernels = _Kernels("sgl_kernel")
    kernels.__spec__, kernels.__path__ = ModuleSpec("sgl_kernel", None), []
    sys.modules["sgl_kernel"] = kernels
    # torchvision's wheel registers operators of its CUDA library, which a CPU build of torch cannot load
    registrations = "torchvision._meta_registrations"
    sys.modules[registrations] = ModuleType(registrations)
