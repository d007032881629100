"""End runs by signals at different moments and check that nothing is left behind: `python -m tests.endings.endings`.

The check looks at the process table, /dev/shm, the directory for temporary files, and the run's directory. Each run has
a /dev/shm that no other program shares. Then the same command resumes the run, which must reach the metrics of an
undisturbed run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from mrl.children import children_of
from mrl.config.resolved.run_directory import CHECKPOINTS, steps_in
from mrl.controller.node_agent import read_process
from mrl.demo.model import make_model
from mrl.errors import EXIT_STOPPED, MrlError
from mrl.events import PhaseBegin, read_events
from tests.apart import MAIN, ROOT, untimed

GONE_S = 5.0
LIMIT_S = 240.0
NUM_STEPS = 8
MOMENTS = {
    "start": ("start", 0),
    "sync": ("rollout", 2),
    "rollout": ("rollout", 2),
    "update": ("update_actor", 2),
    "validation": ("validation", 2),
    "save": ("save", 2),
    "end": ("save", NUM_STEPS),
}
"""Phase and step that has begun at each moment. A rollout begins with sending the weights to the engines."""
STOPS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
TARGETS = {
    "driver": (*STOPS, signal.SIGKILL),
    "group": STOPS,
    "supervisor": (*STOPS, signal.SIGKILL),
    "raylet": (signal.SIGKILL, signal.SIGSTOP),
    "gcs_server": (signal.SIGKILL, signal.SIGSTOP),
}
WATCHED = ("supervisor", "raylet", "gcs_server")
"""Targets whose runs may restart."""
Process = tuple[int, int]


@dataclass(frozen=True)
class Ending:
    """A signal, its target, and the moment when it is sent."""

    number: signal.Signals
    target: str
    moment: str

    def __str__(self) -> str:
        return f"{self.number.name} {self.target} {self.moment}"

    def delay_s(self) -> float:
        """Return the delay from the start of the phase to the signal; 0 for a phase that is over at once."""
        return random.Random(str(self)).random() * {"sync": 0.0, "rollout": 0.3, "start": 4.0}.get(self.moment, 0.1)

    def codes(self) -> set[int]:
        """Return the exit codes that the command may have."""
        if self.target in ("raylet", "gcs_server"):
            return {0}
        code = {signal.SIGINT: 130, signal.SIGKILL: -signal.SIGKILL}.get(self.number, EXIT_STOPPED)
        # Before the first step nothing can be saved, so a signal ends the run like any program.
        early = {-self.number, 128 + self.number} if self.moment == "start" else set()
        # After the last save the signal may come too late.
        return {code, *early, *({0} if self.moment == "end" else ())}


ENDINGS = [
    Ending(number, target, moment)
    for (target, numbers), moment in product(TARGETS.items(), MOMENTS)
    for number in numbers
]


class Workplace:
    """A model, a configuration, and the metrics of an undisturbed run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config = directory / "run.yaml"
        run = {
            "run": {"name": "whole", "dir": str(directory)},
            "cluster": {"devices_per_node": 1, "device": "cpu"},
            "placement": {"pools": {"all": 1}, "roles": {"actor": "all"}},
            "model": {"path": str(make_model(directory / "model", seed=1))},
            "algorithm": {"advantage": "grpo"},
            "batch": {"prompts_per_step": 4, "samples_per_prompt": 4, "samples_per_update": 8},
            "actor": {"dtype": "float32", "max_tokens_per_device": 128, "optimizer": {"lr": 1e-3}},
            "rollout": {"engine": "transformers", "max_prompt_tokens": 16, "max_response_tokens": 8},
            "data": {
                "train": {"sums": {"dataset": "toy:addition", "options": {"part": "train"}}},
                "validation": {"sums": {"dataset": "toy:addition", "options": {"part": "validation", "largest": 19}}},
            },
            "reward": {"functions": {"length": {"name": "tests.trainer.rewards:shortness"}}, "num_workers": 1},
            "validation": {"every": 1},
            "training": {"steps": NUM_STEPS, "save_every": 1, "keep": NUM_STEPS},
        }
        self.config.write_text(json.dumps(run))

    def command(self, name: str, *overrides: str) -> list[str]:
        return [sys.executable, "-c", MAIN, "train", str(self.config), f"run.name={name}", *overrides]

    def environment(self, temporary: Path) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        return kept | {"PYTHONPATH": str(ROOT), "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}

    def finish(self, name: str, temporary: Path) -> list[dict[str, Any]]:
        """Run to the end and return the metrics of all steps."""
        ran = subprocess.run(
            self.command(name), env=self.environment(temporary), capture_output=True, text=True, timeout=LIMIT_S
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return untimed(self.directory / name)

    def whole(self) -> list[dict[str, Any]]:
        """Return the metrics of the undisturbed run, which runs once."""
        if not (self.directory / "whole").exists():
            with _temporary() as temporary:
                self.finish("whole", temporary)
        return untimed(self.directory / "whole")


def complaints(place: Workplace, ending: Ending) -> list[str]:
    """Run, end the run in this way, resume it, and return the faults found."""
    name, faults = str(ending).replace(" ", "-"), []
    restarts = ["training.max_restarts=2"] if ending.target in WATCHED else []
    seen: set[Process] = set()
    with _temporary() as temporary, _temporary() as shared, (place.directory / f"{name}.log").open("w+") as log:
        environment = place.environment(temporary)
        command = with_shared_memory(shared, place.command(name, *restarts))
        run = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True, preexec_fn=_default_signals
        )
        try:
            _await_moment(run, place.directory / name, ending, seen)
            began = time.monotonic()
            os.kill(_target(run, ending.target), ending.number)
            while run.poll() is None and time.monotonic() - began < LIMIT_S:
                seen |= below(run.pid)
                time.sleep(0.1)
            took_s = time.monotonic() - began
            if run.returncode not in ending.codes():
                faults.append(f"exited with {run.returncode} after {took_s:.1f} s, not with one of {ending.codes()}")
            if ending.number == signal.SIGINT and took_s > GONE_S:
                faults.append(f"took {took_s:.1f} s to end")
            faults += leftovers(seen, temporary, shared)
        finally:
            for process in [*seen, *identities({run.pid})]:
                if is_there(process):
                    os.kill(process[0], signal.SIGKILL)
            run.wait()
        log.seek(0)
        if "Traceback" in (output := log.read()):
            faults.append(f"ended in a traceback:\n{output[-2000:]}")
    steps = steps_in(place.directory / name / CHECKPOINTS)
    if run.returncode == EXIT_STOPPED and not steps:
        faults.append("was asked to stop, but saved nothing")
    with _temporary() as temporary:
        finished, whole = place.finish(name, temporary), place.whole()
        keys = {key for one, other in zip(finished, whole, strict=False) for key in one if one[key] != other.get(key)}
        if finished != whole:
            faults.append(f"metrics of the resumed run differ, {len(finished)} and {len(whole)} lines: {sorted(keys)}")
    return faults


def _default_signals() -> None:
    """Restore default handlers: a run would inherit ignored signals, such as SIGINT in a script's background."""
    for number in STOPS:
        signal.signal(number, signal.SIG_DFL)


def _await_moment(run: subprocess.Popen[bytes], directory: Path, ending: Ending, seen: set[Process]) -> None:
    phase, step = MOMENTS[ending.moment]
    deadline = time.monotonic() + LIMIT_S
    while True:
        assert run.poll() is None, f"the run exited with {run.returncode} before {ending}"
        assert time.monotonic() < deadline, f"the run did not reach {ending} within {LIMIT_S:g} s"
        seen |= below(run.pid)
        with suppress(OSError, MrlError):
            events = [record.event for record in read_events(directory / "events.jsonl")]
            if any(isinstance(event, PhaseBegin) and (event.phase, event.step) == (phase, step) for event in events):
                break
        time.sleep(0.03)
    time.sleep(ending.delay_s())


def _target(run: subprocess.Popen[bytes], target: str) -> int:
    """Return the process id for the signal, negative for a process group."""
    if target == "group":
        return -run.pid
    if target not in ("raylet", "gcs_server"):
        return run.pid
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        for pid, _ in below(run.pid):
            with suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().strip() == target:
                    return pid
        time.sleep(0.1)
    raise AssertionError(f"no process {target} was found within {LIMIT_S:g} s")


def with_shared_memory(directory: Path, command: Sequence[str]) -> list[str]:
    """Return a command that runs `command`, in the same process, with `directory` as its /dev/shm."""
    mount = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    mount += ["sh", "-c", 'mount --bind "$0" /dev/shm && exec "$@"', str(directory)]
    if refusal := subprocess.run([*mount, "true"], capture_output=True, text=True, check=False).stderr:
        pytest.skip(f"this machine allows no mount namespace: {refusal}")
    return [*mount, *command]


def leftovers(seen: set[Process], *directories: Path) -> list[str]:
    """Return the leftovers of these processes and in these directories after a few seconds."""
    deadline = time.monotonic() + GONE_S
    while True:
        left = [f"process {process[0]} stays: {_command(process[0])}" for process in seen if is_there(process)]
        left += [f"{path} stays" for directory in directories for path in directory.iterdir()]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def below(pid: int) -> set[Process]:
    """Return a process and all its descendants, each with its start time."""
    pids, level = {pid}, {pid}
    while level:
        level = set().union(*map(children_of, level)) - pids
        pids |= level
    return set(identities(pids))


def identities(pids: set[int]) -> Iterator[Process]:
    for pid in pids:
        if (read := read_process(pid)) is not None:
            yield pid, read[1]


def is_there(process: Process) -> bool:
    read = read_process(process[0])
    return read is not None and read[1] == process[1] and read[0] not in "ZX"


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:160]
    return "ended in the meantime"


