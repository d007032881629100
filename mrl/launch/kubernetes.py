"""The manifest of a run on Kubernetes: a RayJob for the KubeRay operator, and a ConfigMap with its files.

The operator starts a Ray cluster for each attempt, with a token that it creates: a head without devices, where the
run's driver is, and one pod per machine. Settings that a site needs for every job are in the cluster file:
`launch/kubernetes-example.yaml`.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

from mrl.config.bounds import Count, Seconds, Text, matching
from mrl.config.sft import AnyConfig
from mrl.errors import ConfigError, Problem
from mrl.launch.ray_job import CONFIG, RayJob
from mrl.launch.site import Variable, load_site

MANIFEST = "job.yaml"
_FILES = "/etc/mrl"
_PROCESS = "/dev/shm/mrl-run.pid"
_NAME_LETTERS = 47  # the operator's limit for a RayJob
_MAP_BYTES = 1_000_000  # Kubernetes' limit for a ConfigMap is a MiB
_PRE_RUNNING_SINCE = "1.6"
_IS_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./@+:-]*")
_IS_BLOCK = re.compile(r"(?:[!-~][ -~]*|)(?:\n[ -~]*)*[!-~]\n")  # lines of printable text that end with one line feed
_NOT_TEXT = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}
Label = Annotated[str, matching(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?", "a name of Kubernetes")]
Directory = Annotated[str, matching(r"/[^\s:]+", "an absolute path")]


@dataclass(frozen=True, kw_only=True)
class SecretKey:
    """One value of a secret of the namespace."""

    secret: Label
    """Name of the secret."""
    key: Text
    """Key in it."""


@dataclass(frozen=True, kw_only=True)
class KubernetesSite:
    """A Kubernetes cluster with the KubeRay operator."""

    kuberay: Literal["1.5", "1.6", "1.7"]
    """Version of the operator. Versions before 1.5 start Ray without a token."""
    namespace: Label
    """Namespace of the job, its volumes and its secrets."""
    image: Text
    """Image with mrl, for the head and all machines."""
    cpus_per_node: Count
    """Processors of each machine's pod."""
    memory_gib: Count
    """Memory of each machine's pod, with its shared memory. `mrl plan` shows how much of it a run keeps."""
    head_cpus: Count = 8
    """Processors of the head's pod, where the run's driver and its reward workers are."""
    head_memory_gib: Count = 32
    """Memory of the head's pod."""
    shm_gib: Count = 64
    """Shared memory (`/dev/shm`) of each pod: columns of a step, and on GPUs the buffers of NCCL and vLLM."""
    volumes: dict[Label, Directory]
    """PersistentVolumeClaim -> directory in all pods. `run.dir` must be on a volume that all pods can write."""
    attempts: Count = 4
    """Ray clusters that the operator may start for the job, one after another: after a preemption, or if the head is
    lost. Each continues from the newest checkpoint."""
    join_limit_s: Seconds = 1800.0
    """Time for all pods to be scheduled and to join (KubeRay 1.6 and later)."""
    grace_s: Count = 900
    """Time that a pod gets to end. When the head must go, the run saves: one step and a checkpoint must fit."""
    device_resource: Text = "nvidia.com/gpu"
    """Resource of the devices."""
    resources: dict[Text, Count] = field(default_factory=dict)
    """Further resources of each machine's pod, such as `rdma/hca: 8`."""
    capabilities: list[Text] = field(default_factory=list)
    """Linux capabilities of each machine's container. RDMA needs `IPC_LOCK`."""
    node_selector: dict[Text, Text] = field(default_factory=dict)
    """Labels of the machines to use."""
    tolerations: list[dict[str, Any]] = field(default_factory=list)
    """Taints that the pods tolerate, as in a pod."""
    labels: dict[Text, Text] = field(default_factory=dict)
    """Labels of the job, such as `kueue.x-k8s.io/queue-name: research` or `ray.io/scheduler-name: volcano`."""
    scheduler: Text | None = None
    """Scheduler of the pods (`spec.schedulerName`). Null uses the default."""
    service_account: Label | None = None
    """Service account of the pods."""
    environment: dict[Variable, Text] = field(default_factory=dict)
    """Variables for every pod."""
    secrets: dict[Variable, SecretKey] = field(default_factory=dict)
    """Variables that pods take from secrets, such as `WANDB_API_KEY`. Every variable that the configuration uses as
    `${oc.env:NAME}` and that is secret by its name must be here."""


