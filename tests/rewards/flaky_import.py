"""A module whose import ends the process in the attempts listed in MRL_FLAKY. The file MRL_TRIES counts attempts."""

from __future__ import annotations

import os
import time
from pathlib import Path

from mrl.rewards.sample import Sample

time.sleep(float(os.environ["MRL_IMPORT_S"]))
_tries = Path(os.environ["MRL_TRIES"])
_tries.write_text(_tries.read_text() + "x")
if str(len(_tries.read_text())) in os.environ["MRL_FLAKY"].split(","):
    os._exit(9)


def score(sample: Sample) -> float:
    """Return 1, or end the process if the sample says so."""
    if sample.extra_info["do"] == "leave":
        os._exit(3)
    return 1.0
