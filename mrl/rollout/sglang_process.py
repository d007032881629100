"""Main module of an SGLang engine's process, run by the interpreter of `.venv-sglang`.

It ends with the process that started it, and SGLang's own processes end with it.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile

from mrl.children import die_with
from mrl.rollout.engine_channel import Channel
from mrl.rollout.sglang_hooks import register_hooks
from mrl.rollout.sglang_stand_ins import stand_in
from mrl.weight_sync.sglang_receiver import SOCKETS

ON_CPU = "SGLANG_USE_CPU_ENGINE"


def prepare() -> None:
    """Do what every process of SGLang needs before it imports SGLang. Each of them imports this module first."""
    if os.environ.get(ON_CPU) == "1":
        stand_in()
    register_hooks()


def main() -> None:
    descriptor, parent = map(int, sys.argv[1:])
    die_with(parent)
    # SGLang's sockets are temporary files. Their path must be short, and they must go with the run's directory.
    directory = os.open(os.environ[SOCKETS], os.O_PATH | os.O_DIRECTORY)
    tempfile.tempdir = f"/proc/{os.getpid()}/fd/{directory}"
    from mrl.rollout.sglang_server import run

    run(Channel(socket.socket(fileno=descriptor), "the engine"))


if __name__ in ("__main__", "__mp_main__"):
    prepare()
if __name__ == "__main__":
    main()
