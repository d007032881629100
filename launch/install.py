"""Makes `.venv`, the environment of `make`, or the one named: `make install` runs this with the Python it shall have.

`.venv-lint` and `.venv-unit` are small: what `make lint` and `make unit` need, in the versions that `.venv` has.
`.venv-cuda` is for NVIDIA GPUs. What the machine itself must have for it is looked for before anything is downloaded;
not the driver where a second argument, `elsewhere`, says that it is on the machines that share this directory or image.

An environment counts only when its stamp does: the stamp is written last, and holds a digest of everything that
the environment was made from. Anything else, such as what an interrupted installation leaves, is removed and made
again. Uses the standard library alone.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / (sys.argv[1] if len(sys.argv) > 1 else ".venv")
STAMP = ENVIRONMENT / "mrl-installed"
FOR_CUDA = ENVIRONMENT.name == ".venv-cuda"
PINS = (ROOT / ("requirements-cuda.txt" if FOR_CUDA else "requirements-cpu.txt"), ROOT / "requirements-dev.txt")
SMALL = {".venv-lint": "requirements-lint.txt", ".venv-unit": "requirements-unit.txt"}
REQUIREMENTS = (ROOT / SMALL[ENVIRONMENT.name],) if ENVIRONMENT.name in SMALL else PINS
OLDEST_DRIVER = 580  # for CUDA 13
CUDA_ROOM_GB = 15
PYTHON = os.path.realpath(sys.executable)  # now: sys.executable may be a link inside the environment that gets removed
STACK = "torch, transformers, vllm, ray, megatron.core, omegaconf, tensordict, pyarrow, pytest, mrl"
MUST_IMPORT = {
    ".venv-lint": "pytest",
    ".venv-unit": "torch, transformers, omegaconf, tensordict, pyarrow, hypothesis, pytest, xdist",
    ".venv-cuda": f"torch, transformer_engine.pytorch, {STACK}",
}.get(ENVIRONMENT.name, STACK)


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
    if FOR_CUDA and (lacks := list(missing_for_cuda("elsewhere" in sys.argv[2:]))):
        print("nothing has been downloaded; this machine lacks", *lacks, sep="\n  ", file=sys.stderr)
        return 2
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


def missing_for_cuda(driver_is_elsewhere: bool) -> Iterator[str]:
    """What the machine lacks for `.venv-cuda`: what it is, where it was looked for, and what would help.

    CUDA itself, its compiler, cuDNN and NCCL with their headers come as packages.
    """
    if sys.version_info[:2] != (3, 12) or platform.machine() != "x86_64":
        here = f"{PYTHON} is {sys.version.split()[0]} on {platform.machine()}"
        yield f"Python 3.12 on x86_64, which the packages are pinned for: {here}. fix: make install-cuda PYTHON312=PATH"
    if not driver_is_elsewhere:
        driver = first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        if not driver.partition(".")[0].isdigit() or int(driver.partition(".")[0]) < OLDEST_DRIVER:
            found = f"it says {driver!r}" if driver else "it is not there, or does not answer"
            fix = (
                f"driver {OLDEST_DRIVER} or later; if other machines have the GPUs: make install-cuda DRIVER=elsewhere"
            )
            yield f"an NVIDIA driver from {OLDEST_DRIVER} on, asked for by nvidia-smi: {found}. fix: {fix}"
    compiler = os.environ.get("CXX", "c++")
    if not first_line(compiler, "-std=c++20", "-dM", "-E", "-x", "c++", os.devnull):
        yield f"a C++20 compiler, looked for as {compiler}. fix: install g++ 11 or later, or name one in CXX"
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.is_file():
        yield f"Python's headers, looked for as {header}. fix: install python3.12-dev, or another Python in PYTHON312"
    if (free_gb := shutil.disk_usage(ROOT).free / 1e9) < CUDA_ROOM_GB:
        yield f"room: {CUDA_ROOM_GB} GB, of which {ROOT} has {free_gb:.1f}. fix: clone mrl to a larger disk"


def first_line(*command: str) -> str:
    """The first line that a command prints; empty where it is not there, fails or hangs."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return ran.stdout.partition("\n")[0].strip()


def make_environment(lock: int) -> None:
    """A new environment with every pinned package, in place of what may stand there."""
    sizes = {".venv-lint": "60 MB", ".venv-unit": "1 GB", ".venv-cuda": "10 GB, half an hour"}
    size = sizes.get(ENVIRONMENT.name, "2.5 GB, a few minutes")
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
    if FOR_CUDA:
        build_transformer_engine(lock)
    elif ENVIRONMENT.name != ".venv-lint":
        # Nothing to add to a CPU build of torch; a CUDA build, which is what some indexes give, needs its libraries.
        pip(lock, pinned("torch"))


def build_transformer_engine(lock: int) -> None:
    """Build its extension against the torch of the environment, with the headers of the environment's packages."""
    cuda = ENVIRONMENT / "lib" / "python3.12" / "site-packages" / "nvidia" / "cu13"
    os.environ |= {
        "CUDA_HOME": str(cuda),  # else what the machine may have of another version comes first
        "NVTE_BUILD_USE_NVIDIA_WHEELS": "1",
        "NVTE_FRAMEWORK": "pytorch",
        "NVTE_PYTORCH_FORCE_BUILD": "TRUE",  # else a ready one is looked for outside of the package index
        "NVTE_WITH_NCCL_EP": "0",  # wants a later NCCL than torch has
    }
    os.environ.setdefault("MAX_JOBS", str(min(8, len(os.sched_getaffinity(0)))))  # each takes a GB and more
    extension = pinned("transformer_engine").replace("transformer_engine", "transformer_engine_torch")
    pip(lock, "--no-deps", "--no-build-isolation", extension)


def pinned(name: str) -> str:
    """The line of the requirements that has this package."""
    return next(line for line in PINS[0].read_text().splitlines() if line.startswith(f"{name}=="))


def pip(lock: int, *arguments: str) -> None:
    """`pip install` inside the environment."""
    python = str(ENVIRONMENT / "bin" / "python")
    run(lock, python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments)


def run(lock: int, *command: str) -> None:
    """Run a command that keeps the lock open, so that not even an orphan of it can write beside a second installer."""
    subprocess.run(command, check=True, pass_fds=[lock], stdin=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main())
