"""A Ray and its processes end soon after the process that started it, for any kind of end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import IO, Any

import pytest

from mrl.config.schema import ClusterConfig
from mrl.controller import cluster, keeper
from mrl.controller.node_agent import read_process
from mrl.errors import SetupError
from tests.apart import run_python
from tests.endings.endings import Process, below, is_there, leftovers, with_shared_memory

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import os, subprocess, sys, time
from mrl.config.schema import ClusterConfig
from mrl.controller.cluster import ray_cluster, when_ray_is_lost
import ray

def report(error):
    time.sleep(1.5)  # Ray itself would end this process meanwhile, with another status
    print(error, file=sys.stderr, flush=True)
    return 76

class Worker:
    def leave(self):  # a double fork in its own session has no parent here
        left = "import os, time; os.fork() and os._exit(0); os.setsid(); print(os.getpid(), flush=True); time.sleep(99)"
        return int(subprocess.Popen([sys.executable, "-c", left], stdout=subprocess.PIPE).stdout.readline())
    def wait(self):
        time.sleep(600)

with when_ray_is_lost(report), ray_cluster(ClusterConfig(devices_per_node=1, device="cpu")):
    worker = ray.remote(Worker).remote()
    print("ready", ray.get(worker.leave.remote()), flush=True)
    ray.get(worker.wait.remote()) if sys.argv[1] == "hang" else time.sleep(0)
"""

CALLS = """
from mrl.config.schema import ClusterConfig
from mrl.controller.cluster import ray_cluster
from tests.endings.endings import below
from pathlib import Path
import os, ray

class Worker:
    def answer(self):
        pass

def memory_mib():
    (gcs,) = (pid for pid, _ in below(os.getpid()) if Path(f"/proc/{pid}/comm").read_text().strip() == "gcs_server")
    return int(Path(f"/proc/{gcs}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

with ray_cluster(ClusterConfig(devices_per_node=1, device="cpu")):
    worker = ray.remote(num_cpus=0)(Worker).remote()
    ray.get([worker.answer.remote() for _ in range(2000)])
    before = memory_mib()
    for _ in range(4):
        ray.get([worker.answer.remote() for _ in range(1000)])
    print(memory_mib() - before)
"""


class ClosedAfterALine:
    """A pipe that another thread closes after one line."""

    def __init__(self, pipe: IO[str]) -> None:
        self._pipe = pipe

    def readline(self) -> str:
        line = self._pipe.readline()
        self._pipe.close()
        return line

    def close(self) -> None:
        self._pipe.close()


def named(processes: set[Process], name: str) -> int:
    files = [Path(f"/proc/{pid}/comm") for pid, _ in filter(is_there, processes)]
    (found,) = (int(file.parent.name) for file in files if file.read_text().strip() == name)
    return found


@pytest.mark.parametrize(
    ("target", "number", "said"),
    [
        pytest.param("none", 0, "", marks=pytest.mark.slow),
        ("driver", signal.SIGKILL, ""),
        ("group", signal.SIGHUP, ""),
        pytest.param("raylet", signal.SIGKILL, "its raylet (pid {pid}) has died", marks=pytest.mark.slow),
        pytest.param(
            *("raylet", signal.SIGSTOP, "its raylet (pid {pid}) is stopped by a signal or a debugger"),
            marks=[pytest.mark.slow, pytest.mark.on_demand],
        ),
        pytest.param("gcs_server", signal.SIGKILL, "its gcs_server (pid {pid}) has died", marks=pytest.mark.slow),
    ],
)
def test_nothing_outlives_a_run(target: str, number: int, said: str) -> None:
    directory = Path(tempfile.mkdtemp(prefix="k"))  # not pytest's: Ray's sockets need a short one
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    (shared := directory / "shm").mkdir()
    (temporary := directory / "tmp").mkdir()
    run = subprocess.Popen(
        with_shared_memory(shared, [sys.executable, "-c", PROGRAM, "hang" if target != "none" else "end"]),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # who runs the tests may ignore it
        env=environment | {"PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)},
    )
    processes = below(run.pid)
    try:
        assert run.stdout is not None
        word, orphan = run.stdout.readline().split()
        assert word == "ready"
        processes |= below(run.pid) | below(int(orphan))  # which may be below nothing of this run
        starts_agent = Path(f"/proc/{named(processes, 'raylet')}/cmdline").read_text()
        assert "--listen-port=0" in starts_agent, "its own port: Ray's default is for the user's cluster"
        killed = {"driver": run.pid, "group": -run.pid}.get(target) or (named(processes, target) if number else 0)
        if number:
            os.kill(killed, number)
        errors = run.communicate(timeout=15)[1]
        assert run.returncode == {"none": 0, "driver": -number, "group": -number}.get(target, 76), errors
        assert said.format(pid=killed) in errors
        assert leftovers(processes, temporary, shared) == []
    finally:
        for process in filter(is_there, processes):
            os.kill(process[0], signal.SIGKILL)
        run.wait()
        shutil.rmtree(directory)


@pytest.mark.parametrize("num_deaths", [1, 2])
def test_a_ray_that_dies_while_it_starts_is_started_once_more(
    num_deaths: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """On a busy machine, this happens to a raylet that waits too long for its agents."""
    starts = tmp_path / "starts"
    program = [
        "import os, subprocess, sys, time",
        f"number = os.write(os.open({str(starts)!r}, os.O_CREAT | os.O_WRONLY | os.O_APPEND), b'.')",
        "from mrl.controller import keeper",
        "keeper._NEEDED = ('sleep',)",
        "dies = lambda *_: (subprocess.Popen(['sleep', '0.3']), time.sleep(60))",
        f"keeper._start = dies if os.path.getsize({str(starts)!r}) <= {num_deaths} else lambda *_: 'address'",
        "keeper.main()",
    ]
    started = subprocess.Popen

    def start(command: list[str], **options: Any) -> subprocess.Popen[str]:
        assert command[1:3] == ["-m", "mrl.controller.keeper"]
        return started([command[0], "-c", "\n".join(program), *command[3:]], **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: None)  # the Ray of other tests stays
    died = pytest.raises(SetupError, match=r"its sleep \(pid \d+\) has died")
    config = ClusterConfig(devices_per_node=1, device="cpu")
    with nullcontext() if num_deaths == 1 else died, cluster._kept(config, tmp_path / "ray") as address:
        assert address == "address"
    assert starts.read_text() == ".."
    assert "has died. Ray is started once more." in capfd.readouterr().err


def test_a_ray_that_cannot_start_says_why(tmp_path: Path) -> None:
    directory = tmp_path / ("long" * 30)
    directory.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, "end"],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment | {"PYTHONPATH": str(ROOT), "TMPDIR": str(directory)},
    )
    last, fix = ran.stderr.strip().splitlines()[-2:]
    assert last.startswith("mrl.errors.SetupError: Ray did not start on this machine: OSError: "), ran.stderr
    assert fix.startswith("  fix: use a shorter TMPDIR")
    assert not list(directory.iterdir())


