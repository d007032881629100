"""Create `.venv`, or the environment named by the first argument. `make install` runs this with the Python to use.

`.venv-lint` and `.venv-unit` are small: the packages of `make lint` and `make unit`, in the versions of `.venv`.
`.venv-sglang` has SGLang and its versions of packages, and finds the others in `.venv`, which must exist.
`.venv-cuda` is for NVIDIA GPUs. Before anything is downloaded, the machine is checked for its requirements; with the
second argument `elsewhere`, not for the driver, because other machines with the GPUs share this directory or image.

An environment is complete only if its stamp matches. The stamp is written last, and holds a digest of everything that
the environment was made from. Anything else, such as the rest of an interrupted installation, is removed and created
again. This script uses only the standard library.
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
BASE = ROOT / ".venv"
FOR_CUDA = ENVIRONMENT.name == ".venv-cuda"
PINS = (ROOT / ("requirements-cuda.txt" if FOR_CUDA else "requirements-cpu.txt"), ROOT / "requirements-dev.txt")
SMALL = {
    ".venv-lint": "requirements-lint.txt",
    ".venv-unit": "requirements-unit.txt",
    ".venv-sglang": "requirements-sglang.txt",
}
FOR_SGLANG = ENVIRONMENT.name == ".venv-sglang"
REQUIREMENTS = (ROOT / SMALL[ENVIRONMENT.name],) if ENVIRONMENT.name in SMALL else PINS
OLDEST_DRIVER = 580  # for CUDA 13
CUDA_ROOM_GB = 15
PYTHON = os.path.realpath(sys.executable)  # resolved now: it may be a link inside the environment that is removed
STACK = "torch, transformers, vllm, ray, megatron.core, omegaconf, tensordict, pyarrow, pytest, mrl"
MUST_IMPORT = {
    ".venv-lint": "pytest",
    ".venv-unit": "torch, transformers, omegaconf, tensordict, pyarrow, hypothesis, pytest, xdist",
    ".venv-sglang": "torch, transformers, dill, gguf, orjson, triton",  # SGLang itself needs stand-ins on a CPU
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
    if FOR_CUDA and (missing := list(missing_for_cuda("elsewhere" in sys.argv[2:]))):
        print("nothing has been downloaded; missing on this machine:", *missing, sep="\n  ", file=sys.stderr)
        return 2
    try:
        STAMP.unlink(missing_ok=True)
        if not stamp.startswith(stack):
            make_environment(lock)
        if ENVIRONMENT.name not in SMALL:
            pip(lock, "--no-deps", "--no-build-isolation", "--editable", str(ROOT))
        run(lock, str(ENVIRONMENT / "bin" / "python"), "-W", "ignore", "-c", f"import {MUST_IMPORT}")
    except (subprocess.CalledProcessError, KeyboardInterrupt) as error:
        print(f"The installation did not finish; the next `make` starts it again.\n  {error!r}", file=sys.stderr)
        return 1
    unfinished = STAMP.with_suffix(".part")
    unfinished.write_text(f"{stack}\n{package}\n")
    unfinished.replace(STAMP)
    print(f"installed: {ENVIRONMENT.name} is complete")
    return 0


def wait_for(lock: int) -> None:
    """Hold `lock` until this process and all its descendants have ended."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("another installation is under way here; waiting for it", flush=True)
        fcntl.flock(lock, fcntl.LOCK_EX)


def digest(*files: Path) -> str:
    """Return a digest of these files, the Python, and the location (scripts contain its path)."""
    whole = hashlib.sha256(f"{sys.version}\n{ROOT}\n".encode())
    for file in files:
        whole.update(file.read_bytes())
    return whole.hexdigest()


