"""What the directory of a run says once it has ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def history(run: Path) -> dict[str, Any]:
    """What a run's directory says: its figures by step, the steps that were saved, and which is the best."""
    best = run / "checkpoints" / "best"
    return {
        "metrics": [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()],
        "saved": sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*")),
        "best": best.read_text() if best.exists() else None,
    }
