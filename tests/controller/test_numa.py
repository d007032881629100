"""CPU affinity of processes near their GPUs. The machines are files here, but the kernel binds for real."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mrl.controller.worker import Worker
from mrl.controller.worker_host import bind_to_gpus
from mrl.errors import PlacementError

CPUS = sorted(os.sched_getaffinity(0))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two nodes with a GPU each. The first has this machine's first CPU and many that do not exist."""
    for node, (pci, cpus) in enumerate({"0000:3b:00.0": f"{CPUS[0]},1000-1003", "0000:d8:00.0": "2000"}.items()):
        device, listed = tmp_path / f"bus/pci/devices/{pci}", tmp_path / f"devices/system/node/node{node}"
        device.mkdir(parents=True)
        listed.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
        (listed / "cpulist").write_text(f"{cpus}\n")
    driver(tmp_path, monkeypatch, "0, GPU-aaaa, 00000000:3B:00.0\\n1, GPU-bbbb, 00000000:D8:00.0\\n")
    return tmp_path


def driver(directory: Path, monkeypatch: pytest.MonkeyPatch, says: str) -> None:
    path = directory / "nvidia-smi"
    path.write_text(f"#!/bin/sh\nprintf '{says}'\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")


def bound(machine: Path, visible: str) -> tuple[str, set[int]]:
    """Return a process's message about its binding, and the CPUs of its child."""
    code = (
        "import sys, pathlib\nfrom mrl.controller.worker_host import bind_to_gpus\n"
        "print(bind_to_gpus(sys.argv[2], pathlib.Path(sys.argv[1])))\n"
        "import subprocess; subprocess.run([sys.executable, '-c', 'import os; print(*os.sched_getaffinity(0))'])"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    said, cpus = subprocess.run(
        [sys.executable, "-u", "-c", code, str(machine), visible],
        capture_output=True, text=True, check=True, env=environment,
    ).stdout.splitlines()  # fmt: skip
    return said, set(map(int, cpus.split()))


@pytest.mark.skipif(len(CPUS) < 2, reason="with one CPU there is nothing to choose from")
def test_a_process_and_its_children_run_beside_their_gpu(machine: Path) -> None:
    said, cpus = bound(machine, "GPU-aaaa")
    assert said == "bound to 1 CPUs of NUMA node 0, next to GPU GPU-aaaa"
    assert cpus == {CPUS[0]}


def test_a_job_that_was_given_other_cpus_is_left_alone_and_told_of(machine: Path) -> None:
    said, cpus = bound(machine, "1")
    assert said == "not bound to NUMA node 1 of its GPUs: the job has no CPUs of this node"
    assert cpus == set(CPUS)


def test_an_engine_over_several_nodes_runs_on_all_of_them(machine: Path) -> None:
    (machine / "devices/system/node/node1/cpulist").write_text(",".join(map(str, CPUS[1:])))
    assert bound(machine, "0,1") == ("", set(CPUS)), "which is the whole machine"


@pytest.mark.parametrize("missing", ["bus", "devices"])
def test_a_machine_that_tells_no_nodes_is_used_as_a_whole(machine: Path, missing: str) -> None:
    (machine / missing).rename(machine / "elsewhere")
    assert bind_to_gpus("0", machine) == ""


def test_a_driver_that_does_not_answer_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "nvidia-smi"
    path.write_text("#!/bin/sh\nexit 9\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert "not bound to the CPUs next to its GPUs" in bind_to_gpus("0", tmp_path)
    assert "exit status 9" in bind_to_gpus("0", tmp_path)


def test_a_process_that_was_not_told_its_gpu_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    place: Any = None
    worker = Worker(place)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert worker.visible_gpus() == "3"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(PlacementError, match="unset RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"):
        worker.visible_gpus()
