"""The benchmark for GPUs runs dry on the CPU: every part that can does its work, and what cannot says why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = {"parity", "head", "copies", "training", "sharing", "run"}


@pytest.mark.slow
def test_a_dry_run_meets_its_goals_and_names_what_it_leaves_out(tmp_path: Path) -> None:
    result = tmp_path / "gpu.json"
    command = [sys.executable, "benchmarks/gpu.py", "--json", str(result)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=540)
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads(result.read_text())
    rows = report["rows"]
    assert {row["part"] for row in rows if row["what"] == "all of it"} == PARTS
    assert {row["part"]: row["skipped"] for row in rows if "skipped" in row} == {
        "copies": "there is no CUDA to pin memory with",
        "training": "Transformer Engine is not here",
    }
    assert [row["what"] for row in rows if row["part"] == "run"][:-1] == ["step 1", "step 2", "step 3"]
    assert all(row["actor/rollout_diff"] < 1e-4 for row in rows if "actor/rollout_diff" in row)
    goals = {goal["name"]: goal["value"] for goal in report["goals"]}
    assert goals["pieces that arrived otherwise"] == 0
    assert goals["losses beside those of an undisturbed trainer"] == 0


def test_a_part_that_fails_is_a_goal_missed_and_the_next_one_begins(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom benchmarks import gpu\n"
        "def fail(bench, directory): raise ValueError('no such kernel')\n"
        "gpu.PARTS['parity'] = fail\n"
        "sys.argv = ['gpu.py', '--parts', 'parity,copies']\nsys.exit(gpu.main())"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 1
    assert "no such kernel" in run.stderr
    assert "MISSED  parity: errors" in run.stdout
    assert "met     bytes that came back otherwise" in run.stdout