def missing_for_cuda(driver_is_elsewhere: bool) -> Iterator[str]:
    """Yield each missing requirement of `.venv-cuda`: its name, where it was searched, and a fix.

    CUDA itself, its compiler, cuDNN and NCCL with their headers are installed as packages.
    """
    if sys.version_info[:2] != (3, 12) or platform.machine() != "x86_64":
        here = f"{PYTHON} is {sys.version.split()[0]} on {platform.machine()}"
        yield f"Python 3.12 on x86_64, for which the packages are pinned: {here}. fix: make install-cuda PYTHON312=PATH"
    if not driver_is_elsewhere:
        driver = first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        if not driver.partition(".")[0].isdigit() or int(driver.partition(".")[0]) < OLDEST_DRIVER:
            answer = f"its answer is {driver!r}" if driver else "nvidia-smi does not exist or does not answer"
            fix = (
                f"driver {OLDEST_DRIVER} or later; if other machines have the GPUs: make install-cuda DRIVER=elsewhere"
            )
            yield f"an NVIDIA driver {OLDEST_DRIVER} or later, queried with nvidia-smi: {answer}. fix: {fix}"
    compiler = os.environ.get("CXX", "c++")
    if not first_line(compiler, "-std=c++20", "-dM", "-E", "-x", "c++", os.devnull):
        yield f"a C++20 compiler, tried as {compiler}. fix: install g++ 11 or later, or name a compiler in CXX"
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.is_file():
        yield f"Python's headers, expected at {header}. fix: install python3.12-dev, or another Python in PYTHON312"
    if (free_gb := shutil.disk_usage(ROOT).free / 1e9) < CUDA_ROOM_GB:
        yield f"disk space: {CUDA_ROOM_GB} GB needed, {free_gb:.1f} GB free at {ROOT}. fix: clone mrl to a larger disk"


def first_line(*command: str) -> str:
    """Return the first line that a command prints; empty if it does not exist, fails or hangs."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return ran.stdout.partition("\n")[0].strip()


def make_environment(lock: int) -> None:
    """Create a new environment with every pinned package, replacing an existing one."""
    sizes = {".venv-lint": "60 MB", ".venv-unit": "1 GB", ".venv-sglang": "1.4 GB", ".venv-cuda": "10 GB, half an hour"}
    size = sizes.get(ENVIRONMENT.name, "2.5 GB, a few minutes")
    print(f"installing into {ENVIRONMENT.name}: about {size}, once", flush=True)
    if ENVIRONMENT.is_symlink():
        ENVIRONMENT.unlink()
    elif ENVIRONMENT.exists():
        shutil.rmtree(ENVIRONMENT)
    run(lock, PYTHON, "-m", "venv", str(ENVIRONMENT))
    named = [f"--requirement={file}" for file in REQUIREMENTS]
    if FOR_SGLANG:
        packages = [Path(sysconfig.get_path("purelib", "venv", {"base": str(root)})) for root in (ENVIRONMENT, BASE)]
        (packages[0] / "zz-base.pth").write_text(f"{packages[1]}\n")
    elif ENVIRONMENT.name in SMALL:
        named += [f"--constraint={file}" for file in PINS]
    pip(lock, "--no-deps", *named)
    if FOR_CUDA:
        build_transformer_engine(lock)
    elif ENVIRONMENT.name not in (".venv-lint", ".venv-sglang"):
        # This adds nothing to a CPU build of torch. Some indexes offer only a CUDA build, which needs its libraries.
        pip(lock, pinned("torch"))


def build_transformer_engine(lock: int) -> None:
    """Build its extension against the environment's torch, with the headers of the environment's packages."""
    cuda = ENVIRONMENT / "lib" / "python3.12" / "site-packages" / "nvidia" / "cu13"
    os.environ |= {
        "CUDA_HOME": str(cuda),  # otherwise another version on the machine comes first
        "NVTE_BUILD_USE_NVIDIA_WHEELS": "1",
        "NVTE_FRAMEWORK": "pytorch",
        "NVTE_PYTORCH_FORCE_BUILD": "TRUE",  # otherwise it looks for a built one outside of the package index
        "NVTE_WITH_NCCL_EP": "0",  # needs a later NCCL than torch has
    }
    os.environ.setdefault("MAX_JOBS", str(min(8, len(os.sched_getaffinity(0)))))  # each needs 1 GB or more
    extension = pinned("transformer_engine").replace("transformer_engine", "transformer_engine_torch")
    pip(lock, "--no-deps", "--no-build-isolation", extension)


def pinned(name: str) -> str:
    """Return the line of the requirements for this package."""
    return next(line for line in PINS[0].read_text().splitlines() if line.startswith(f"{name}=="))


def pip(lock: int, *arguments: str) -> None:
    """Run `pip install` inside the environment."""
    python = str(ENVIRONMENT / "bin" / "python")
    run(lock, python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments)


def run(lock: int, *command: str) -> None:
    """Run a command that inherits the lock, so that a second installer waits even for an orphan of it."""
    subprocess.run(command, check=True, pass_fds=[lock], stdin=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main())
