"""Keep the Ray of a run: `python -m mrl.controller.keeper DIRECTORY [CPUS]`, started by the run, which joins this Ray.

It runs in a separate session with everything it starts: signals to the run's process group, such as those of a terminal
or `timeout`, do not reach it. It ends all of its children when its standard input closes, when its parent ends (even by
SIGKILL), and when Ray itself is lost, for which it prints the reason. The first line of its output is Ray's address.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import sys
import threading
import time
import traceback
from pathlib import Path

from ray._private.node import Node
from ray._private.parameter import RayParams
from ray._private.utils import estimate_available_memory, resolve_object_store_memory

from mrl.children import adopt_orphans, children, end_all_below
from mrl.controller.node_agent import read_process

_NEEDED = ("raylet", "gcs_server")
_POLL_S = 0.05
_SPEAKS_S = 2.0
_STOPPED_S = 3.0
"""Longest stop of a process that is tolerated: a debugger may stop it for a moment."""
_END_S = 4.0
_STDIN, _STDOUT = 0, 1


def main() -> None:
    directory, num_cpus = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None
    adopt_orphans()
    # Ray's processes die with the thread that starts them, so this must be the main thread. A start may take long.
    watch = threading.Thread(target=_watch, args=(os.getppid(), directory))
    watch.start()
    address = ""
    try:
        address = _start(directory / "ray", num_cpus)
    finally:
        if not address:
            traceback.print_exc()  # before the run is notified: it reads the log and ends this process
        _print_line(address)
        watch.join()


def _print_line(line: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(_STDOUT, f"{line}\n".encode())


def _start(directory: Path, num_cpus: int | None) -> str:
    """Start Ray like `ray.init`, without joining it, and without autoscaler, log monitor and dashboard."""
    memory = estimate_available_memory()
    parameters = RayParams(
        num_cpus=num_cpus,
        include_dashboard=False,
        include_log_monitor=False,
        no_monitor=True,
        dashboard_agent_listen_port=0,  # any free port: the default is fixed, and another Ray may need it
        temp_dir=str(directory),
        available_memory_bytes=memory,
        object_store_memory=resolve_object_store_memory(memory, None),
        _system_config={"task_events_report_interval_ms": 0},  # only for the dashboard; saves 3 kB of memory per call
    )
    node = Node(parameters, head=True, shutdown_at_exit=False, spawn_reaper=True, ray_init_cluster=True)
    return str(node.gcs_address)


def _watch(parent: int, directory: Path) -> None:
    """Wait for the end of the run or of Ray, and end all remaining processes."""
    while os.getppid() == parent and not select.select([_STDIN], [], [], _POLL_S)[0]:
        if reason := _lost_process():
            _print_line(f"\n{reason}")  # the first line is empty if Ray has not started
            # Ray ends a run with a lost raylet silently, with status 1. Give the run time to print its message first.
            ended = time.monotonic() + _SPEAKS_S
            while os.getppid() == parent and time.monotonic() < ended:
                time.sleep(_POLL_S)
            break
    end_all_below(_END_S)
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)


_needed: dict[int, tuple[str, float]] = {}
"""Processes that Ray cannot do without: their names, and when each was last seen running."""


def _lost_process() -> str:
    for pid in children() - _needed.keys():
        with contextlib.suppress(OSError):
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            if name in _NEEDED:
                _needed[pid] = name, time.monotonic()
    for pid, (name, seen_running) in _needed.items():
        state = (read_process(pid) or "X")[0]
        if state in "ZX":
            return f"its {name} (pid {pid}) has died"
        if state not in "Tt":
            _needed[pid] = name, time.monotonic()
        elif time.monotonic() - seen_running > _STOPPED_S:
            return f"its {name} (pid {pid}) is stopped by a signal or a debugger"
    return ""


if __name__ == "__main__":
    main()
