"""An engine whose second replica dies once, while it generates for the second step."""

from __future__ import annotations

import os
import signal

from mrl.rollout.requests import Generated
from mrl.rollout.transformers_engine import TransformersEngine


class DyingEngine(TransformersEngine):
    def _step(self) -> list[Generated]:
        died = self.settings.sockets.parent / "died"
        if self.settings.replica == "rollout-1" and self.weight_version == 2 and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._step()
