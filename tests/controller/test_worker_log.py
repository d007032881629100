"""The log of a worker: a full disk does not stop training."""

from __future__ import annotations

from pathlib import Path

from tests.apart import run_python

FULL = """
import resource, sys
from pathlib import Path
from mrl.controller.worker_log import redirect_output
redirect_output(Path(sys.argv[1]))
print("before", flush=True)
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
for _ in range(50):
    print("a line of 24 characters", flush=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
print("after", flush=True)
"""


def test_what_a_full_disk_does_not_take_of_a_log_is_counted_and_told_of(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    run_python("-c", FULL, str(log))
    text = log.read_text()
    assert text.startswith("before\na line of 24 characters\n")
    assert text.endswith("after\n")
    (note,) = [line for line in text.splitlines() if "the disk was full" in line]
    num_lost = int(note.rpartition("(")[2].split()[0])
    there = text.partition("(")[0].removeprefix("before\n")
    assert num_lost + len(there) == 50 * len("a line of 24 characters\n")
