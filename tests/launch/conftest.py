"""A directory with a cluster file, a run of two nodes, and a Slurm that starts processes of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAKE = Path(__file__).with_name("fake_slurm.py")
MAIN = "import sys; from mrl.cli.main import main; sys.exit(main())"
CLUSTER = f"""\
time: "1:00:00"
cpus_per_node: 2
python: {sys.executable}
network_interface: lo
join_limit_s: 120
environment: {{OMP_NUM_THREADS: "1", PYTHONPATH: {ROOT}}}
"""
RUN = f"""\
extends: {ROOT}/configs/laptop-ppo.yaml
run: {{name: two}}
cluster: {{nodes: 2, devices_per_node: 1, ray_address: auto}}
placement: {{pools: {{laptop: 2}}}}
actor: {{parallel: {{tp: 1}}}}
critic: {{parallel: {{tp: 1}}}}
"""


@dataclass(frozen=True)
class Place:
    """Where a test launches from."""

    directory: Path
    environment: dict[str, str]

    def mrl(self, *arguments: str, code: int = 0) -> str:
        """Run `mrl` in this directory, and return its output."""
        command = [sys.executable, "-c", MAIN, *arguments]
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=300, cwd=self.directory, env=self.environment
        )
        assert ran.returncode == code, ran.stdout + ran.stderr
        return ran.stdout + ran.stderr

    def job(self, number: int = 1) -> Path:
        """The fake Slurm's state of a job."""
        return self.directory / "slurm" / f"job-{number}"

    def wait_for(self, path: Path, limit_s: float, job: int = 1) -> None:
        """Return when a file is there; it will not come any more once the job has ended."""
        deadline = time.monotonic() + limit_s
        while not path.exists():
            is_over = (self.job(job) / "gone").exists() and not path.exists()
            assert time.monotonic() < deadline, f"{path} does not exist: {self.words()}"
            assert not is_over, f"the job ended without {path}: {self.words()}"
            time.sleep(0.1)

    def words(self) -> str:
        """Return the text of all logs."""
        logs = [*self.directory.rglob("*.log"), *self.directory.rglob("stderr")]
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')}" for log in sorted(logs))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    (tmp_path / "run.yaml").write_text(RUN)
    subprocess.run([sys.executable, str(FAKE), "install", str(tmp_path / "bin")], check=True)
    (tmp_path / "slurm").mkdir()
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SLURM"))}
    own = {
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "FAKE_SLURM": str(tmp_path / "slurm"),
        "OMP_NUM_THREADS": "1",
    }
    found = Place(tmp_path, plain | own)
    yield found
    for job in (tmp_path / "slurm").glob("job-*"):
        number = int(job.name.removeprefix("job-"))
        found.wait_for(job / "gone", 120, number)  # nothing is left behind
