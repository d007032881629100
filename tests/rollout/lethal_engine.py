"""An engine that certain prompts break."""

from __future__ import annotations

import os
import signal

from mrl.rollout.requests import Generated
from mrl.rollout.transformers_engine import TransformersEngine

DEADLY, BREAKING = "deadly", "breaking"


class LethalEngine(TransformersEngine):
    """Dies or raises in the middle of prompts with certain names."""

    def _step(self) -> list[Generated]:
        under_way = {row.request.prompt for row in self._rows.values() if len(row.token_ids) == 3}
        if DEADLY in under_way:
            os.kill(os.getpid(), signal.SIGKILL)
        if BREAKING in under_way:
            raise RuntimeError("the device is lost")
        return super()._step()
