"""Manifests for Kubernetes: valid for KubeRay's schemas and its operator's rules, and refusals of what cannot run."""

from __future__ import annotations

import copy
import gzip
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from mrl.cli.main import main
from mrl.demo.model import make_model
from mrl.errors import ConfigError
from mrl.launch.kubernetes import _yaml_lines, load_kubernetes_site
from tests.apart import run_mrl
from tests.launch.examples import kubernetes_manifest

ROOT = Path(__file__).parents[2]
SITE = ROOT / "launch" / "kubernetes-example.yaml"
VERSIONS = ("1.5", "1.6", "1.7")

Objects = tuple[dict[str, Any], dict[str, Any]]


def objects(manifest: str) -> Objects:
    config_map, ray_job = yaml.safe_load_all(manifest)
    return config_map, ray_job


@pytest.fixture(scope="module")
def manifest() -> str:
    return kubernetes_manifest()


@pytest.fixture
def ray_job(manifest: str) -> dict[str, Any]:
    return objects(manifest)[1]


@cache
def schema(version: str) -> Draft202012Validator:
    """Return the operator's schema, in which an unknown field is an error, as for `kubectl apply` with validation."""
    with gzip.open(Path(__file__).with_name("kuberay") / f"rayjob-{version}.json.gz") as file:
        return Draft202012Validator(strict(json.load(file)))


def strict(node: Any) -> Any:
    if isinstance(node, list):
        return [strict(item) for item in node]
    if not isinstance(node, dict):
        return node
    node = {name: strict(item) for name, item in node.items()}
    if node.pop("x-kubernetes-int-or-string", False):
        node["type"] = ["integer", "string"]
    if "properties" in node and isinstance(node["properties"], dict) and node.get("type") == "object":
        node.setdefault("additionalProperties", False)
    return node


def mistakes(version: str, ray_job: dict[str, Any]) -> list[str]:
    job = {**ray_job, "metadata": {}}  # the schema takes any
    return [f"{error.json_path}: {error.message}" for error in schema(version).iter_errors(job)]


def operator_mistakes(job: dict[str, Any]) -> list[str]:
    """Return what KubeRay's `validation.go` refuses, as far as it concerns fields of these manifests."""
    spec, name = job["spec"], job["metadata"]["name"]
    cluster = spec["rayClusterSpec"]
    head, (machines,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    return [
        what
        for what, is_wrong in {
            "a name of more than 47 letters": len(name) > 47,
            "a name that is no DNS-1035 label": not name[0].isalpha() or not name.replace("-", "a").isalnum(),
            "a sidecar and a head that restarts": head["template"]["spec"].get("restartPolicy", "Never") != "Never",
            "a sidecar and a submitter": "submitterPodTemplate" in spec or "submitterConfig" in spec,
            "a token and an old Ray": tuple(map(int, cluster["rayVersion"].split(".")[:2])) < (2, 52),
            "replicas without limits": not {"minReplicas", "maxReplicas"} <= machines.keys(),
            "more replicas at least than at most": machines["minReplicas"] > machines["maxReplicas"],
            "resources twice": any("resources" in group for group in (head, machines)),
            "a negative backoffLimit": spec["backoffLimit"] < 0,
            "a deadline that is not positive": spec.get("preRunningDeadlineSeconds", 1) < 1,
            "a time to live without an end": "ttlSecondsAfterFinished" in spec and not spec["shutdownAfterJobFinishes"],
        }.items()
        if is_wrong
    ]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("preset", ["ppo-llama3.1-70b-8n8g", "grpo-qwen3-235b-a22b-16n8g", "laptop-sft"])
def test_a_manifest_is_valid_for_the_operator(preset: str, version: str) -> None:
    job = objects(kubernetes_manifest(preset, version))[1]
    assert mistakes(version, job) == operator_mistakes(job) == []


def test_a_deadline_of_the_start_needs_its_version() -> None:
    old, new = (objects(kubernetes_manifest(kuberay=version))[1] for version in ("1.5", "1.6"))
    assert "preRunningDeadlineSeconds" not in old["spec"]
    assert new["spec"]["preRunningDeadlineSeconds"] == 1800
    (mistake,) = mistakes("1.5", new)
    assert "'preRunningDeadlineSeconds' was unexpected" in mistake


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda spec: spec.update(backofLimit=3), "'backofLimit' was unexpected"),
        (lambda spec: spec.update(backoffLimit="3"), "'3' is not of type 'integer'"),
        (
            lambda spec: spec["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0].update(
                images="x"
            ),
            "'images' was unexpected",
        ),
    ],
)
def test_mistakes_are_found_by_the_schema(
    ray_job: dict[str, Any], change: Callable[[dict[str, Any]], None], message: str
) -> None:
    wrong = copy.deepcopy(ray_job)
    change(wrong["spec"])
    (mistake,) = mistakes("1.6", wrong)
    assert message in mistake


