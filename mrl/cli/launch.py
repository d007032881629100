"""`mrl launch slurm|ray CONFIG`: start a run on a cluster."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mrl import files
from mrl.cli.arguments import add_config, load_one, split_arguments, warn_unchecked
from mrl.cli.explain import explain
from mrl.config.resolved.load import VERBS, Resolved
from mrl.errors import SetupError
from mrl.launch.ray_job import RayJob, make_job, pack, submit_command, submit_script, write_job_directory
from mrl.launch.slurm import CONFIG, SCRIPT, SlurmJob, job_files, load_slurm_site, render_script
from mrl.preflight.findings import check_planned_memory, refuse

EXAMPLE = "mrl launch slurm configs/ppo-llama3.1-70b-8n8g.yaml --cluster launch/cluster-example.yaml --dry-run"
SUBVERBS = ("slurm", "ray")
_SBATCH_LIMIT_S = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_subparsers(dest="where", required=True, metavar="slurm | ray")
    slurm = where.add_parser("slurm", help="write a batch script, and submit it")
    slurm.add_argument(
        "--cluster", default="cluster.yaml", metavar="FILE", help="description of the site (default cluster.yaml)"
    )
    slurm.add_argument("--submit", action="store_true", help="submit it with sbatch")
    ray = where.add_parser("ray", help="submit a job to a running Ray cluster")
    ray.add_argument("--address", required=True, help="address of its dashboard (http://127.0.0.1:8265)")
    ray.add_argument("--ship", action="append", default=[], metavar="PATH", help="ship more of your own code")
    ray.add_argument("--no-wait", action="store_true", help="exit once the job is submitted")
    for parser in (slurm, ray):
        verbs = ("train", "check")
        parser.add_argument("--verb", choices=verbs, default="train", help="check: only check all nodes")
        add_config(parser)
        parser.add_argument("--dry-run", action="store_true", help="print everything, but write and start nothing")


def run(arguments: argparse.Namespace) -> int:
    _, overrides = split_arguments(arguments.config)
    resolved = load_one(arguments.config)
    warn_unchecked(resolved)
    for warning in refuse(resolved.path, check_planned_memory(resolved)):
        print(f"{resolved.path}: {warning.about}: {warning.what} ({warning.fix})", file=sys.stderr)
    if arguments.verb == "train":
        arguments.verb = VERBS[type(resolved.config)]
    return (_slurm if arguments.where == "slurm" else _ray)(arguments, resolved, overrides)


def _slurm(arguments: argparse.Namespace, resolved: Resolved[Any], overrides: list[str]) -> int:
    config, site = resolved.config, load_slurm_site(arguments.cluster)
    packed, variables = pack(resolved, overrides)
    job = SlurmJob(config, site, job_files(config), Path.cwd(), arguments.verb, variables)
    script = render_script(job)
    if arguments.dry_run:
        _show(resolved, [f"# {job.files / SCRIPT}", script, f"# {job.files / CONFIG}", packed])
        return 0
    job.files.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, text in ((SCRIPT, script), (CONFIG, packed)):
        files.write_text(job.files / name, text, mode=0o600)
    command = ["sbatch", "--parsable", str(job.files / SCRIPT)]
    if not arguments.submit:
        print(f"submit it with: {shlex.join(command)}")
        return 0
    for name, is_needed in site.pass_on.items():
        if is_needed and name not in os.environ:
            raise SetupError(f"{name} is not set", where=f"{arguments.cluster}: pass_on", fix=f"export {name}")
    number = _sbatch(command)
    print(f"job {number}; its logs are in {job.files}/latest once it runs")
    return 0


def _sbatch(command: list[str]) -> str:
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_SBATCH_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SetupError(f"sbatch: {error}", fix="submit it on a machine with Slurm") from error
    if answer.returncode:
        raise SetupError(f"sbatch failed: {answer.stderr.strip()}", fix="correct the cluster file")
    return answer.stdout.strip().partition(";")[0]


def _ray(arguments: argparse.Namespace, resolved: Resolved[Any], overrides: list[str]) -> int:
    job = make_job(resolved, overrides, arguments.ship)
    lines = list(_travels(job))
    with tempfile.TemporaryDirectory() as directory:
        command = submit_command(arguments.address, Path(directory), arguments.verb, wait=not arguments.no_wait)
        if arguments.dry_run:
            _show(resolved, [*lines, f"# {CONFIG}", job.config, submit_script(job, command)])
            return 0
        print("\n".join(lines), flush=True)
        write_job_directory(job, Path(directory))
        return subprocess.run(command).returncode


def _travels(job: RayJob) -> Iterator[str]:
    yield f"shipped: {', '.join([CONFIG, *map(str, job.code)])}"
    if job.environment:
        yield f"variables: {', '.join(job.environment)}"
    for name in job.missing:
        yield f"not shipped, because it is secret: {name}; set it where Ray runs"


def _show(resolved: Resolved[Any], parts: list[str]) -> None:
    for part in parts:
        print(resolved.secrets.hide(part))
    for line in explain(resolved, all_ranks=False):
        print(line)
