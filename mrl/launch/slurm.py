"""The batch script of a run: one step of Slurm with a task per node, and what becomes of its exit code.

What a site asks of every job, apart from what a run is, stands in the cluster file: `launch/cluster-example.yaml`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from mrl.config.bounds import Count, Seconds, Text, matching
from mrl.config.keys import convert
from mrl.config.sft import AnyConfig
from mrl.config.sources import read_chain
from mrl.config.values import interpolate
from mrl.errors import EXIT_STOPPED, ConfigError, Problem
from mrl.redaction import is_secret_key, redact_text

CONFIG, SCRIPT = "config.yaml", "job.sbatch"
_ONE_WORD = re.compile(r"[^\s\"'#\\$`%]+")
_HOW = "copy launch/cluster-example.yaml from mrl's repository, fill it in, and name it: --cluster FILE"
Variable = Annotated[str, matching(r"[A-Za-z_][A-Za-z0-9_]*", "the name of an environment variable")]
Option = Annotated[str, matching(r"[a-z][a-z0-9-]*", "a long option of sbatch, without its dashes")]
Word = Annotated[str, matching(r"[^\s\"'#\\$`]+", "one word without quotes")]
SlurmTime = Annotated[str, matching(r"(\d+-)?\d+(:\d{1,2}){0,2}", "[days-]hours:minutes:seconds, as sbatch has it")]


@dataclass(frozen=True, kw_only=True)
class ContainerConfig:
    """What mrl runs in; without it the nodes' own Python is taken."""

    runtime: Literal["pyxis", "apptainer"]
    """`pyxis` gives srun its options, `apptainer` is called by it."""
    image: Word
    """The image, as the runtime names it."""
    mounts: dict[Word, Word] = field(default_factory=dict)
    """Directory of the nodes -> where the container has it. The directory in which the job is submitted, and that of
    its files, are always there."""


@dataclass(frozen=True, kw_only=True)
class SiteConfig:
    """A Slurm cluster."""

    account: Word | None = None
    """Who pays."""
    partition: Word | None = None
    """Where to queue."""
    time: SlurmTime
    """The longest that one attempt may take; a run that is not done by then saves and queues again."""
    cpus_per_node: Count
    """Processors that a job gets on each node; Slurm gives it one or two by default, and Ray would starve."""
    gpu_request: Literal["gpus-per-node", "gres"] = "gpus-per-node"
    """How GPUs are asked for: `--gpus-per-node=8`, or `--gres=gpu:8` on older Slurms."""
    exclusive: bool = True
    """Whole nodes with all of their memory."""
    sbatch: dict[Option, Word] = field(default_factory=dict)
    """Further options of sbatch (`constraint: h100`)."""
    stop_before_s: Count = 600
    """How long before the end of its time a run is told to save: one step and a checkpoint must fit."""
    join_limit_s: Seconds = 600.0
    """For every node to join with all of its devices; those that have not are named then."""
    modules: Text | None = None
    """Environment modules to load, with spaces between them."""
    python: Word = "python3"
    """The Python that has mrl, on the nodes or in the container; that of a virtual environment needs no activation."""
    environment: dict[Variable, Text] = field(default_factory=dict)
    """Variables for every process of the job."""
    pass_on: dict[Variable, bool] = field(default_factory=dict)
    """Variables to be taken over from where the job is submitted, such as keys: they go into no file of ours.
    Those that the configuration names as `${oc.env:NAME}` are taken over by themselves."""
    network_interface: Word | None = None
    """The interface over which nodes talk (`ib0`); null takes the address that a node's name stands for."""
    container: ContainerConfig | None = None


def load_site(path: str) -> SiteConfig:
    """Return the cluster file, or raise all that is wrong with it."""
    try:
        layer = read_chain(path)
    except ConfigError:
        if Path(path).exists():
            raise
        raise ConfigError([Problem(path, "", "there is no such cluster file", _HOW)]) from None
    values, problems, secrets = interpolate(layer, path)
    site, mistakes = convert(SiteConfig, values, secrets, lambda key: layer.origin(key, path))
    problems += mistakes
    for name, value in site.environment.items() if site is not None else ():
        if is_secret_key(name) or redact_text(value) != value:
            fix = f"pass_on: {{{name}: true}} takes it from where the job is submitted"
            where = layer.origin(("environment", name), path)
            problems.append(Problem(where, f"environment.{name}", "a secret must not stand in a file", fix))
    if site is None or problems:
        raise secrets.error(problems)
    return site


# --- the script -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SlurmJob:
    """A run on a site."""

    config: AnyConfig
    site: SiteConfig
    files: Path
    """The directory of the script, of the configuration, and of what each attempt leaves."""
    submitted_in: Path
    verb: str
    """What the first node runs: `train` or `sft`, or `check` to look at all nodes first."""
    variables: tuple[str, ...] = ()


