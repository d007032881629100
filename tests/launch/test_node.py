"""Tasks of a node: supervise the run, wait for the other nodes, and find its address."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path

import pytest

from mrl import files
from mrl.errors import SetupError
from mrl.launch import node
from mrl.launch.node import free_port, is_there, own_address, read, supervise, writable_caches

SAVES = """
import signal, sys, time
signal.signal(signal.SIGUSR1, lambda number, frame: sys.exit(75))
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def attempt(tmp_path: Path) -> Path:
    return tmp_path


def stop_when_ready(attempt: Path) -> None:
    while "ready" not in read(attempt / "train.log"):
        time.sleep(0.05)
    files.write_text(attempt / "stop", "")


def test_a_run_is_told_to_stop_and_its_exit_code_is_kept(attempt: Path) -> None:
    threading.Thread(target=stop_when_ready, args=[attempt]).start()
    assert supervise([sys.executable, "-c", SAVES], attempt) == 75


def test_a_run_that_was_told_before_it_could_listen_has_lost_nothing(attempt: Path) -> None:
    threading.Thread(target=stop_when_ready, args=[attempt]).start()
    assert supervise(["sh", "-c", "echo ready; exec sleep 60"], attempt) == 75


@pytest.mark.parametrize(("command", "code"), [("exit 3", 3), ("kill -9 $$", 128 + signal.SIGKILL), ("true", 0)])
def test_other_exit_codes_are_those_of_a_shell(command: str, code: int, attempt: Path) -> None:
    assert supervise(["sh", "-c", command], attempt) == code


def test_scancel_reaches_the_run_alone(attempt: Path) -> None:
    """Run in a separate process, like a task: SIGTERM must end the run, and not the task that has to report it."""
    program = "import sys; from pathlib import Path; from mrl.launch.node import supervise\n"
    directory = f"Path({str(attempt)!r})"
    program += f"code = supervise(['sh', '-c', 'echo ready; exec sleep 60'], {directory})\n"
    program += "print('left with', code)"
    task = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    while "ready" not in read(attempt / "train.log"):
        time.sleep(0.05)
    task.send_signal(signal.SIGTERM)
    assert task.communicate(timeout=20)[0] == f"left with {128 + signal.SIGTERM}\n"


def test_workers_leave_when_the_first_node_has_failed_or_never_came(
    attempt: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("SLURMD_NODENAME", "here")
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)  # this process continues afterwards
    arguments = [str(attempt), "--config", "none", "--cpus", "1", "--interface", "lo", "--join-limit-s"]
    assert node.main([*arguments, "0.1"]) == 1
    assert "Ray did not start on the first node within 0.1 s" in capsys.readouterr().err
    files.write_text(attempt / "exit_code", "2")
    assert node.main([*arguments, "60"]) == 1


def test_the_address_is_that_of_the_interface_and_never_a_loopback_by_accident() -> None:
    assert own_address("lo", "anything") == "127.0.0.1"
    with pytest.raises(SetupError, match='the interface "nothere0" has no address') as caught:
        own_address("nothere0", "anything")
    assert "lo" in caught.value.fix
    with pytest.raises(SetupError, match="localhost resolves to 127"):
        own_address(None, "localhost")


