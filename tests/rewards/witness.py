"""Reward functions that report the state of a worker; every part is a number, as required."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from pathlib import Path

from mrl.rewards.sample import Sample

_PR_GET_PDEATHSIG, _PR_GET_CHILD_SUBREAPER = 2, 37


def score(sample: Sample) -> dict[str, float]:
    """Sleep for `s` seconds, then report the worker and the time."""
    begin = time.monotonic()
    time.sleep(sample.extra_info.get("s", 0.0))
    return {"score": 1.0, "pid": os.getpid(), "begin": begin, "end": time.monotonic()}


def at_length(sample: Sample) -> dict[str, float]:
    """Do the same with parts of these names, so that the answer is as long as the sample wants."""
    return score(sample) | dict.fromkeys(sample.extra_info["names"], 1.0)


def limits(sample: Sample) -> dict[str, float]:
    """Return the limits of the process, and what it inherited from the supervisor."""
    flag, heir = ctypes.c_int(), ctypes.c_int()
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_GET_PDEATHSIG, ctypes.byref(flag))
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(heir))
    listed = os.listdir("/proc/self/fd")
    targets = [os.readlink(f"/proc/self/fd/{name}") for name in listed if os.path.exists(f"/proc/self/fd/{name}")]
    return {
        "score": 1.0,
        "memory_bytes": resource.getrlimit(resource.RLIMIT_AS)[0],
        "memory_bytes_at_most": resource.getrlimit(resource.RLIMIT_AS)[1],
        "file_bytes": resource.getrlimit(resource.RLIMIT_FSIZE)[0],
        "core_bytes": resource.getrlimit(resource.RLIMIT_CORE)[0],
        "leads_a_session": float(os.getsid(0) == os.getpid()),
        "ends_with_the_supervisor": float(flag.value == signal.SIGKILL),
        "adopts_orphans": float(heir.value),
        "standard_is_null": float(all(os.readlink(f"/proc/self/fd/{n}") == os.devnull for n in (0, 1, 2))),
        "others_open": len([target for target in targets if target != os.devnull]),
        "goes_first": float(Path("/proc/self/oom_score_adj").read_text()),
        "threads": float(os.environ["OMP_NUM_THREADS"]),
        "has_path": float("PATH" in os.environ),
        "num_variables": len([name for name in os.environ if name.startswith("MRL_OTHER")]),
    }


def as_told(sample: Sample, factor: float = 1.0, shift: float = 0.0) -> dict[str, float]:
    """Return the sample's own number times an option, plus another, and an extra part."""
    return {"score": factor * float(sample.extra_info["ok"]) + shift, "half": 0.5}


def work(sample: Sample) -> dict[str, float]:
    """Use a core for some seconds, then sleep for some."""
    end = time.process_time() + sample.extra_info["work_s"]
    while time.process_time() < end:
        pass
    return score(sample)


def order(samples: list[Sample]) -> list[float]:
    """Return the position of each sample."""
    return [float(place) for place, _ in enumerate(samples)]


def size(samples: list[Sample]) -> list[float]:
    """Return the number of samples that came together, each only once."""
    return [float(len({sample.response for sample in samples}))] * len(samples)
