"""The scripts in `launch/examples`, made by what `mrl launch` calls: `python -m tests.launch.examples` writes them.

They are those of a user in `/shared/mrl`, whose reward function lies there, with the cluster file of `launch/`.
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import chdir
from pathlib import Path
from unittest.mock import patch

from mrl.config.resolved.load import Resolved, load_config
from mrl.config.schema import Config
from mrl.launch.ray_job import make_job, pack, submit_command, submit_script
from mrl.launch.slurm import SlurmJob, load_slurm_site, render_script

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "launch" / "examples"
HOME = Path("/shared/mrl")
PRESET = "ppo-llama3.1-70b-8n8g"
ABSOLUTE = (
    f"run.dir={HOME}/runs",
    f"data.train.math.dataset={HOME}/data/math/train-*.parquet",
    f"data.train.code.dataset={HOME}/data/code/train.jsonl",
    f"data.validation.math.dataset={HOME}/data/math/test.parquet",
)
"""A Ray job runs in a directory of Ray's own; on Slurm the preset's relative paths are those of `HOME`."""


def rendered() -> dict[str, str]:
    """Name of the file -> what it holds."""
    return {f"{PRESET}.sbatch": slurm_script(), f"{PRESET}-ray-job.sh": ray_script()}


def slurm_script() -> str:
    """`mrl launch slurm configs/PRESET.yaml --cluster launch/cluster-example.yaml`."""
    resolved = _preset()
    files = HOME / "runs" / f"{resolved.config.run.name}.launch"
    site = load_slurm_site(str(ROOT / "launch" / "cluster-example.yaml"))
    return render_script(SlurmJob(resolved.config, site, files, HOME, "train", pack(resolved, ())[1]))


def ray_script() -> str:
    """`mrl launch ray configs/PRESET.yaml ABSOLUTE --address http://127.0.0.1:8265 --no-wait --dry-run`."""
    resolved = _preset(*ABSOLUTE)
    python = patch.object(sys, "executable", str(HOME / ".venv/bin/python"))
    with tempfile.TemporaryDirectory() as here, chdir(here), patch.dict(os.environ, RAY_AUTH_MODE="token"), python:
        Path("my_rewards.py").touch()
        job = make_job(resolved, ABSOLUTE, ())
        command = submit_command("http://127.0.0.1:8265", Path("DIRECTORY"), "train", wait=False)
        return submit_script(job, command)


def _preset(*overrides: str) -> Resolved[Config]:
    return load_config(str(ROOT / "configs" / f"{PRESET}.yaml"), overrides)


if __name__ == "__main__":
    EXAMPLES.mkdir(exist_ok=True)
    for name, text in rendered().items():
        (EXAMPLES / name).write_text(text, encoding="utf-8")
