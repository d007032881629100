"""Runs a command until standard input closes, and leaves nothing of it behind: `python -m mrl.rollout.kept_process`.

Whoever holds the other end may be killed at any time, and so may the command, whose own children would live on with
the memory of a device.
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
    """Run the command of the arguments; 0 where it was told to end, 1 where it ended by itself."""
    # Ray kills the children of a worker that it ends, before they can do anything; of their children it knows nothing.
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
    while left := children():
        for child in left:
            end_group(child)
            reap(child)
        time.sleep(_SWEEP_S)
    return int(by_itself)


if __name__ == "__main__":
    sys.exit(main())