@contextmanager
def _temporary() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="e"))  # not pytest's directory: Ray's sockets need a short path
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the endings and print the faults of each."""
    parser = argparse.ArgumentParser(
        description="End runs in every way at every moment, and check what they leave behind."
    )
    parser.add_argument(
        "--only", default="", help="run only endings whose name contains this, such as `SIGKILL driver save`"
    )
    parser.add_argument("--share", type=int, default=1, help="run one in SHARE of the endings, drawn with a fixed seed")
    options = parser.parse_args(arguments)
    chosen = [ending for ending in ENDINGS if options.only in str(ending)]
    chosen = random.Random(1).sample(chosen, -(-len(chosen) // options.share))
    num_bad = 0
    with tempfile.TemporaryDirectory(prefix="mrl-endings-") as directory:
        place = Workplace(Path(directory))
        for ending in chosen:
            began = time.monotonic()
            try:
                faults = complaints(place, ending)
            except AssertionError as error:
                faults = [str(error)]
            num_bad += bool(faults)
            print(f"{ending!s:32} {time.monotonic() - began:5.0f} s  {'; '.join(faults) or 'held'}", flush=True)
    print(f"{len(chosen) - num_bad} of {len(chosen)} held")
    return min(num_bad, 1)


if __name__ == "__main__":
    sys.exit(main())
