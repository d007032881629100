"""A node's view of its processes and logs, on processes of this machine."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mrl import harmless
from mrl.controller import diagnosis, node_agent
from mrl.controller.node_agent import NodeAgent, NodeLost, ProcessId, ProcessView, own_process, read_process, view
from mrl.controller.resource_pool import RayResourcePool
from mrl.controller.worker import Dispatch, register, registered_methods
from mrl.controller.worker_log import harmless_path, log_path, make_log_directory, stack_path, tail

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "1000"])
    yield process
    process.kill()
    process.wait()


def id_of(process: subprocess.Popen[bytes]) -> ProcessId:
    seen = read_process(process.pid)
    assert seen is not None
    return ProcessId(process.pid, seen[1])


def test_a_process_is_seen_as_the_kernel_has_it(sleeper: subprocess.Popen[bytes]) -> None:
    process = id_of(sleeper)
    assert not view(process).is_gone
    assert not view(process).is_stopped
    sleeper.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 5
    while not view(process).is_stopped and time.monotonic() < deadline:
        time.sleep(0.01)
    assert view(process).is_stopped
    assert not view(process).is_gone
    sleeper.kill()
    deadline = time.monotonic() + 5
    while not view(process).is_gone and time.monotonic() < deadline:
        time.sleep(0.01)
    assert view(process).is_gone, "a zombie has ended too"
    sleeper.wait()
    assert view(process) == ProcessView(None)
    assert own_process().pid == os.getpid()
    assert not view(own_process()).is_gone


def test_another_process_with_the_same_number_is_not_the_one_that_was(sleeper: subprocess.Popen[bytes]) -> None:
    process = id_of(sleeper)
    assert view(ProcessId(process.pid, process.start_ticks + 1)).is_gone


def test_processes_that_do_not_end_are_ended(sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    agent, process = NodeAgent(), id_of(sleeper)
    other = ProcessId(process.pid, process.start_ticks + 1)
    with monkeypatch.context() as patched:
        patched.setattr("mrl.controller.node_agent._END_WAIT_S", 60)
        begin = time.monotonic()
        agent.kill_all([other])
        assert time.monotonic() - begin < 30, "what is gone is not waited for"
    assert sleeper.poll() is None, "and not ended either"
    agent.kill_all([process])
    assert sleeper.wait(5) == -signal.SIGKILL


def test_without_its_raylet_a_node_is_lost() -> None:
    agent = NodeAgent()
    assert not agent.poll_states([own_process()])[0].is_gone
    assert agent.memory().kills >= 0
    agent._raylet += 1
    assert agent.poll_states([own_process(), own_process()]) == [ProcessView(None)] * 2
    with pytest.raises(NodeLost):
        agent.memory()


def test_native_frames_that_cannot_be_had_are_explained(
    sleeper: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosis, "NATIVE_S", 0.5)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert diagnosis.native_frames(sleeper.pid) == "py-spy is not installed"
    spy = tmp_path / "py-spy"
    for script, said in {
        "echo 'Error: Permission denied' >&2; echo more >&2; exit 1": "py-spy: Error: Permission denied",
        "exit 0": "py-spy: no output",
        "exec /bin/sleep 9": "py-spy: no result within 0.5 s",
    }.items():
        spy.write_text(f"#!/bin/sh\n{script}\n")
        spy.chmod(0o700)
        assert diagnosis.native_frames(sleeper.pid) == said


def test_the_kernel_says_where_threads_are(sleeper: subprocess.Popen[bytes]) -> None:
    agent, process = NodeAgent(), id_of(sleeper)
    deadline = time.monotonic() + 5
    while "nanosleep" not in diagnosis.kernel_view(sleeper.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert re.fullmatch(r"main thread \(sleep\): sleeping in \w*nanosleep", agent.threads(process)[1])
    own = diagnosis.kernel_view(os.getpid())
    assert own.startswith("main thread (")
    assert "): running" in own
    sleeper.kill()
    sleeper.wait()
    assert agent.threads(process) == ("", "")


def test_a_process_that_has_no_log_yet_is_not_ended_by_the_question(
    sleeper: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    answer = NodeAgent().stacks([(id_of(sleeper), str(log_path(tmp_path, 0)))])
    assert answer == ["none: it has not opened its log yet"]
    assert sleeper.poll() is None


def test_a_stopped_process_is_woken_to_say_where_it_is(tmp_path: Path) -> None:
    log = log_path(tmp_path, 0)
    program = REDIRECTED.replace("{signal}", str(int(signal.SIGSTOP))).replace("{harmless}", "True")
    with subprocess.Popen([sys.executable, "-c", program, str(log)]) as process:
        identity = id_of(process)
        deadline = time.monotonic() + 30
        while not view(identity).is_stopped and time.monotonic() < deadline:
            time.sleep(0.01)
        assert view(identity).is_stopped
        (answer,) = NodeAgent().stacks([(identity, str(log))])
        process.kill()
    assert 'File "<string>", line' in answer


def test_a_node_sees_files_and_says_how_it_is_guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").touch()
    agent = NodeAgent()
    assert agent.sees(str(tmp_path / "here"))
    assert not agent.sees(str(tmp_path / "there"))
    assert not agent.sees(str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    assert agent.describe()[1] == "token"
    monkeypatch.delenv("RAY_AUTH_MODE")
    assert agent.describe()[1] == "disabled"


def test_the_tail_of_a_log_is_its_last_lines_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MRL_TEST_TOKEN", "canary-5up3r-hidden")
    log = tmp_path / "rank-0.log"
    assert tail(log, 3) == ""
    log.write_text("\n".join([*(f"line {number}" for number in range(500)), "canary-5up3r-hidden", "end"]))
    lines = tail(log, 3).splitlines()
    assert (len(lines), lines[0], lines[2]) == (3, "line 499", "end")
    assert "canary" not in lines[1]
    log.write_text("one\ntwo\n")
    assert NodeAgent().tail(str(log), 20) == "one\ntwo"


def test_a_role_that_starts_again_gets_other_logs(tmp_path: Path) -> None:
    directories = [make_log_directory(tmp_path, role) for role in ("actor", "actor", "critic")]
    assert [path.relative_to(tmp_path).as_posix() for path in directories] == [
        "logs/actor.1",
        "logs/actor.2",
        "logs/critic.1",
    ]
    assert stat.S_IMODE(directories[0].stat().st_mode) == 0o700
    assert log_path(directories[0], 3).name == "rank-3.log"
    assert stack_path(log_path(directories[0], 3)).name == "rank-3.stack"


REDIRECTED = """
import os, sys, warnings
from pathlib import Path
from mrl.controller.worker_log import redirect_output
redirect_output(Path(sys.argv[1]))
print("the key is canary-5up3r-hidden")
print("loud", file=sys.stderr)
os.write(1, b"from below\\n")
warnings.warn("Apex is not installed. Falling back to Torch Norm" if {harmless} else "this one says something")
os.kill(os.getpid(), {signal})
os._exit(0)
"""


def test_everything_that_a_process_says_is_in_its_log_and_its_stacks_beside_it(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    program = REDIRECTED.replace("{signal}", str(int(node_agent.STACK_SIGNAL))).replace("{harmless}", "False")
    environment = os.environ | {"MRL_TEST_TOKEN": "canary-5up3r-hidden"}
    ran = subprocess.run(
        [sys.executable, "-c", program, str(log)], capture_output=True, text=True, env=environment, check=False
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    text = log.read_text()
    assert "canary" not in text
    assert [line for line in text.splitlines() if "key" not in line] == [
        "loud",
        "from below",
        "<string>:9: UserWarning: this one says something",
    ]
    assert tail(log, 1) == "<string>:9: UserWarning: this one says something"
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert 'File "<string>", line' in stack_path(log).read_text()


@pytest.mark.skipif(harmless._HAS_GPU, reason="what is written there means something where there is a GPU")
def test_a_warning_that_is_known_to_be_harmless_stands_beside_the_log(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    program = REDIRECTED.replace("{signal}", "0").replace("{harmless}", "True")
    subprocess.run([sys.executable, "-c", program, str(log)], check=True)
    assert log.read_text().splitlines() == ["the key is canary-5up3r-hidden", "loud", "from below"]
    assert "Falling back to Torch Norm" in harmless_path(log).read_text()
    assert stat.S_IMODE(harmless_path(log).stat().st_mode) == 0o600
    assert tail(log, 1).splitlines() == [
        "(1 lines of harmless warnings left out, 1 of them are in rank-0.harmless)",
        "from below",
    ]


def test_a_pool_is_whole_nodes_and_a_rest() -> None:
    def sizes(num_devices: int, here: int) -> list[int]:
        return RayResourcePool("all", num_devices, here, "cpu")._bundles_per_node

    assert sizes(20, 8) == [8, 8, 4]
    assert sizes(16, 8) == [8, 8]
    assert sizes(3, 8) == [3]
    assert RayResourcePool("all", 20, 8, "gpu").describe() == 'pool "all": 20 GPUs on 3 nodes'
    assert RayResourcePool("all", 3, 8, "cpu").describe() == 'pool "all": 3 CPU slots on 1 node'


def test_only_methods_that_take_batches_declare_columns() -> None:
    class Worker:
        @register(Dispatch.DATA_PARALLEL, reads=("a",), writes=("b",), optional=("c",))
        def run(self) -> None:
            """Marked."""

        def hidden(self) -> None:
            """Not marked."""

    (spec,) = registered_methods(Worker).values()
    assert (spec.name, spec.dispatch) == ("run", Dispatch.DATA_PARALLEL)
    assert (spec.reads, spec.writes, spec.optional) == (("a",), ("b",), ("c",))
    for dispatch in (Dispatch.ONE_TO_ALL, Dispatch.RANK_ZERO):
        for columns in ({"reads": ("a",)}, {"writes": ("a",)}, {"optional": ("a",)}):
            with pytest.raises(
                ValueError, match=f"only DATA_PARALLEL methods can read and write columns, not {dispatch.name} methods"
            ):
                register(dispatch, **columns)


RAYLET = """
import os, subprocess, sys, time
sleepers = [subprocess.Popen(["sleep", "60"], env={**os.environ, "RAY_JOB_ID": job}) for job in ("01", "02")]
agent = '''
import time
from mrl.controller.node_agent import NodeAgent
agent = NodeAgent()
for _ in range(4):
    agent.hear(1.0)
    print(time.monotonic(), flush=True)
    time.sleep(0.4)
time.sleep(60)
'''
heard = subprocess.Popen([sys.executable, "-c", agent], env={**os.environ, "RAY_JOB_ID": "01"}, stdout=subprocess.PIPE)
last = [float(line) for line in heard.stdout][-1]
print(time.monotonic() - last, heard.wait(), sleepers[0].wait(5), sleepers[1].poll())
sleepers[1].kill()
"""


def test_a_node_that_hears_nothing_of_its_run_ends_what_it_has_of_it() -> None:
    """By then the driver has given up the node, and the run has restarted elsewhere."""
    ran = subprocess.run([sys.executable, "-c", RAYLET], cwd=ROOT, capture_output=True, text=True, timeout=40)
    after_s, *ends = ran.stdout.split()
    assert ends == ["-9", "-9", "None"], ran.stderr
    assert 0.9 < float(after_s) < 3