def test_pods_have_what_a_run_needs(manifest: str) -> None:
    config_map, job = objects(manifest)
    cluster = job["spec"]["rayClusterSpec"]
    (machines,) = cluster["workerGroupSpecs"]
    assert (machines["replicas"], machines["rayStartParams"]) == (8, {"num-gpus": "8"})
    assert cluster["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0", "num-gpus": "0"}
    assert cluster["authOptions"] == {"mode": "token"}
    for template in (cluster["headGroupSpec"]["template"], machines["template"]):
        (container,) = template["spec"]["containers"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert mounts == {"/shared": "shared", "/etc/mrl": "files", "/dev/shm": "shared-memory"}
        variables = {entry["name"]: entry for entry in container["env"]}
        assert variables["PYTHONPATH"]["value"] == "/etc/mrl"
        assert variables["WANDB_API_KEY"]["valueFrom"] == {"secretKeyRef": {"name": "wandb", "key": "api-key"}}
        assert template["spec"]["terminationGracePeriodSeconds"] == 900
    limits = machines["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"cpu": "96", "memory": "1000Gi", "nvidia.com/gpu": "8", "rdma/hca": "8"}
    assert config_map["metadata"]["name"] == "ppo-llama3-1-70b-files"
    assert json.loads(config_map["data"]["config.yaml"])["run"]["dir"] == "/shared/mrl/runs"
    assert config_map["data"]["my_rewards.py"] == "def score(sample):\n    return 0.0\n"


def test_the_head_lets_the_run_save_before_it_ends(ray_job: dict[str, Any], tmp_path: Path) -> None:
    """The entry point and the hook are run by a shell, with a run that needs a second to save."""
    head = ray_job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    (*shell, hook) = head["lifecycle"]["preStop"]["exec"]["command"]
    program = "import signal, sys, time; signal.signal(15, lambda *_: (time.sleep(1), sys.exit(75))); time.sleep(60)"
    run = tmp_path / "mrl"
    run.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{program}'\n")
    run.chmod(0o755)
    pid = tmp_path / "run.pid"
    entry, hook = (text.replace("/dev/shm/mrl-run.pid", str(pid)) for text in (ray_job["spec"]["entrypoint"], hook))
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with subprocess.Popen(shlex.split(entry), env=environment, start_new_session=True) as process:
        try:
            while not pid.exists() or not pid.read_text():
                time.sleep(0.05)
            time.sleep(0.5)
            began = time.monotonic()
            reaped: list[int] = []
            hooked = subprocess.Popen([*shell, hook])
            reaped.append(process.wait(20))
            assert hooked.poll() is None, "the hook waits until the run has ended"
            assert hooked.wait(20) == 0
            assert reaped == [75]
            assert 0.9 < time.monotonic() - began < 10
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert subprocess.run([*shell, hook.replace(str(pid), str(tmp_path / "none"))]).returncode == 0


@pytest.mark.parametrize(
    ("overrides", "site", "message"),
    [
        (["run.dir=/local/runs"], {}, r'run\.dir: "/local/runs" is on no volume, .* \(mounted: /shared\)'),
        (
            [],
            {"memory_gib": 400},
            r"memory_gib: 400, but a run keeps 536\.9 GiB on each machine next to 128 GiB",
        ),
        (["reward.functions.answer.options={key: '${oc.env:MY_TOKEN}'}"], {}, "MY_TOKEN, which is in no secret"),
        ([], {"environment": {"API_KEY": "hunter22"}}, r"environment\.API_KEY: a secret must not be written in a file"),
        ([], {"kuberay": "1.4"}, "kuberay: .*1.5 | 1.6 | 1.7"),
    ],
)
def test_what_cannot_run_is_refused(
    overrides: list[str],
    site: dict[str, Any],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MY_TOKEN", "x")
    Path("my_rewards.py").touch()
    file = tmp_path / "site.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(SITE.read_text()) | site))
    preset = str(ROOT / "configs" / "ppo-llama3.1-70b-8n8g.yaml")
    absolute = [f"data.{name}.dataset=/shared/x.jsonl" for name in ("train.math", "train.code", "validation.math")]
    paths = ["run.dir=/shared/runs", *absolute, *overrides]
    assert main(["launch", "k8s", preset, *paths, "--cluster", str(file), "--dry-run"]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_package_of_the_user_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="the package my_rewards does not fit into a ConfigMap"):
        kubernetes_manifest(is_package=True)


@pytest.mark.parametrize(
    "value",
    [
        {"a": [], "b": {}, "c": "", "d": "yes", "e": "1.5", "f": "x: y", "g": "- z", "h": " x\n", "i": "x\n\ny\n"},
        {"a": [{"b": 1, "c": [{"d": "e"}]}, "text", ["x", {"y": True}]], "k": "line\nwithout end", "ä": "tab\there\n"},
        {"l": "\n", "m": "x\n\n", "n": "x \ny\n", "o": "~", "p": None, "q": "#x", "r": "x:", "s": "x #y"},
    ],
)
def test_yaml_is_read_as_it_was_meant(value: Any) -> None:
    assert yaml.safe_load(_yaml_lines(value)) == value


def test_the_example_is_a_cluster_file() -> None:
    assert load_kubernetes_site(str(SITE)).attempts == 8


def test_a_manifest_is_written_for_kubectl(tmp_path: Path) -> None:
    config = ROOT / "configs" / "laptop-grpo.yaml"
    site = tmp_path / "site.yaml"
    values = {"kuberay": "1.6", "namespace": "a", "image": "b", "cpus_per_node": 2, "memory_gib": 8}
    site.write_text(yaml.safe_dump(values | {"volumes": {"claim": str(tmp_path)}}))
    paths = f"run.dir={tmp_path}/runs", f"model.path={make_model(tmp_path / 'model', 1)}"
    paths += "rollout.max_prompt_tokens=32", "rollout.max_response_tokens=32"
    said = run_mrl("launch", "k8s", str(config), *paths, "--cluster", str(site))
    file = tmp_path / "runs" / "laptop-grpo.launch" / "job.yaml"
    assert said.strip().endswith(f"submit it with: kubectl apply -f {file}")
    assert file.stat().st_mode & 0o777 == 0o600
    assert objects(file.read_text())[1]["kind"] == "RayJob"
