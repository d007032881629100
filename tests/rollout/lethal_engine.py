"""An engine that one prompt kills."""

from __future__ import annotations

import os
import signal

from mrl.rollout.requests import Generated
from mrl.rollout.transformers_engine import TransformersEngine

POISON = "poison"


class LethalEngine(TransformersEngine):
    """Dies in the middle of a prompt of that name."""

    def _step(self) -> list[Generated]:
        if any(row.request.prompt == POISON and len(row.token_ids) == 3 for row in self._rows.values()):
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._step()


class BrokenEngine(TransformersEngine):
    """Raises in the middle of its first prompt, and in every new process again."""

    def _step(self) -> list[Generated]:
        raise RuntimeError("the device is lost")
