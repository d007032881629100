"""A rehearsal of a model that torch shards measures what a run needs: the same code on two real ranks, and alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.multiprocessing import get_context  # type: ignore[attr-defined]

from mrl.config.lora import LoraConfig
from mrl.config.schema import ParallelConfig as Layout
from mrl.verify.spawn import run_distributed
from tests.models.tiny_models import make_tiny
from tests.rehearse import measured_shards
from tests.rehearse.measured_shards import Case

LIMIT_S = 300.0


@pytest.mark.slow
def test_peaks_of_a_rehearsal_are_those_of_a_run(tmp_path: Path) -> None:
    model = str(make_tiny("llama", tmp_path / "llama"))
    lora = LoraConfig(rank=4, alpha=8)
    cases = [
        Case(str(make_tiny("qwen2", tmp_path / "qwen2"))),
        Case(model, layout=Layout(cp=2)),
        Case(model, "bfloat16", recompute=True),
        Case(model, "bfloat16", recompute=True, lora=lora),
    ]
    real = run_distributed(2, measured_shards.really, cases, timeout_s=LIMIT_S)
    with get_context("spawn").Pool(2) as processes:  # groups and modes of a rehearsal are global
        rehearsed = processes.starmap(measured_shards.rehearsed, [(cases, 0), (cases, 1)])
    for rank in (0, 1):
        for case, peaks, alone in zip(cases, real[rank], rehearsed[rank], strict=True):
            assert alone == pytest.approx(peaks, rel=0.001), (case, rank)
