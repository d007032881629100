"""The cluster file: what a site asks of every job, apart from what a run is. `launch/cluster-example.yaml` is one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from mrl.config.bounds import Count, Seconds, Text, matching
from mrl.config.keys import convert
from mrl.config.sources import read_chain
from mrl.config.values import interpolate
from mrl.errors import ConfigError, Problem
from mrl.redaction import is_secret_key, redact_text

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