def load_kubernetes_site(path: str) -> KubernetesSite:
    """Return the cluster file of a Kubernetes cluster."""
    fix = "secrets: {{{name}: {{secret: NAME, key: KEY}}}} takes it from a secret of the namespace"
    return load_site(path, KubernetesSite, "launch/kubernetes-example.yaml", fix)


@dataclass(frozen=True)
class KubernetesJob:
    """A run on a site."""

    config: AnyConfig
    site: KubernetesSite
    files: RayJob
    """Configuration, code, and variables of the job."""
    verb: str

    @property
    def name(self) -> str:
        """Return the run's name as Kubernetes allows it."""
        name = re.sub(r"[^a-z0-9]+", "-", self.config.run.name.lower()).strip("-")
        return (name if name[:1].isalpha() else f"mrl-{name}")[:_NAME_LETTERS].rstrip("-")


def render_manifest(job: KubernetesJob, site_path: str) -> str:
    """Return both objects as YAML for `kubectl apply`."""
    if problems := list(_problems(job, site_path)):
        raise ConfigError(problems)
    return _TITLE + "".join(f"---\n{text}" for text in map(_yaml_lines, (_config_map(job), _ray_job(job))))


def _problems(job: KubernetesJob, path: str) -> Iterator[Problem]:
    site, run_directory = job.site, Path(job.config.run.dir)
    if not any(run_directory.is_relative_to(directory) for directory in site.volumes.values()):
        mounted = ", ".join(site.volumes.values()) or "none"
        what = f'"{run_directory}" is on no volume, so checkpoints would end with the pod (mounted: {mounted})'
        yield Problem("", "run.dir", what, "choose a directory below one of them, or add a volume")
    for name in job.files.missing:
        if name not in site.secrets:
            fix = f"secrets: {{{name}: {{secret: NAME, key: KEY}}}}"
            yield Problem(path, "secrets", f"the configuration uses {name}, which is in no secret", fix)
    for code in job.files.code:
        if code.is_dir():
            what, fix = f"the package {code} does not fit into a ConfigMap", "put it into the image, or on a volume"
            yield Problem("", str(code), what, f"{fix} with environment: {{PYTHONPATH: DIRECTORY}}")
    size = sum(len(text.encode()) for text in _file_texts(job).values())
    if size > _MAP_BYTES:
        what = f"its files have {size} bytes, but a ConfigMap holds {_MAP_BYTES}"
        yield Problem("", "the job", what, "put your code into the image, or on a volume")


def _file_texts(job: KubernetesJob) -> dict[str, str]:
    code = {str(path): path.read_text(encoding="utf-8") for path in job.files.code if path.is_file()}
    return {CONFIG: job.files.config} | code


def _config_map(job: KubernetesJob) -> dict[str, Any]:
    metadata = {"name": f"{job.name}-files", "namespace": job.site.namespace}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": _file_texts(job)}


def _ray_job(job: KubernetesJob) -> dict[str, Any]:
    config, site = job.config, job.site
    command = f"mrl {job.verb} {_FILES}/{CONFIG} cluster.ray_address=auto"
    spec: dict[str, Any] = {
        "entrypoint": f"sh -c {shlex.quote(f'echo $$ >{_PROCESS}; exec {command}')}",
        "submissionMode": "SidecarMode",
        "shutdownAfterJobFinishes": True,
        "backoffLimit": site.attempts - 1,
    }
    if site.kuberay >= _PRE_RUNNING_SINCE:
        spec["preRunningDeadlineSeconds"] = int(site.join_limit_s)
    machines = config.cluster.nodes
    spec["rayClusterSpec"] = {
        "rayVersion": version("ray"),
        "authOptions": {"mode": "token"},
        "headGroupSpec": {"rayStartParams": {"num-cpus": "0", "num-gpus": "0"}, "template": _head(job)},
        "workerGroupSpecs": [
            {
                "groupName": "machines",
                "replicas": machines,
                "minReplicas": machines,
                "maxReplicas": machines,
                "rayStartParams": {"num-gpus": str(_num_devices(config))},
                "template": _machine(job),
            }
        ],
    }
    metadata = {"name": job.name, "namespace": site.namespace, **({"labels": site.labels} if site.labels else {})}
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": metadata, "spec": spec}


def _num_devices(config: AnyConfig) -> int:
    return config.cluster.devices_per_node if config.cluster.device == "gpu" else 0


