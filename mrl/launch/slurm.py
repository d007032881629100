"""The batch script of a run: a Slurm step with one task per node, and the handling of its exit code.

Settings that a site needs for every job, independent of the run, are in the cluster file:
`launch/cluster-example.yaml`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from mrl.config.bounds import Count, Seconds, Text, matching
from mrl.config.sft import AnyConfig
from mrl.errors import EXIT_STOPPED, ConfigError, Problem
from mrl.launch.site import Variable, load_site

CONFIG, SCRIPT = "config.yaml", "job.sbatch"
_ONE_WORD = re.compile(r"[^\s\"'#\\$`%]+")
Option = Annotated[str, matching(r"[a-z][a-z0-9-]*", "a long option of sbatch, without its dashes")]
Word = Annotated[str, matching(r"[^\s\"'#\\$`]+", "one word without quotes")]
SlurmTime = Annotated[str, matching(r"(\d+-)?\d+(:\d{1,2}){0,2}", "[days-]hours:minutes:seconds, as in sbatch")]


@dataclass(frozen=True, kw_only=True)
class ContainerConfig:
    """Container in which mrl runs. Without it, the nodes' own Python is used."""

    runtime: Literal["pyxis", "apptainer"]
    """`pyxis` adds options to srun; `apptainer` is called by srun."""
    image: Word
    """Image, in the notation of the runtime."""
    mounts: dict[Word, Word] = field(default_factory=dict)
    """Directory on the nodes -> its place in the container. The directory of submission and the directory of the job's
    files are always mounted."""


@dataclass(frozen=True, kw_only=True)
class SiteConfig:
    """A Slurm cluster."""

    account: Word | None = None
    """Account that is charged."""
    partition: Word | None = None
    """Queue of the job."""
    time: SlurmTime
    """Time limit of one attempt. A run that is not done by then saves and is queued again."""
    cpus_per_node: Count
    """Processors of a job on each node. Slurm's default is one or two, too few for Ray."""
    gpu_request: Literal["gpus-per-node", "gres"] = "gpus-per-node"
    """How to request GPUs: `--gpus-per-node=8`, or `--gres=gpu:8` on older versions of Slurm."""
    exclusive: bool = True
    """Request whole nodes with all of their memory."""
    sbatch: dict[Option, Word] = field(default_factory=dict)
    """Further options of sbatch (`constraint: h100`)."""
    stop_before_s: Count = 600
    """Seconds before the time limit at which the run is asked to save. One step and a checkpoint must fit."""
    join_limit_s: Seconds = 600.0
    """Time for all nodes to join with all of their devices. After it, the missing nodes are reported."""
    modules: Text | None = None
    """Environment modules to load, separated by spaces."""
    python: Word = "python3"
    """Python that has mrl, on the nodes or in the container. A virtual environment's Python needs no activation."""
    environment: dict[Variable, Text] = field(default_factory=dict)
    """Variables for every process of the job."""
    pass_on: dict[Variable, bool] = field(default_factory=dict)
    """Variables to pass on from where the job is submitted, such as keys. They are written to no file. Variables that
    the configuration uses as `${oc.env:NAME}` are passed on automatically."""
    network_interface: Word | None = None
    """Network interface between nodes (`ib0`). Null uses the address that a node's name resolves to."""
    container: ContainerConfig | None = None


def load_slurm_site(path: str) -> SiteConfig:
    """Return the cluster file of a Slurm cluster."""
    fix = "pass_on: {{{name}: true}} passes it on from where the job is submitted"
    return load_site(path, SiteConfig, "launch/cluster-example.yaml", fix)


# --- the script -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SlurmJob:
    """A run on a site."""

    config: AnyConfig
    site: SiteConfig
    files: Path
    """Directory of the script, the configuration, and the output of each attempt."""
    submitted_in: Path
    verb: str
    """Command of the first node: `train` or `sft`, or `check` to check all nodes first."""
    variables: tuple[str, ...] = ()


def job_files(config: AnyConfig) -> Path:
    """Return the directory of a run's job. It is next to the run directory, which stays empty until the run begins."""
    return Path(config.run.dir, f"{config.run.name}.launch").absolute()


def render_script(job: SlurmJob) -> str:
    """Return the whole script for sbatch."""
    for label, path in (("the working directory", job.submitted_in), ("run.dir", job.files)):
        if not _ONE_WORD.fullmatch(str(path)):
            problem = Problem(
                label,
                "",
                f'"{path}" contains characters that a #SBATCH line cannot hold',
                "choose a path without blanks",
            )
            raise ConfigError([problem])
    options = (line if line.startswith("#") else f"#SBATCH --{line}" for line in _options(job))
    lines = ["#!/bin/bash", *_TITLE.splitlines(), *options, *_BEGIN.splitlines(), *_environment(job.site)]
    lines += ["", f"files={shlex.quote(str(job.files))}", *_ATTEMPT.splitlines()]
    lines += [*_STEP.splitlines(), f"  {_command(job)} &", *_END.splitlines()]
    return "\n".join(lines).replace("@STOPPED@", str(EXIT_STOPPED)) + "\n"


