"""Run a command until standard input closes, then end all of its processes: `python -m mrl.rollout.kept_process`.

The process at the other end of the pipe may be killed at any time, and so may the command. Its children would otherwise
survive and keep the memory of a device.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time

from mrl.children import adopt_orphans, children, describe_status, end_group, reap

_SWEEP_S = 0.01


def main() -> int:
    """Run the command in the arguments. Return 0 if it was ended from outside, 1 if it ended by itself."""
    # Ray kills the children of a worker that it ends, without warning. It does not know their children.
    if keeper := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(keeper, 0)[1])
    os.setsid()
    adopt_orphans()
    pid = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True).pid
    standard_input, ended = sys.stdin.fileno(), os.pidfd_open(pid)
    waiting = select.poll()
    for descriptor in (standard_input, ended):
        waiting.register(descriptor, select.POLLIN | select.POLLHUP)
    by_itself = standard_input not in dict(waiting.poll())
    if by_itself:
        sys.stderr.write(f"{describe_status(os.waitpid(pid, 0)[1])}\n")
    while remaining := children():
        for child in remaining:
            end_group(child)
            reap(child)
        time.sleep(_SWEEP_S)
    return int(by_itself)


if __name__ == "__main__":
    sys.exit(main())
