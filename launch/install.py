"""Makes `.venv`, the environment of `make`, or the one named: `make install` runs this with the Python it shall have.

`.venv-lint` and `.venv-unit` are small: what `make lint` and `make unit` need, in the versions that `.venv` has.

An environment counts only when its stamp does: the stamp is written last, and holds a digest of everything that
the environment was made from. Anything else, such as what an interrupted installation leaves, is removed and made
again. Uses the standard library alone.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / (sys.argv[1] if len(sys.argv) > 1 else ".venv")
STAMP = ENVIRONMENT / "mrl-installed"
PINS = (ROOT / "requirements-cpu.txt", ROOT / "requirements-dev.txt")
SMALL = {".venv-lint": "requirements-lint.txt", ".venv-unit": "requirements-unit.txt"}
REQUIREMENTS = (ROOT / SMALL[ENVIRONMENT.name],) if ENVIRONMENT.name in SMALL else PINS
PYTHON = os.path.realpath(sys.executable)  # now: sys.executable may be a link inside the environment that gets removed
MUST_IMPORT = {
    ".venv-lint": "pytest",
    ".venv-unit": "torch, transformers, omegaconf, tensordict, pyarrow, hypothesis, pytest, xdist",
}.get(ENVIRONMENT.name, "torch, transformers, vllm, ray, megatron.core, omegaconf, tensordict, pyarrow, pytest, mrl")


def main() -> int:
    """Install what is missing; return the exit status."""
    if not (3, 11) <= sys.version_info[:2] < (3, 13):
        print(f"mrl needs Python 3.11 or 3.12; {PYTHON} is {sys.version.split()[0]}", file=sys.stderr)
        return 2
    lock = os.open(ENVIRONMENT.with_name(f"{ENVIRONMENT.name}.lock"), os.O_RDWR | os.O_CREAT)
    wait_for(lock)
    stack, package = digest(*REQUIREMENTS, *PINS, Path(__file__)), digest(ROOT / "pyproject.toml")
    stamp = STAMP.read_text() if STAMP.is_file() else ""
    if stamp == f"{stack}\n{package}\n":
        return 0
    try:
        STAMP.unlink(missing_ok=True)
        if not stamp.startswith(stack):
            make_environment(lock)
        if ENVIRONMENT.name not in SMALL:
            pip(lock, "--no-deps", "--no-build-isolation", "--editable", str(ROOT))
        run(lock, str(ENVIRONMENT / "bin" / "python"), "-W", "ignore", "-c", f"import {MUST_IMPORT}")
    except (subprocess.CalledProcessError, KeyboardInterrupt) as error:
        print(f"The installation did not finish; the next `make` starts it afresh.\n  {error!r}", file=sys.stderr)
        return 1
    unfinished = STAMP.with_suffix(".part")
    unfinished.write_text(f"{stack}\n{package}\n")
    unfinished.replace(STAMP)
    print(f"installed: {ENVIRONMENT.name} is complete")
    return 0


def wait_for(lock: int) -> None:
    """Hold `lock` until this process and all that it starts have ended."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("another installation is under way here; waiting for it", flush=True)
        fcntl.flock(lock, fcntl.LOCK_EX)


def digest(*files: Path) -> str:
    """What the environment depends on: these files, the Python, and where it all lies (scripts hold the path)."""
    whole = hashlib.sha256(f"{sys.version}\n{ROOT}\n".encode())
    for file in files:
        whole.update(file.read_bytes())
    return whole.hexdigest()


def make_environment(lock: int) -> None:
    """A new environment with every pinned package, in place of what may stand there."""
    size = {".venv-lint": "50 MB", ".venv-unit": "1 GB"}.get(ENVIRONMENT.name, "2.5 GB, a few minutes")
    print(f"installing into {ENVIRONMENT.name}: about {size}, once", flush=True)
    if ENVIRONMENT.is_symlink():
        ENVIRONMENT.unlink()
    elif ENVIRONMENT.exists():
        shutil.rmtree(ENVIRONMENT)
    run(lock, PYTHON, "-m", "venv", str(ENVIRONMENT))
    named = [f"--requirement={file}" for file in REQUIREMENTS]
    if ENVIRONMENT.name in SMALL:
        named += [f"--constraint={file}" for file in PINS]
    pip(lock, "--no-deps", *named)
    if ENVIRONMENT.name != ".venv-lint":
        # Nothing to add to a CPU build of torch; a CUDA build, which is what some indexes give, needs its libraries.
        pip(lock, next(line for line in PINS[0].read_text().splitlines() if line.startswith("torch==")))


def pip(lock: int, *arguments: str) -> None:
    """`pip install` inside the environment."""
    python = str(ENVIRONMENT / "bin" / "python")
    run(lock, python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments)


def run(lock: int, *command: str) -> None:
    """Run a command that keeps the lock open, so that not even an orphan of it can write beside a second installer."""
    subprocess.run(command, check=True, pass_fds=[lock], stdin=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main())