def test_what_ray_started_is_ended_even_where_it_does_not_end_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for `ray start`, with a child that ignores SIGTERM, and whose parent does so too."""
    stubborn = "import os, signal, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    stubborn += f"open({str(tmp_path / 'pids')!r}, 'a').write(f'{{os.getpid()}}\\n')\n"
    program = stubborn + "import subprocess\nif len(sys.argv) > 1: subprocess.Popen([sys.executable, __file__])\n"
    (tmp_path / "stubborn.py").write_text(program + "time.sleep(60)\n")
    started = subprocess.Popen

    def start(command: list[str], **options: object) -> subprocess.Popen[bytes]:
        assert any(word.startswith("--temp-dir=") for word in command)
        return started([sys.executable, str(tmp_path / "stubborn.py"), "parent"], **options)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(node, "_ENDS_S", 0.5)
    with node.ray_node("127.0.0.1", "here", []):
        while not (tmp_path / "pids").exists() or len((tmp_path / "pids").read_text().split()) < 2:
            time.sleep(0.05)
    time.sleep(0.2)
    for pid in (tmp_path / "pids").read_text().split():
        state = Path(f"/proc/{pid}/stat")
        assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_ray_that_does_not_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    started = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: started(["sh", "-c", "exit 7"], **options))
    with (
        pytest.raises(SetupError, match="Ray ended on this node with status 7"),
        node.ray_node("127.0.0.1", "here", []) as ray,
    ):
        ray.await_start(20)
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: started(["sleep", "60"], **options))
    with (
        pytest.raises(SetupError, match=r"did not start on this node within 0\.1 s"),
        node.ray_node("127.0.0.1", "here", []) as ray,
    ):
        ray.await_start(0.1)
    assert not ray.directory.exists()


@pytest.mark.parametrize("num_ends", [1, 2])
def test_a_ray_that_ends_while_it_starts_is_started_once_more(
    num_ends: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A raylet waits 15 s for its agents, whose code may come from a slow file system the first time."""
    started, directories = subprocess.Popen, list[str]()

    def start(command: list[str], **options: object) -> subprocess.Popen[bytes]:
        (option,) = [word for word in command if word.startswith("--temp-dir=")]
        directories.append(option.partition("=")[2])
        program = "exit 7" if len(directories) <= num_ends else f"touch {directories[-1]}/{node._STARTED}; sleep 60"
        return started(["sh", "-c", program], **options)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "Popen", start)
    ends = pytest.raises(node.RayEnded, match="Ray ended on this node with status 7")
    with nullcontext() if num_ends == 1 else ends, node.started_ray("127.0.0.1", "here", [], 20) as ray:
        assert str(ray.directory) == directories[1]
        assert not Path(directories[0]).exists()
    assert len(directories) == 2
    assert "Ray ended on this node with status 7. Ray is started once more.\n" in capsys.readouterr().err


def test_libraries_have_caches_where_the_home_directory_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "/scratch/triton")
    for name in ("XDG_CACHE_HOME", "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    with writable_caches():
        assert "XDG_CACHE_HOME" not in os.environ, "they are below the home directory"
    monkeypatch.setenv("HOME", str(tmp_path / "of-the-image"))
    with writable_caches():
        caches = {name: Path(os.environ[name]) for name in ("XDG_CACHE_HOME", "VLLM_CACHE_ROOT")}
        (directory,) = {cache.parent for cache in caches.values()}
        assert len({*caches.values()}) == 2
        assert directory.stat().st_mode & 0o777 == 0o700
        assert os.environ["TRITON_CACHE_DIR"] == "/scratch/triton", "the site's own"
        caches["XDG_CACHE_HOME"].mkdir()
    assert not directory.exists()


def test_a_port_is_free() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))


def test_files_of_an_attempt(attempt: Path) -> None:
    assert read(attempt / "address") == ""
    assert not is_there(attempt / "stop")
    files.write_text(attempt / "nodes", "a\nb\n")
    assert read(attempt / "nodes") == "a\nb"
    assert is_there(attempt / "nodes")
    assert os.listdir(attempt) == ["nodes"]


@pytest.mark.parametrize(("num_nodes", "wait_s"), [(8, 0.2), (512, 2.048), (2048, 8.192)])
def test_thousands_of_nodes_ask_the_file_server_no_more_often_than_hundreds(
    num_nodes: int, wait_s: float, attempt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    def end_after_a_look(seconds: float) -> None:
        waits.append(seconds)
        files.write_text(attempt / "exit_code", "1")

    files.write_text(attempt / "nodes", "\n".join(f"node{number}" for number in range(num_nodes)))
    monkeypatch.setattr(time, "sleep", end_after_a_look)
    monkeypatch.setenv("SLURMD_NODENAME", "node1")
    assert node._other(attempt, Namespace(join_limit_s=60.0, interface="lo")) == 1
    assert waits == [wait_s]
