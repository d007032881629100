"""Separate environments for the peers under `.venv-peers/`, created when first needed.

    python benchmarks/peer_environments.py        # creates all of them: several minutes, and 4 GB

If the environment of a peer cannot be created, its benchmark says why, and skips the comparison.
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
    """Environment of one peer."""

    name: str
    module: str
    """Module that can be imported when the environment is complete."""
    without_needs: tuple[str, ...]
    """Packages installed without their dependencies, which are either listed here or not used."""
    needs: tuple[str, ...]

    @property
    def python(self) -> Path:
        """Path of the environment's interpreter."""
        return FOLDER / self.name / "bin" / "python"

    def install(self) -> str:
        """Create the environment unless it exists. Return the error, or an empty text."""
        if self.python.exists() and not self.run(RUN_TIMEOUT_S, "-c", f"import {self.module}"):
            return ""
        print(f"creating an environment for {self.name}: this takes some minutes, once", flush=True)
        venv.create(FOLDER / self.name, with_pip=True)
        package_lists = [("--no-deps", *self.without_needs)] * bool(self.without_needs) + [self.needs]
        for requirements in package_lists:
            if failed := self.run(INSTALL_TIMEOUT_S, *PIP, *requirements):
                return f"{self.name} cannot be installed: {failed}"
        return ""

    def run(self, timeout_s: int, *arguments: str) -> str:
        """Run the environment's interpreter. Return the last line of the error, or an empty text."""
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {"TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        try:
            result = subprocess.run(
                [str(self.python), *arguments],
                env=environment,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        return "" if result.returncode == 0 else (result.stderr.strip().splitlines() or ["no output"])[-1]


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
    """Create all environments."""
    failures = [error for error in (environment.install() for environment in ALL) if error]
    print("\n".join(failures or ["all peers are installed"]))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