def job_files(config: AnyConfig) -> Path:
    """Return the directory of a run's job. It lies beside the run's own, which holds nothing before the run begins."""
    return Path(config.run.dir, f"{config.run.name}.launch").absolute()


def render_script(job: SlurmJob) -> str:
    """Return the whole script, ready for sbatch."""
    for what, path in (("the working directory", job.submitted_in), ("run.dir", job.files)):
        if not _ONE_WORD.fullmatch(str(path)):
            problem = Problem(what, "", f'"{path}" holds what no #SBATCH line can', "choose a path without blanks")
            raise ConfigError([problem])
    options = (line if line.startswith("#") else f"#SBATCH --{line}" for line in _options(job))
    lines = ["#!/bin/bash", *_TITLE.splitlines(), *options, *_BEGIN.splitlines(), *_environment(job.site)]
    lines += ["", f"files={shlex.quote(str(job.files))}", *_ATTEMPT.splitlines()]
    lines += [*_STEP.splitlines(), f"  {_command(job)} &", *_END.splitlines()]
    return "\n".join(lines).replace("@STOPPED@", str(EXIT_STOPPED)) + "\n"


def _options(job: SlurmJob) -> Iterator[str]:
    """Yield options of sbatch, with comments between them: what would follow an option on its line might become its
    value."""
    cluster, site = job.config.cluster, job.site
    yield "# What the run needs: `cluster` of the configuration, `cpus_per_node` of the cluster file."
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
    yield "# The queue, as the cluster file names it; the time is that of one attempt."
    yield f"time={site.time}"
    queue = {"account": site.account, "partition": site.partition}
    yield from (f"{name}={value}" for name, value in (queue | site.sbatch).items() if value)
    yield "# Where it runs and writes; an attempt that goes on writes below the one before."
    yield f"chdir={job.submitted_in}"
    yield f"output={job.files}/job-%j.log"
    yield "open-mode=append"
    yield "# May be queued again: by Slurm when a node died, by the last lines of this when the time was over."
    yield "requeue"
    yield "# SIGUSR1 to this script alone, so many seconds before the end: a step and a checkpoint must fit."
    yield f"signal=B:USR1@{site.stop_before_s}"
    yield "# Of the environment in which it is submitted only these variables; their values stand in no file."
    named = dict.fromkeys((*job.variables, *(name for name, wanted in site.pass_on.items() if wanted)))
    yield f"export={','.join(named) or 'NONE'}"


_TITLE = """\
# Made by `mrl launch slurm` from a configuration and a cluster file; a new call writes it anew. What it does: a task on
# every node starts Ray there, the first one runs mrl, and what becomes of the job depends on mrl's exit code.
"""
_BEGIN = """
set -euo pipefail
umask 077 # the files of an attempt are the submitter's alone
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
# Each attempt has a directory of its own, in which its nodes meet; `latest` is the newest.
attempt=$files/attempt-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}
mkdir -p "$attempt"
ln -sfn "${attempt##*/}" "$files/latest"
scontrol show hostnames "$SLURM_JOB_NODELIST" >"$attempt/nodes"

# Whoever has this token may run code in the Ray cluster of this attempt. It is in this file alone.
trap 'rm -f "$attempt/token"' EXIT
od -An -N32 -tx1 /dev/urandom | tr -d ' \\n' >"$attempt/token"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$attempt/token"

# Slurm says so before the time is over; the first node sees the file, and has the run save and leave.
trap 'touch "$attempt/stop"' USR1

# A task per node: the first starts Ray and the run, the others join it. All of them end when the run does, each by
# itself: a task that fails takes no other along, so that the run can still save and say why."""
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

# Bash takes signals between commands only, so it waits a second at a time.
patience=60 # seconds for the other nodes to leave once the run has ended
while kill -0 "$step" 2>/dev/null && [ "$patience" -gt 0 ]; do
  if [ -f "$attempt/exit_code" ]; then patience=$((patience - 1)); fi
  sleep 1 &
  wait "$!" || true # a signal ends the waiting as well
done
if [ "$patience" -eq 0 ]; then echo "a node does not leave; its task ends with the job" >&2; fi

# @STOPPED@ says that the run has saved and is not done. Anything else but 0 is a failure, and not tried again.
code=1 # the first node writes the run's own; without it the step did not get that far
if [ -f "$attempt/exit_code" ]; then code=$(<"$attempt/exit_code"); fi
if [ "$code" -eq @STOPPED@ ] && [ -f "$attempt/stop" ]; then
  echo "saved before the time was over; queued again" >&2
  scontrol requeue "$SLURM_JOB_ID"
elif [ "$code" -ne 0 ]; then
  echo "exit code $code: see the logs in $attempt" >&2
fi
exit "$code"
"""
