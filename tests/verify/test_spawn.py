"""Ranks as processes of this machine: the order of results, and errors that name the failed rank."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from mrl.errors import EngineError
from mrl.verify import spawn
from mrl.verify.spawn import run_distributed


def meet(fault: str) -> tuple[int, int, float, int, str, str]:
    """Return the rank, the sum over all ranks, the number of threads, and the visible GPUs."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if fault == "raise":
        raise ValueError("this rank cannot")
    if fault == "leave":
        os._exit(3)
    if fault == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if fault == "out of memory":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hang":
        time.sleep(600)
    total = torch.tensor(float(rank + 1))
    torch.distributed.all_reduce(total)
    threads, gpus = os.environ["OMP_NUM_THREADS"], os.environ["CUDA_VISIBLE_DEVICES"]
    return rank, size, float(total), torch.get_num_threads(), threads, gpus


def test_every_rank_answers_in_the_order_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    before = dict(os.environ)
    assert run_distributed(2, meet, "", timeout_s=300) == [(rank, 2, 3.0, 1, "1", "") for rank in range(2)]
    assert dict(os.environ) == before


def test_on_gpus_a_rank_sees_what_this_process_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with spawn._environment("gpu"):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert spawn._context("gpu").get_start_method() == "spawn", "a forked process cannot use GPUs after its parent has"


def environment(name: str) -> str | None:
    return os.environ.get(name)


def test_a_rank_has_the_environment_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("earlier", "later"):
        monkeypatch.setenv("MRL_TEST_SETTING", value)
        assert run_distributed(1, environment, "MRL_TEST_SETTING", timeout_s=300) == [value]
    monkeypatch.delenv("MRL_TEST_SETTING")
    assert run_distributed(1, environment, "MRL_TEST_SETTING", timeout_s=300) == [None]


@pytest.mark.parametrize(
    ("fault", "message", "limit_s"),
    [
        ("raise", r"rank 0 of 1 failed:\n(.|\n)*ValueError: this rank cannot", 300),
        ("leave", r"rank 0 of 1 ended without an answer: process \d+ exited with status 3$", 300),
        ("crash", r"rank 0 of 1 .* SIGSEGV \(Segmentation fault\) ended process \d+\nFatal (.|\n)* in meet\n", 300),
        ("out of memory", r"rank 0 of 1 ended without an answer: SIGKILL \(Killed\) ended process \d+$", 300),
        ("hang", r"ranks \[0\] of 1 did not answer within 0.5 s", 0.5),
    ],
)
def test_a_rank_that_fails_is_named(fault: str, message: str, limit_s: float) -> None:
    with pytest.raises(EngineError, match=message):
        run_distributed(1, meet, fault, timeout_s=limit_s)
