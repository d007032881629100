"""The scripts in `launch/examples`, made by what `mrl launch` calls: `python -m tests.launch.examples` writes them.

They are those of a user in `/shared/mrl`, whose reward function lies there, with the cluster file of `launch/`.
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from mrl.config.resolved.load import VERBS, Resolved, load_any_config, load_config
from mrl.config.schema import Config
from mrl.launch.kubernetes import KubernetesJob, load_kubernetes_site, render_manifest
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
    return {
        f"{PRESET}.sbatch": slurm_script(),
        f"{PRESET}-ray-job.sh": ray_script(),
        f"{PRESET}-k8s.yaml": kubernetes_manifest(),
    }


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


def kubernetes_manifest(preset: str = PRESET, kuberay: str = "1.6", *, is_package: bool = False) -> str:
    """`mrl launch k8s configs/PRESET.yaml ABSOLUTE --cluster launch/kubernetes-example.yaml --dry-run`."""
    file = str(ROOT / "launch" / "kubernetes-example.yaml")
    site = replace(load_kubernetes_site(file), kuberay=kuberay)
    with tempfile.TemporaryDirectory() as here, chdir(here):
        code = Path("my_rewards/__init__.py" if is_package else "my_rewards.py")
        code.parent.mkdir(exist_ok=True)
        code.write_text("def score(sample):\n    return 0.0\n")
        resolved = load_any_config(str(ROOT / "configs" / f"{preset}.yaml"), overrides := _absolute(preset))
        job = make_job(resolved, overrides, (), has_token=True)
        return render_manifest(KubernetesJob(resolved.config, site, job, VERBS[type(resolved.config)]), file)


def _absolute(preset: str) -> list[str]:
    """Return overrides with absolute paths for all of a preset's."""
    if preset == PRESET:
        return [*ABSOLUTE]
    resolved = load_any_config(str(ROOT / "configs" / f"{preset}.yaml"))
    sources = {"train": resolved.config.data.train, "validation": resolved.config.data.validation}
    names = (f"{part}.{name}" for part, entries in sources.items() for name in entries)
    return [f"run.dir={HOME}/runs", *(f"data.{name}.dataset={HOME}/data.jsonl" for name in names)]


def _preset(*overrides: str) -> Resolved[Config]:
    return load_config(str(ROOT / "configs" / f"{PRESET}.yaml"), overrides)


if __name__ == "__main__":
    EXAMPLES.mkdir(exist_ok=True)
    for name, text in rendered().items():
        (EXAMPLES / name).write_text(text, encoding="utf-8")