def test_what_a_start_failed_of_is_written_before_it_is_said_that_it_failed(tmp_path: Path) -> None:
    directory, log = tmp_path / ("long" * 30), tmp_path / "log"
    command = [sys.executable, "-m", "mrl.controller.keeper", str(directory), "1"]
    with (
        log.open("w") as stderr,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, cwd=ROOT) as keeper,
    ):
        assert keeper.stdout is not None
        told, written = keeper.stdout.readline(), log.read_text()
        cluster._end(keeper)  # type: ignore[arg-type]  # bytes or text: it writes to the pipe itself
    assert told == b"\n"
    assert "AF_UNIX" in written.splitlines()[-1]
    assert log.read_text() == written, "and nothing after it"


def test_a_word_ends_what_keeps_ray_also_where_another_holds_its_pipe() -> None:
    kept = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.readline()"], stdin=subprocess.PIPE, text=True
    )
    assert kept.stdin is not None
    holder = subprocess.Popen(["sleep", "60"], pass_fds=[kept.stdin.fileno()])  # as a process forked here does
    try:
        cluster._end(kept)
        assert kept.returncode == 0, "it ended by itself"
    finally:
        holder.kill()
        holder.wait()
        kept.kill()
        kept.wait()


def test_a_moments_stop_of_what_ray_needs_is_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "_NEEDED", ("sleep",))
    monkeypatch.setattr(keeper, "_STOPPED_S", 0.4)
    monkeypatch.setattr(keeper, "_needed", {})
    needed = subprocess.Popen(["sleep", "60"])

    def send(number: int) -> None:
        needed.send_signal(number)
        while ((read_process(needed.pid) or "?")[0] == "T") != (number == signal.SIGSTOP):
            time.sleep(0.01)

    try:
        while needed.pid not in keeper._needed:  # it may have been forked and not become itself yet
            assert keeper._lost_process() == ""
        time.sleep(0.5)
        assert keeper._lost_process() == ""
        send(signal.SIGSTOP)
        assert keeper._lost_process() == "", "it ran until just now"
        send(signal.SIGCONT)
        assert keeper._lost_process() == ""
        send(signal.SIGSTOP)
        time.sleep(0.5)
        assert keeper._lost_process() == f"its sleep (pid {needed.pid}) is stopped by a signal or a debugger"
    finally:
        needed.kill()
        needed.wait()
    assert keeper._lost_process() == f"its sleep (pid {needed.pid}) has died"


def test_who_is_told_to_end_is_asked_nothing_more() -> None:
    """The main thread closes its pipe as soon as it has ended, maybe between two lines."""
    with subprocess.Popen(["true"], stdout=subprocess.PIPE, text=True) as ended:
        assert ended.stdout is not None
        ended.stdout = ClosedAfterALine(ended.stdout)  # type: ignore[assignment]
        ends = threading.Event()
        ends.set()
        cluster._await_loss(ended, ends)


def test_ray_reports_to_nobody() -> None:
    asks = "import mrl.controller; from ray._common.usage import usage_lib; print(usage_lib.usage_stats_enabled())"
    assert run_python("-c", asks) == "False\n"


def test_ray_keeps_no_record_of_the_calls_that_a_run_makes() -> None:
    assert float(run_python("-c", CALLS)) < 3, "MiB of 4,000 calls"
