"""A rehearsal measures what a run needs: the same code on a tiny model, once on real ranks and once alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.multiprocessing import get_context  # type: ignore[attr-defined]

from mrl.config.schema import ParallelConfig as Layout
from mrl.verify.spawn import run_distributed
from tests.models.tiny_models import make_tiny
from tests.rehearse import measured

LIMIT_S = 300.0
LAYOUTS = {
    "qwen2": Layout(),  # two data-parallel ranks share the optimizer's state; tied embeddings
    "llama": Layout(tp=2, sequence_parallel=True),
    "qwen3": Layout(pp=2),
    "mistral": Layout(cp=2),
}


@pytest.mark.slow
def test_peaks_of_a_rehearsal_are_those_of_a_run(tmp_path: Path) -> None:
    cases = [(str(make_tiny(family, tmp_path / family)), layout) for family, layout in LAYOUTS.items()]
    real = run_distributed(2, measured.really, cases, timeout_s=LIMIT_S)
    unobserved = run_distributed(2, measured.unobserved, cases, timeout_s=LIMIT_S)
    assert [[loss for _, loss in rank] for rank in real] == unobserved, "measuring changes no loss"
    with get_context("spawn").Pool(2) as processes:  # groups and modes of a rehearsal are global
        rehearsed = processes.starmap(measured.rehearsed, [(cases, 0), (cases, 1)])
    for rank in (0, 1):
        for family, (peaks, _), alone in zip(LAYOUTS, real[rank], rehearsed[rank], strict=True):
            assert alone == pytest.approx(peaks, rel=0.01), (family, rank)
