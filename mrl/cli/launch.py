"""`mrl launch slurm|ray|k8s CONFIG`: start a run on a cluster."""

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
from mrl.config.schema import Config
from mrl.errors import ConfigError, ModelError, Problem, SetupError
from mrl.launch.dashboard import await_dashboard
from mrl.launch.kubernetes import MANIFEST, KubernetesJob, KubernetesSite, load_kubernetes_site, render_manifest
from mrl.launch.ray_job import RayJob, make_job, pack, submit_command, submit_script, write_job_directory
from mrl.launch.slurm import CONFIG, SCRIPT, SlurmJob, job_files, load_slurm_site, render_script
from mrl.plan.assumptions import GIB
from mrl.plan.memory import gib, plan_memory
from mrl.plan.plan_input import make_plan_input
from mrl.preflight.findings import check_planned_memory, refuse

EXAMPLE = "mrl launch slurm configs/ppo-llama3.1-70b-8n8g.yaml --cluster launch/cluster-example.yaml --dry-run"
SUBVERBS = ("slurm", "ray", "k8s")
_SUBMIT_LIMIT_S = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_subparsers(dest="where", required=True, metavar="slurm | ray | k8s")
    slurm = where.add_parser("slurm", help="write a batch script, and submit it")
    slurm.add_argument(
        "--cluster", default="cluster.yaml", metavar="FILE", help="description of the site (default cluster.yaml)"
    )
    slurm.add_argument("--submit", action="store_true", help="submit it with sbatch")
    ray = where.add_parser("ray", help="submit a job to a running Ray cluster")
    ray.add_argument("--address", required=True, help="address of its dashboard (http://127.0.0.1:8265)")
    ray.add_argument("--ship", action="append", default=[], metavar="PATH", help="ship more of your own code")
    ray.add_argument("--no-wait", action="store_true", help="exit once the job is submitted")
    k8s = where.add_parser("k8s", help="write a manifest for the KubeRay operator, and apply it")
    k8s.add_argument(
        "--cluster", default="cluster.yaml", metavar="FILE", help="description of the site (default cluster.yaml)"
    )
    k8s.add_argument("--submit", action="store_true", help="apply it with kubectl")
    for parser in (slurm, ray, k8s):
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
    return {"slurm": _slurm, "ray": _ray, "k8s": _kubernetes}[arguments.where](arguments, resolved, overrides)


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


def _kubernetes(arguments: argparse.Namespace, resolved: Resolved[Any], overrides: list[str]) -> int:
    config, site = resolved.config, load_kubernetes_site(arguments.cluster)
    _check_host_memory(resolved, site, arguments.cluster)
    job = KubernetesJob(config, site, make_job(resolved, overrides, (), has_token=True), arguments.verb)
    manifest, file = render_manifest(job, arguments.cluster), job_files(config) / MANIFEST
    if arguments.dry_run:
        _show(resolved, [f"# {file}", manifest])
        return 0
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    files.write_text(file, manifest, mode=0o600)
    command = ["kubectl", "apply", "-f", str(file)]
    if not arguments.submit:
        print(f"submit it with: {shlex.join(command)}")
        return 0
    print(_submitted(command, "kubectl failed: ", "submit it on a machine with kubectl and access to the cluster"))
    print(f"follow it with: kubectl -n {site.namespace} get rayjob {job.name} -w")
    return 0


def _check_host_memory(resolved: Resolved[Any], site: KubernetesSite, path: str) -> None:
    """Refuse pods with less memory than a run keeps on each machine. Without the model's sizes, nothing is known."""
    if not isinstance(resolved.config, Config) or resolved.config.cluster.device != "gpu":
        return
    try:
        kept = plan_memory(make_plan_input(resolved, None)).host_bytes_per_node
    except ModelError as error:
        print(f"{path}: memory_gib: not compared with the plan: {error.what}", file=sys.stderr)
        return
    if kept / GIB + site.shm_gib > site.memory_gib:
        what = f"{site.memory_gib}, but a run keeps {gib(kept)} on each machine next to {site.shm_gib} GiB of shm_gib"
        raise ConfigError([Problem(path, "memory_gib", what, "a larger memory_gib; mrl plan explains the number")])


def _sbatch(command: list[str]) -> str:
    return _submitted(command, "sbatch failed: ", "submit it on a machine with Slurm").partition(";")[0]


def _submitted(command: list[str], failure: str, fix: str) -> str:
    """Run a command of the scheduler, and return its output."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_SUBMIT_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SetupError(f"{command[0]}: {error}", fix=fix) from error
    if answer.returncode:
        raise SetupError(f"{failure}{answer.stderr.strip()}", fix="correct the cluster file")
    return answer.stdout.strip()


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
        await_dashboard(arguments.address)
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
