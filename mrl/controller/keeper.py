"""Keep the Ray of a run: `python -m mrl.controller.keeper DIRECTORY [CPUS]`, started by the run, which joins that Ray.

It stands in a session of its own with all that it starts: what is sent to the run's group, as by a terminal or
`timeout`, ends none of it. It ends everything below it when its standard input ends or its parent does, however that
was killed, and when Ray itself is lost, of which it says why. The first
line that it writes is Ray's address.
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
"""A debugger may stop a process for a moment."""
_END_S = 4.0
_STDIN, _STDOUT = 0, 1


def main() -> None:
    directory, num_cpus = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None
    adopt_orphans()
    # Ray's own processes die with the thread that starts them, so that is the main one; and a start may take long.
    watch = threading.Thread(target=_watch, args=(os.getppid(), directory))
    watch.start()
    address = ""
    try:
        address = _start(directory / "ray", num_cpus)
    finally:
        if not address:
            traceback.print_exc()  # in the log before the run hears of it, which reads that and ends this process
        _tell(address)
        watch.join()


def _tell(line: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(_STDOUT, f"{line}\n".encode())


def _start(directory: Path, num_cpus: int | None) -> str:
    """Start Ray as `ray.init` does, less the joining, an autoscaler, and a reader of logs that nobody asks for."""
    memory = estimate_available_memory()
    parameters = RayParams(
        num_cpus=num_cpus,
        include_dashboard=False,
        include_log_monitor=False,
        no_monitor=True,
        dashboard_agent_listen_port=0,  # any; its default is one for all, which a Ray of the user's would miss
        temp_dir=str(directory),
        available_memory_bytes=memory,
        object_store_memory=resolve_object_store_memory(memory, None),
        _system_config={"task_events_report_interval_ms": 0},  # of a dashboard that is off: 3 kB of memory a call
    )
    node = Node(parameters, head=True, shutdown_at_exit=False, spawn_reaper=True, ray_init_cluster=True)
    return str(node.gcs_address)


def _watch(parent: int, directory: Path) -> None:
    """Wait for the end of the run, or of Ray, and see that nothing outlives it."""
    while os.getppid() == parent and not select.select([_STDIN], [], [], _POLL_S)[0]:
        if why := _what_is_lost():
            _tell(f"\n{why}")  # an empty line for an address that never came
            # Ray ends a run whose raylet goes, without a word and with status 1: it has first to speak for itself.
            ended = time.monotonic() + _SPEAKS_S
            while os.getppid() == parent and time.monotonic() < ended:
                time.sleep(_POLL_S)
            break
    end_all_below(_END_S)
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)


_needed: dict[int, tuple[str, float]] = {}
"""The processes that Ray cannot be without: their names, and when each was last seen running."""


def _what_is_lost() -> str:
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
            return f"its {name} (pid {pid}) is stopped: a signal or a debugger holds it"
    return ""


if __name__ == "__main__":
    main()
