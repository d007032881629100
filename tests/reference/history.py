"""Read the history of a finished run from its directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def history(run: Path) -> dict[str, Any]:
    """Return the metrics of each step, the saved steps, and the best checkpoint."""
    best = run / "checkpoints" / "best"
    return {
        "metrics": [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()],
        "saved": sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*")),
        "best": best.read_text() if best.exists() else None,
    }
