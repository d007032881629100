"""These tensors have a few dozen entries: threads only cost time."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    import torch  # seconds, which a process that only hands tests out need not spend

    torch.set_num_threads(1)
