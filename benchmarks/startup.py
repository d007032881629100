"""Time from `mrl train` to the first sample and to the first optimizer step, by milestone.

    python benchmarks/startup.py

The demo's model is trained by PPO on two CPU slots: an actor of two ranks, a critic, and one vLLM engine. Times come
from the run's own events, counted from the start of the command; before the first event come the interpreter, the
configuration and its checks. There is no validation before the first step.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Benchmark, Timing, parser
from mrl.events import PhaseBegin, PhaseEnd, PoolReady, RunStarted, WorkersStarted, read_events

ROOT = Path(__file__).resolve().parent.parent
MAIN = "import sys; from mrl.cli.main import main; sys.exit(main())"
GOAL_S = 30.0
LIMIT_S = 300


def measure(directory: Path, config: Path, number: int) -> dict[str, float]:
    """Return the seconds from the command to each milestone of one run."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    overrides = [f"run.name=start-{number}", f"run.dir={directory}", "validation.every=0"]
    command = [sys.executable, "-c", MAIN, "train", str(config), *overrides]
    began = time.time()
    options = {"capture_output": True, "text": True, "cwd": ROOT, "timeout": LIMIT_S}
    result = subprocess.run(command, env=environment | {"PYTHONPATH": str(ROOT)}, **options)  # type: ignore[call-overload]
    if result.returncode:
        raise SystemExit(result.stdout + result.stderr)
    milestones: dict[str, float] = {}
    for record in read_events(directory / f"start-{number}" / "events.jsonl"):
        event, at = record.event, record.time - began
        match event:
            case RunStarted():
                milestones["to_run_s"] = at
            case PoolReady():
                milestones["to_ray_s"] = at
            case WorkersStarted():
                milestones[f"to_{event.role.partition('-')[0]}_s"] = at
            case PhaseEnd(phase="start"):
                milestones["to_team_s"] = at
            case PhaseBegin(phase="old_log_prob") if event.step == 1:
                milestones["to_first_samples_s"] = at
            case PhaseEnd(phase="update_actor") if event.step == 1:
                milestones["to_first_step_s"] = at
            case _:
                pass
    return milestones


def main() -> int:
    """Measure several runs of one step each."""
    options = parser("Time from the command to the first optimizer step.")
    options.set_defaults(repeats=3)
    arguments = options.parse_args()
    from mrl.demo.demo import DemoSettings, demo_yaml
    from mrl.demo.model import make_model

    bench = Benchmark("startup")
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        model, config = make_model(directory / "model", seed=1), directory / "demo.yaml"
        config.write_text(
            demo_yaml(DemoSettings(directory, steps=1), model, config).replace(
                "training: {", "training: {critic_warmup_steps: 0, "
            )
        )
        runs = [measure(directory, config, number) for number in range(arguments.repeats)]
    for milestone in sorted(runs[0], key=lambda name: runs[0][name]):
        timing = Timing(tuple(run[milestone] for run in runs))
        bench.row(milestone=milestone.removesuffix("_s"), seconds=timing.median_s, spread=timing.spread_s)
    steps = Timing(tuple(run["to_first_step_s"] for run in runs))
    bench.goal("seconds to the first optimizer step", steps.median_s, at_most=GOAL_S)
    return bench.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())