def _options(job: SlurmJob) -> Iterator[str]:
    """Yield options of sbatch, with comments on separate lines: text after an option might become part of its value."""
    cluster, site = job.config.cluster, job.site
    yield "# Resources: `cluster` of the configuration, `cpus_per_node` of the cluster file."
    yield f"job-name={job.config.run.name}"
    yield f"nodes={cluster.nodes}"
    yield "ntasks-per-node=1"
    yield f"cpus-per-task={site.cpus_per_node}"
    if cluster.device == "gpu":
        number = cluster.devices_per_node
        yield f"gres=gpu:{number}" if site.gpu_request == "gres" else f"gpus-per-node={number}"
    if site.exclusive:
        yield "exclusive"
        yield "mem=0"
    yield "# The queue, from the cluster file. The time is the limit of one attempt."
    yield f"time={site.time}"
    queue = {"account": site.account, "partition": site.partition}
    yield from (f"{name}={value}" for name, value in (queue | site.sbatch).items() if value)
    yield "# Where it runs and writes. A later attempt appends to the log of the earlier one."
    yield f"chdir={job.submitted_in}"
    yield f"output={job.files}/job-%j.log"
    yield "open-mode=append"
    yield "# May be queued again: by Slurm if a node died, by the last lines of this script if the time is over."
    yield "requeue"
    yield "# SIGUSR1 only to this script, this many seconds before the end: a step and a checkpoint must fit."
    yield f"signal=B:USR1@{site.stop_before_s}"
    yield "# Only these variables of the submitting environment are passed on. Their values are written to no file."
    passed_on = dict.fromkeys((*job.variables, *(name for name, is_needed in site.pass_on.items() if is_needed)))
    yield f"export={','.join(passed_on) or 'NONE'}"


_TITLE = """\
# Written by `mrl launch slurm` from a configuration and a cluster file. A new call overwrites it. A task on
# every node starts Ray there, the first one runs mrl, and mrl's exit code determines how the job ends.
"""
_BEGIN = """
set -euo pipefail
umask 077 # only the submitter may read the files of an attempt
export SLURM_EXPORT_ENV=ALL # the step gets the environment of this script
"""


def _environment(site: SiteConfig) -> Iterator[str]:
    yield "\n# For every process of the job: `modules`, `network_interface` and `environment` of the cluster file."
    if site.modules:
        yield f"module load {' '.join(map(shlex.quote, site.modules.split()))}"
    interface = site.network_interface
    variables = {f"{library}_SOCKET_IFNAME": interface for library in ("NCCL", "GLOO") if interface}
    for name, value in (variables | site.environment).items():
        yield f"export {name}={shlex.quote(value)}"


_ATTEMPT = """\
# Each attempt has its own directory, through which its nodes communicate. `latest` is the newest.
attempt=$files/attempt-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}
mkdir -p "$attempt"
ln -sfn "${attempt##*/}" "$files/latest"
scontrol show hostnames "$SLURM_JOB_NODELIST" >"$attempt/nodes"

# This token gives permission to run code in the Ray cluster of this attempt. It is only in this file.
trap 'rm -f "$attempt/token"' EXIT
od -An -N32 -tx1 /dev/urandom | tr -d ' \\n' >"$attempt/token"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$attempt/token"

# Slurm signals before the time is over. The first node sees the file, and lets the run save and exit.
trap 'touch "$attempt/stop"' USR1

# One task per node: the first starts Ray and the run, the others join it. All end when the run ends, each by
# itself: a failed task does not end the others, so that the run can still save and report why."""
_STEP = """\
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --cpu-bind=none \\
  --kill-on-bad-exit=0 --wait=0 --output="$attempt/%N.log" \\"""


def _command(job: SlurmJob) -> str:
    site, container = job.site, job.site.container
    node = (
        f'{shlex.quote(site.python)} -m mrl.launch.node "$attempt" --verb {job.verb} --config "$files/{CONFIG}" \\\n'
        f"  --cpus {site.cpus_per_node} --join-limit-s {site.join_limit_s:g}"
    )
    node += f" --interface {shlex.quote(site.network_interface)}" if site.network_interface else ""
    if container is None:
        return node
    here = {str(path): str(path) for path in (job.submitted_in, job.files)}
    mounts = shlex.quote(",".join(f"{outside}:{inside}" for outside, inside in (here | container.mounts).items()))
    image, directory = shlex.quote(container.image), shlex.quote(str(job.submitted_in))
    if container.runtime == "pyxis":
        options = f"--container-image={image} --container-mounts={mounts} --container-workdir={directory}"
        return f"{options} --no-container-mount-home \\\n  {node}"
    gpus = "--nv " if job.config.cluster.device == "gpu" else ""
    return f"apptainer exec {gpus}--no-home --bind {mounts} --pwd {directory} {image} \\\n  {node}"


_END = """\
step=$!

# Bash handles signals only between commands, so it waits one second at a time.
patience=60 # seconds for the other nodes to exit after the run has ended
while kill -0 "$step" 2>/dev/null && [ "$patience" -gt 0 ]; do
  if [ -f "$attempt/exit_code" ]; then patience=$((patience - 1)); fi
  sleep 1 &
  wait "$!" || true # a signal also ends the waiting
done
if [ "$patience" -eq 0 ]; then echo "a node did not exit; its task ends with the job" >&2; fi

# @STOPPED@ means that the run has saved and is not done. Any other code except 0 is a failure, and not retried.
code=1 # the first node writes the run's code; without it, the step did not get that far
if [ -f "$attempt/exit_code" ]; then code=$(<"$attempt/exit_code"); fi
if [ "$code" -eq @STOPPED@ ] && [ -f "$attempt/stop" ]; then
  echo "saved before the time limit; queued again" >&2
  scontrol requeue "$SLURM_JOB_ID"
elif [ "$code" -ne 0 ]; then
  echo "exit code $code: see the logs in $attempt" >&2
fi
exit "$code"
"""
