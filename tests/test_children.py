"""Ending a process and its descendants removes the shared memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHARES = """
import time
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
shared = SharedMemory(create=True, size=1)
status = Path("/proc", str(resource_tracker._resource_tracker._pid), "status")
while not int(status.read_text().partition("SigIgn:")[2].split()[0], 16) >> 14 & 1:
    time.sleep(0.01)  # it ignores SIGTERM once it has started
print(shared.name, flush=True)
time.sleep(600)
"""
ENDS = """
import subprocess, sys
from mrl.children import adopt_orphans, end_all_below
adopt_orphans()
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
print(child.stdout.readline().strip(), end_all_below(5.0))
"""


def test_what_a_family_shared_is_removed_with_it() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", ENDS, SHARES], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    name, is_ended = ran.stdout.split()
    left = Path("/dev/shm", name)
    assert not left.exists()
    assert is_ended == "True"
