"""What ours is compared with, each in an environment of its own under `.venv-peers/`, made when it is first needed.

    python benchmarks/peer_environments.py        # makes all of them: several minutes, and 4 GB

A peer whose environment cannot be made is not compared, and its benchmark says why.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / ".venv-peers"
INSTALL_TIMEOUT_S = 1800
RUN_TIMEOUT_S = 600
PIP = ("-m", "pip", "install", "-q")


@dataclass(frozen=True)
class PeerEnvironment:
    """One environment."""

    name: str
    module: str
    """What can be imported when it is complete."""
    without_needs: tuple[str, ...]
    """Installed as they are: what they need beside what is named here, nothing here uses."""
    needs: tuple[str, ...]

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return FOLDER / self.name / "bin" / "python"

    def install(self) -> str:
        """Make it where there is none; why that failed, or nothing."""
        if self.python.exists() and not self.run(RUN_TIMEOUT_S, "-c", f"import {self.module}"):
            return ""
        print(f"making an environment for {self.name}: some minutes, once", flush=True)
        venv.create(FOLDER / self.name, with_pip=True)
        wanted = [("--no-deps", *self.without_needs)] * bool(self.without_needs) + [self.needs]
        for requirements in wanted:
            if failed := self.run(INSTALL_TIMEOUT_S, *PIP, *requirements):
                return f"{self.name} cannot be installed: {failed}"
        return ""

    def run(self, timeout_s: int, *arguments: str) -> str:
        """Run its interpreter; the last line of what went wrong, or nothing."""
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {"TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        try:
            done = subprocess.run(
                [str(self.python), *arguments],
                env=environment,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no output"])[-1]


VERL = PeerEnvironment(
    "verl",
    "verl",
    ("verl==0.9.1",),
    (
        *("torch==2.13.0", "numpy<2.4", "tensordict<=0.10", "omegaconf", "hydra-core", "transformers==5.10.0"),
        *("ray", "codetiming", "packaging", "pandas"),
    ),
)
TRL = PeerEnvironment(
    "trl", "trl", ("trl==1.16.0",), ("torch==2.13.0", "numpy<2.4", "transformers", "accelerate", "datasets")
)
TRANSFER_QUEUE = PeerEnvironment(
    "transferqueue",
    "transfer_queue",
    (),
    ("torch==2.13.0", "ray[default]==2.55.1", "tensordict==0.15.3", "TransferQueue==0.1.11"),
)
ALL = (VERL, TRL, TRANSFER_QUEUE)


def main() -> int:
    """Make all."""
    failures = [why for why in (environment.install() for environment in ALL) if why]
    print("\n".join(failures or ["all peers are there"]))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
