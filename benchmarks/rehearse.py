"""The plan's memory next to the rehearsal's: every role of every preset for GPUs, and a mixture of 671B on 512.

A rehearsal runs the real training code of a rank at full size without a GPU. Each row is a role: its kinds of ranks,
the seconds of their rehearsals on one core each, the fullest phase, and the phase that differs most from the plan. The
plan's items without a tensor are not compared: the process itself, and blocks that the allocator cannot use.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Benchmark, parser
from mrl.plan.assumptions import GIB
from tests.rehearse import large_mixture
from tests.rehearse.held import CONFIGS, PRESETS, Held, held, roles_of


def row(preset: str, role: str, ranks: Sequence[Held]) -> dict[str, Any]:
    fullest = max((rank.fullest for rank in ranks), key=lambda phase: phase.memory.peak)
    furthest = max((rank.furthest for rank in ranks), key=lambda phase: abs(phase.difference))
    return {
        "preset": preset,
        "role": role,
        "kinds": len(ranks),
        "seconds": round(sum(rank.seconds for rank in ranks)),
        "fullest": fullest.memory.name,
        "peak_gib": fullest.memory.peak / GIB,
        "plan_gib": (fullest.planned or 0) / GIB,
        "differs_most": furthest.memory.name,
        "difference_gib": furthest.difference / GIB,
        "of_plan": furthest.difference / (furthest.planned or 1),
    }


def main() -> int:
    options = parser("Hold the plan's memory against the rehearsal.")
    options.add_argument("--only", nargs="+", metavar="PRESET", help="only these presets")
    arguments = options.parse_args()
    bench = Benchmark("rehearse")
    wrong = 0
    with tempfile.TemporaryDirectory() as directory:
        paths = [CONFIGS / f"{preset}.yaml" for preset in PRESETS]
        paths.append(large_mixture.write(Path(directory), CONFIGS / "base" / "grpo-large.yaml"))
        for path in paths:
            if arguments.only and path.stem not in arguments.only:
                continue
            for role in roles_of(path):
                ranks = held(path, role)
                wrong += sum(len(rank.differences()) for rank in ranks)
                bench.row(**row(path.stem, role, ranks))
                print(path.stem, role, *(line for rank in ranks for line in rank.differences()), flush=True)
    bench.goal("phases that differ from the plan by more than 3 % and more than 0.3 GiB", wrong, at_most=0)
    return bench.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())
