"""Slurm as far as mrl's batch script sees it, on one machine: every task of a step is a separate process.

`python fake_slurm.py install DIRECTORY` puts `sbatch`, `srun`, `scontrol` and `sinfo` there. `FAKE_SLURM` names the
directory of its state: `job-N/script` runs, `job-N/usr1` (made by a test) sends the signal that `--signal=B:` asks
for, `job-N/requeue` (made by `scontrol requeue`) runs it again, `job-N/ended` holds the exit codes of its attempts.
On nodes listed in `broken` no task can be started; on nodes listed in `stuck` a task starts, and hangs.
`hosts`, where it is there, has for each node the words that make a command run there.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

COMMANDS = ("sbatch", "srun", "scontrol", "sinfo")


def install(directory: Path) -> None:
    """Write the commands."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in COMMANDS:
        command = directory / name
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).resolve()}" {name} "$@"\n')
        command.chmod(0o755)


def options_of(script: str) -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", script, re.MULTILINE))


def sbatch(arguments: list[str]) -> int:
    """Start a job in the background and print its number."""
    state, script = Path(os.environ["FAKE_SLURM"]), Path(arguments[-1])
    job = state / f"job-{1 + len(list(state.glob('job-*')))}"
    job.mkdir(parents=True)
    (job / "script").write_text(script.read_text())
    options = options_of(script.read_text())
    exported = [] if options["export"] == "NONE" else options["export"].split(",")
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "FAKE_SLURM", *exported) if name in os.environ}
    subprocess.Popen(
        [sys.executable, __file__, "job", str(job)],
        env=kept,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=(job / "stderr").open("w"),
        start_new_session=True,
    )
    print(f"{job.name.removeprefix('job-')};fake")
    return 0


def run_job(job: Path) -> None:
    """The attempts of a job, one after another."""
    options, number, attempt = options_of((job / "script").read_text()), job.name.removeprefix("job-"), 0
    num_nodes = int(options["nodes"])
    environment = os.environ | {
        "SLURM_JOB_ID": number,
        "SLURM_JOB_NUM_NODES": str(num_nodes),
        "SLURM_JOB_NODELIST": f"node[1-{num_nodes}]",
        "SLURM_CPUS_PER_TASK": options["cpus-per-task"],
    }
    while True:
        (job / "requeue").unlink(missing_ok=True)
        restarts = {"SLURM_RESTART_COUNT": str(attempt)} if attempt else {}
        with Path(options["output"].replace("%j", number)).open("a") as output:
            script = subprocess.Popen(
                ["bash", str(job / "script")],
                cwd=options["chdir"],
                env=environment | restarts,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            while script.poll() is None:
                if (job / "usr1").exists():
                    (job / "usr1").unlink()
                    assert options["signal"].startswith("B:USR1@"), "to the batch shell alone"
                    script.send_signal(signal.SIGUSR1)
                time.sleep(0.1)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(script.pid, signal.SIGTERM)  # steps end with their job
        attempt += 1
        with (job / "ended").open("a") as ended:
            ended.write(f"{script.returncode}\n")
        if not (job / "requeue").exists():
            break
    (job / "gone").touch()


def srun(arguments: list[str]) -> int:
    """One task per node; the highest exit code."""
    first = next(place for place, argument in enumerate(arguments) if not argument.startswith("--"))
    given = dict(argument[2:].partition("=")[::2] for argument in arguments[:first])
    tasks, state = [], Path(os.environ["FAKE_SLURM"])
    enter = json.loads(table.read_text()) if (table := state / "hosts").exists() else {}
    for number in range(int(given["nodes"])):
        name = f"node{number + 1}"
        command = arguments[first:]
        if name in _named(state / "broken"):
            command = ["sh", "-c", "echo 'no such image' >&2; exit 1"]
        elif name in _named(state / "stuck"):
            command = ["sleep", "600"]
        own = {"SLURM_PROCID": str(number), "SLURM_NODEID": str(number), "SLURMD_NODENAME": name}
        with Path(given["output"].replace("%N", name)).open("w") as output:
            command = [*enter.get(name, ()), *command]
            tasks.append(subprocess.Popen(command, env=os.environ | own, stdout=output, stderr=subprocess.STDOUT))
    return max(task.wait() % 256 for task in tasks)


def _named(file: Path) -> list[str]:
    return file.read_text().split() if file.exists() else []


def scontrol(arguments: list[str]) -> int:
    """`show hostnames`, and `requeue`."""
    if arguments[:2] == ["show", "hostnames"]:
        last = int(re.fullmatch(r"node\[1-(\d+)\]", arguments[2])[1])  # type: ignore[index]
        print("\n".join(f"node{number}" for number in range(1, last + 1)))
        return 0
    verb, job = arguments
    assert verb == "requeue", verb
    (Path(os.environ["FAKE_SLURM"]) / f"job-{job}" / "requeue").touch()
    return 0


def main(name: str, arguments: list[str]) -> int:
    if name == "install":
        install(Path(arguments[0]))
    elif name == "job":
        run_job(Path(arguments[0]))
    elif name == "sinfo":
        print("cpu*|up|0/2/0/2|(null)|64|1-00:00:00")
    else:
        return {"sbatch": sbatch, "srun": srun, "scontrol": scontrol}[name](arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
