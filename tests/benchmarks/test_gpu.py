"""The benchmark for GPUs runs dry on the CPU: each part does its work or reports why it cannot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_session import GpuBenchmark

ROOT = Path(__file__).parents[2]
PARTS = ["kernels", "head", "copies", "parity", "sharing", "memory", "rounding", "training", "run"]
REPLACED = """
import os, sys
from benchmarks import gpu
def replaced(bench, directory): {body}
gpu.PARTS['parity'] = replaced
sys.argv = ['gpu.py', *sys.argv[1:]]
sys.exit(gpu.main())
"""


def run_replaced(body: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the benchmark with another body of one part."""
    command = [sys.executable, "-c", REPLACED.format(body=body), "--dry", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
@pytest.mark.on_demand
def test_a_dry_run_meets_its_goals_and_names_what_it_leaves_out(tmp_path: Path) -> None:
    result = tmp_path / "gpu.json"
    command = [sys.executable, "benchmarks/gpu.py", "--dry", "--json", str(result)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580)
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads(result.read_text())
    rows = report["rows"]
    assert [row["part"] for row in rows if row["what"] == "all of it"] == PARTS
    assert {row["part"]: row["skipped"] for row in rows if "skipped" in row} == {
        "copies": "there is no CUDA to pin memory with",
        "memory": "a CPU's allocator does not report its peak",
        "training": "Transformer Engine is not here",
    }
    assert {row["kernels"] for row in rows if "tokens_per_s" in row} == {"plain", "swiglu"}
    run = [row["what"] for row in rows if row["part"] == "run"][:-1]
    assert run == [*(f"step {step}, plain launches" for step in (1, 2, 3)), "the whole run, plain launches"]
    assert all(row["actor/rollout_diff"] < 1e-4 for row in rows if "actor/rollout_diff" in row)
    goals = {goal["name"]: goal["value"] for goal in report["goals"]}
    assert goals["pieces that arrived otherwise"] == 0
    assert goals["losses beside those of an undisturbed trainer"] == 0


def test_a_part_that_fails_is_a_row_and_the_next_one_begins(tmp_path: Path) -> None:
    run = run_replaced("raise ValueError('no such kernel')", "--parts", "parity,copies")
    assert run.returncode == 1
    assert "no such kernel" in run.stderr
    assert "part=parity  what=the whole part  error=ValueError: no such kernel" in run.stdout
    assert "MISSED  parity: errors" in run.stdout
    assert "met     bytes that came back otherwise" in run.stdout


def test_a_machine_that_goes_away_leaves_what_was_found(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    run = run_replaced("os._exit(9)", "--parts", "copies,parity", "--json", str(file))
    assert run.returncode == 9
    assert "part=copies  what=digests" in run.stdout
    rows = json.loads(file.read_text())["rows"]
    assert rows[-1]["what"] == "all of it"


@pytest.mark.slow
def test_a_part_that_would_not_end_in_time_is_skipped() -> None:
    run = run_replaced("bench.row(what='reached')", "--parts", "parity", "--limit-s", "3")
    assert run.returncode == 0
    assert "what=the whole part  skipped=it takes about 5 s, and 3 s are left of 3" in run.stdout
    assert "reached" not in run.stdout


@pytest.mark.slow
def test_a_part_that_hangs_is_ended_with_the_place_where_it_hangs() -> None:
    hangs = "__import__('time').sleep(60)"
    code = f"from benchmarks import gpu_session; gpu_session._GRACE_S = 0.5\n{REPLACED.format(body=hangs)}"
    command = [sys.executable, "-c", code, "--dry", "--parts", "parity", "--limit-s", "6"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 1
    assert "in replaced" in run.stderr


def test_errors_of_pieces_are_reported_and_the_rest_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    bench = GpuBenchmark(None, 100.0)
    bench.part = "training"
    for model in ("small", "large"):
        with bench.attempt(model):
            if model == "small":
                raise MemoryError("40 GB\nwanted")
            bench.row(what=model, tokens_per_s=1)
    assert bench.rows == [
        {"part": "training", "what": "small", "error": "MemoryError: wanted"},
        {"part": "training", "what": "large", "tokens_per_s": 1},
    ]
    assert [goal["name"] for goal in bench.goals] == ["training, small: errors"]


def test_only_runs_the_chosen_pieces_and_leaves_no_row_of_the_others() -> None:
    bench = GpuBenchmark(None, 100.0, "nothing|fused")
    pieces = ("recomputing nothing", "recomputing all", "Qwen2.5-0.5B, fused")
    assert [piece for piece in pieces if bench.has_time(1.0, piece)] == ["recomputing nothing", "Qwen2.5-0.5B, fused"]
    assert bench.rows == []
