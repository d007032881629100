"""Programs and their leftover processes, side by side in one process that adopts orphans, like in workers."""

from __future__ import annotations

from pathlib import Path

from tests.apart import run_python

SIDE_BY_SIDE = """
import asyncio, sys, time
from pathlib import Path
from mrl.agents.program_process import ProgramProcess
from mrl.children import adopt_orphans

DAEMON = "setsid sh -c 'sleep 600 & echo $$ $! >&2; touch $READY; wait' & until [ -e $READY ]; do sleep 0.01; done"
ENDS, STAYS = "; echo last words >&2; exit 3", "; sleep 600"

def lives(pid):
    return Path(f"/proc/{pid}/stat").exists()

async def main():
    adopt_orphans()
    def start(word, ends):
        variables = {"KEY": word, "READY": f"{sys.argv[1]}/{word}"}
        return ProgramProcess.start(["sh", "-c", DAEMON + ends], variables, word)
    other = await start("other", STAYS)
    while not Path(sys.argv[1], "other").exists():
        await asyncio.sleep(0.01)
    began = time.monotonic()
    program = await start("mine", ENDS)
    status, stderr = await program.ended
    assert time.monotonic() - began < 10, "it waits for a process that holds its stderr"
    pids, words = stderr.splitlines()
    assert (status, words) == (3, "last words")
    assert not [pid for pid in pids.split() if lives(pid)]
    theirs = [child for child in Path("/proc/self/task").glob("*/children") for child in child.read_text().split()]
    assert theirs, "the other continues"
    await other.close()
    assert (await other.ended)[0] == -9
    left = [file for file in Path("/proc/self/task").glob("*/children") if file.read_text().split()]
    assert not left, "no process remains, running or ended"

asyncio.run(main())
print("done")
"""


def test_a_program_takes_all_along_that_it_has_started_and_nobody_else(tmp_path: Path) -> None:
    assert run_python("-c", SIDE_BY_SIDE, str(tmp_path)) == "done\n"
