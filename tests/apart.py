"""Run programs in a separate process, like a user does. The process of the tests may already run Ray."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mrl.observe.metrics import read_metrics, without_clock

ROOT = Path(__file__).resolve().parents[1]
MAIN = "import sys; from mrl.cli.main import main; sys.exit(main())"


def untimed(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run without the ones that measure time."""
    return [without_clock(line) for line in read_metrics(run / "metrics.jsonl")]


def run_mrl(*arguments: str, cwd: Path = ROOT, exit_code: int = 0, **variables: str) -> str:
    """Run `mrl ARGUMENTS` and return its output, plus its errors if it must fail."""
    return run_python("-c", MAIN, *arguments, cwd=cwd, exit_code=exit_code, **variables)


def run_python(*arguments: str, cwd: Path = ROOT, exit_code: int = 0, **variables: str) -> str:
    """Run Python without this process's Ray and return its output, plus its errors if it must fail."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    ran = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=cwd,
        env=environment | {"PYTHONPATH": str(ROOT)} | variables,
    )
    assert ran.returncode == exit_code, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr if exit_code else ran.stdout


@contextmanager
def retriever(corpus: Path, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start `mrl retriever` on this port, or on a free port for 0. Yield the process and its address."""
    command = [sys.executable, "-c", MAIN, "retriever", str(corpus), "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().split()[-1]
        finally:
            process.kill()