def _head(job: KubernetesJob) -> dict[str, Any]:
    """Return the pod of the driver. Before it ends, it asks the run to save, and waits for it."""
    site, run = job.site, f"$(cat {_PROCESS})"
    stop = f"[ ! -f {_PROCESS} ] || {{ kill -TERM {run} && while kill -0 {run}; do sleep 1; done; }}"
    container = _container(job, "ray-head", {"cpu": str(site.head_cpus), "memory": f"{site.head_memory_gib}Gi"})
    container["lifecycle"] = {"preStop": {"exec": {"command": ["/bin/sh", "-c", stop]}}}
    return _pod(job, container)


def _machine(job: KubernetesJob) -> dict[str, Any]:
    site, number = job.site, _num_devices(job.config)
    devices = {site.device_resource: str(number)} if number else {}
    further = {name: str(count) for name, count in site.resources.items()}
    asked = {"cpu": str(site.cpus_per_node), "memory": f"{site.memory_gib}Gi", **devices, **further}
    container = _container(job, "ray-worker", asked)
    if site.capabilities:
        container["securityContext"] = {"capabilities": {"add": site.capabilities}}
    pod = _pod(job, container)
    if site.node_selector:
        pod["spec"]["nodeSelector"] = site.node_selector
    return pod


def _container(job: KubernetesJob, name: str, resources: Mapping[str, str]) -> dict[str, Any]:
    site = job.site
    variables = {"PYTHONUNBUFFERED": "1", **job.files.environment, **site.environment}
    variables["PYTHONPATH"] = ":".join(filter(None, (_FILES, variables.get("PYTHONPATH"))))
    mounts = [{"name": claim, "mountPath": directory} for claim, directory in site.volumes.items()]
    mounts += [{"name": "files", "mountPath": _FILES}, {"name": "shared-memory", "mountPath": "/dev/shm"}]
    taken = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": entry.secret, "key": entry.key}}}
        for name, entry in site.secrets.items()
    ]
    return {
        "name": name,
        "image": site.image,
        "resources": {"requests": dict(resources), "limits": dict(resources)},
        "env": [*({"name": name, "value": value} for name, value in variables.items()), *taken],
        "volumeMounts": mounts,
    }


def _pod(job: KubernetesJob, container: dict[str, Any]) -> dict[str, Any]:
    site = job.site
    claims = [{"name": claim, "persistentVolumeClaim": {"claimName": claim}} for claim in site.volumes]
    memory = {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": f"{site.shm_gib}Gi"}}
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": site.grace_s,
        "containers": [container],
        "volumes": [*claims, {"name": "files", "configMap": {"name": f"{job.name}-files"}}, memory],
    }
    options = {
        "schedulerName": site.scheduler,
        "serviceAccountName": site.service_account,
        "tolerations": site.tolerations,
    }
    return {"spec": spec | {name: value for name, value in options.items() if value}}


_TITLE = """\
# Written by `mrl launch k8s` from a configuration and a cluster file. A new call overwrites it.
#
# The KubeRay operator starts a Ray cluster with a token, and runs the entry point on its head. Exit code 75 of mrl
# means that the run has saved and is not done: like any failure, it makes the operator start the next attempt, up to
# `backoffLimit`, and that attempt continues from the newest checkpoint in `run.dir`.
"""


# --- YAML -------------------------------------------------------------------------------------------------------------


def _yaml_lines(value: Any, indent: str = "") -> str:
    """Return a mapping or a list as YAML in blocks."""
    text = ""
    items = value.items() if isinstance(value, dict) else ((None, item) for item in value)
    for name, item in items:
        lead = f"{indent}- " if name is None else f"{indent}{_yaml_scalar(name)}:"
        if isinstance(item, str) and _IS_BLOCK.fullmatch(item):
            lines = item.removesuffix("\n").split("\n")
            text += f"{lead} |\n" + "".join(f"{indent}  {line}\n" if line else "\n" for line in lines)
        elif not isinstance(item, dict | list) or not item:
            text += f"{lead.rstrip()} {_yaml_scalar(item)}\n"
        elif name is None:
            text += lead + _yaml_lines(item, f"{indent}  ").removeprefix(f"{indent}  ")
        else:
            text += f"{lead}\n" + _yaml_lines(item, f"{indent}  ")
    return text


def _yaml_scalar(value: Any) -> str:
    if isinstance(value, str) and _IS_PLAIN.fullmatch(value) and value.lower() not in _NOT_TEXT and value[-1] != ":":
        return value
    return json.dumps(value, ensure_ascii=False)  # JSON is YAML
