"""Causes of death: the relevant part of Ray's message, and additions from a node's counters."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from mrl.config.mesh import Mesh
from mrl.controller import RayClassWithInitArgs, RayWorkerGroup, RunContext, call, processes, worker_group
from mrl.controller.diagnosis import NodeMemory, cause, said_by_ray
from mrl.controller.processes import collect_handshakes
from mrl.errors import WorkerDied, WorkerError
from mrl.events import EventLog

ROOT = Path(__file__).resolve().parents[2]
MONITOR = (  # as Ray 2.55 says it
    "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 10.0.0.2, ID: 87c7) was "
    "22.38GB / 23.54GB (0.951000), which exceeds the memory usage threshold of 0.950000; Object store memory usage: "
    "[- objects spillable: 0; ]; Ray killed 1 worker(s) based on the killing policy: [(Actor(8c3a): pid=19651, actual "
    "memory used=4.70GB)]; To see more information about memory usage on this node, use `ray logs raylet.out`; Top 10 "
    "memory users: PID\tMEM(GB)\tCOMMAND, 19651\t4.70\tray::WorkerHost.update_actor, 8649\t4.68\tray::WorkerHost, "
    "16444\t0.18\tray::IDLE, Refer to the documentation on how to address the out of memory issue: https://docs"
)
CRASH = (
    "Actor failed to be created or died: Worker unexpectedly exits with a connection error code 2. End of file. "
    "Some common causes include: (1) the process was killed by SIGKILL by OOM killer"
)
NODE = NodeMemory(kills=3, shared_bytes=64 << 20, free_shared_bytes=60 << 20)


def test_rays_memory_monitor_is_named_with_its_numbers_and_the_largest_processes() -> None:
    said = said_by_ray(MONITOR)
    assert said == (
        "Ray's memory monitor killed it, because 22.38GB of the node's 23.54GB were used, more than 95%; "
        "ray::WorkerHost.update_actor (pid 19651) 4.70 GB, ray::WorkerHost (pid 8649) 4.68 GB"
    )
    detail, hints = cause(said, "", NODE, NODE)
    assert detail == said
    assert hints == ("fix: run `mrl plan`, which lists the users of memory and the key that would make it fit",)


def test_a_rank_that_the_memory_monitor_killed_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(reference: object, timeout: float) -> None:
        raise call.OutOfMemoryError(MONITOR)

    monkeypatch.setattr(call.ray, "get", get)
    fault = call._fault_of(3, None)  # type: ignore[arg-type]
    assert fault is not None
    assert (fault.rank, fault.kind) == (3, "died")
    assert fault.detail.startswith("Ray's memory monitor killed it")
    assert not issubclass(call.OutOfMemoryError, call.RayActorError), "Ray calls it something else than a death"


def test_rays_memory_monitor_may_end_a_process_before_it_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def get(greetings: object, timeout: float) -> None:
        raise call.OutOfMemoryError(MONITOR)

    monkeypatch.setattr(processes.ray, "get", get)
    monkeypatch.setattr(processes, "cause_on", lambda node, said, log: cause(said, log, NODE, NODE))
    monkeypatch.setattr(processes.ray, "kill", lambda actor, no_restart: None)
    node = SimpleNamespace(name="host", network=SimpleNamespace(address="127.0.0.1"))
    monkeypatch.setattr(processes, "ask", lambda node, question: "")
    actor, events = SimpleNamespace(handshake=SimpleNamespace(remote=str)), EventLog(tmp_path / "events")
    with pytest.raises(WorkerDied) as caught:
        collect_handshakes("rollout-0", [actor], [node], 9, events)  # type: ignore[list-item]
    first, *rest = str(caught.value).splitlines()
    assert first.startswith("rollout-0 rank 0 on node host died before it was up, after 0.0 s: Ray's memory monitor")
    assert rest == ["  fix: run `mrl plan`, which lists the users of memory and the key that would make it fit"]


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ("bus", "died before it was up, after .* s: it crashed: Bus error"),
        ("import", "died before it was up, after .* s: ModuleNotFoundError: No module named 'megatron'"),
        ("raise", "raised before it was up, after .* s: .*cannot assign"),
        ("hang", r"0 of 1 processes of critic started within 3 s; missing: ranks \[0\] on "),
    ],
)
def test_a_process_that_never_comes_up_says_why_and_what_to_do(
    how: str, named: str, run_context: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Host:  # here, so that Ray sends it whole
        def __init__(self) -> None:
            if how == "import":
                raise ModuleNotFoundError("No module named 'megatron'")

        def handshake(self, address: str | None) -> None:
            if how == "raise":
                raise OSError("cannot assign requested address")
            if how == "hang":
                time.sleep(60)
            os.kill(os.getpid(), signal.SIGBUS)

    monkeypatch.setattr(worker_group, "WorkerHost", Host)
    context = replace(run_context, deadlines=replace(run_context.deadlines, start_s=3 if how == "hang" else 60))
    slots = context.resources.device_slots("critic")
    with pytest.raises(WorkerError) as caught:
        RayWorkerGroup(
            "critic", RayClassWithInitArgs("none:None"), Mesh(1), context, replace(slots, devices=slots.devices[:1])
        )
    first, *rest = str(caught.value).splitlines()
    assert re.search(named, first), caught.value
    fix = "enlarge it" if how == "bus" else r"run `mrl env` on \S+ to (check its|see how long) "
    assert len([line for line in rest if re.match(f"  fix: {fix}", line)]) == 1
    assert caught.value.ranks == (0,)
    assert ("in handshake" in str(caught.value)) == (how == "bus"), "the frames of a crash are shown"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            CRASH,
            CRASH[: CRASH.index(" Some common")],
        ),
        ("it is lost\nthe cause is unknown", "it is lost"),
        ("", "no known reason"),
        (
            "died because of an error raised in its creation task, ray::A()\n  File x\nImportError: no y\n",
            "ImportError: no y",
        ),
    ],
)
def test_of_rays_other_words_the_telling_part_stays(text: str, said: str) -> None:
    assert said_by_ray(text) == said


def test_a_crash_is_what_the_process_itself_wrote() -> None:
    log = "loading\nFatal Python error: Bus error\n\nThread 0x1 (most recent call first):\n  File worker.py"
    log = log.replace("Bus error", "Segmentation fault")
    said = "it crashed: Segmentation fault (see the stack in the log)"
    assert cause("End of file.", log, NODE, NODE) == (said, ())


def test_a_full_dev_shm_and_the_kernels_kills_are_evidence() -> None:
    full = replace(NODE, free_shared_bytes=1 << 20)
    give = "fix: enlarge it (`docker run --shm-size`, `mount -o remount,size=... /dev/shm`)"
    log = "Fatal Python error: Bus error"
    assert cause("End of file.", log, NODE, full)[1] == ("/dev/shm is full: 1 of 64 MiB are free", give)
    freed = "/dev/shm may have been full, as after most bus errors: 60 of 64 MiB are free"
    assert cause("End of file.", log, NODE, NODE)[1] == (freed, give)
    _, (killed, fix) = cause("End of file.", "", NODE, replace(NODE, kills=5))
    assert killed == "the kernel has killed 2 processes on this node during the run: it was out of memory"
    assert fix.startswith("fix: run `mrl plan`")
    assert cause("End of file.", "", NODE, NODE) == ("End of file.", ())


@pytest.mark.slow
def test_a_full_dev_shm_kills_a_rank(tmp_path: Path) -> None:
    own_mounts = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"]), "sh", "-c"]
    small = "mount -t tmpfs -o size=16m tmpfs /dev/shm && exec "
    if reason := subprocess.run([*own_mounts, small + "true"], capture_output=True, text=True, check=False).stderr:
        pytest.skip(f"no mount namespace can be had: {reason}")
    ran = subprocess.run(
        [*own_mounts, small + '"$@"', "sh", sys.executable, "-m", "tests.controller.full_shared_memory", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    lines = ran.stdout[ran.stdout.index("actor rank 0 on node") :].splitlines()
    assert re.search(r"died in fill_shared_memory after .* s: it crashed: Bus error \(see the stack", lines[0])
    assert lines[1] == "  /dev/shm is full: 0 of 16 MiB are free"
    assert lines[2].startswith("  fix: enlarge it (`docker run --shm-size`")
    assert any("in fill_shared_memory" in line for line in lines[3:]), "the innermost frames"
    assert not Path("/dev/shm/large").exists(), "the machine's own was left alone"
