"""Memory of the gated delta rule: its loop measured, its stand-in in a rehearsal, and the plan's figures."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mrl.engine import delta_rule
from mrl.models.spec import GdnSpec
from mrl.plan.delta_activations import delta_work_bytes
from mrl.rehearse import kernels
from mrl.rehearse.stand_ins import replaced
from mrl.rehearse.timeline import MemoryTimeline, PhaseMemory
from tests.rehearse.measured import Observing

GDN = GdnSpec(key_heads=2, value_heads=4, key_dim=128, value_dim=128, kernel=4, layers=frozenset())
LENGTHS = np.array([1024, 1000, 300])


def measured(lengths: delta_rule.Lengths) -> list[PhaseMemory]:
    """Return the memory of the delta rule, forward and backward."""
    num, timeline = int(lengths.sum()), MemoryTimeline()
    chunks = delta_rule.RowChunks.of(lengths, torch.device("cpu"))
    with Observing(timeline):
        q, k = (torch.randn(num, GDN.key_heads, GDN.key_dim, dtype=torch.bfloat16) for _ in range(2))
        v = torch.randn(num, GDN.value_heads, GDN.value_dim, dtype=torch.bfloat16)
        log_decay, beta = -torch.rand(num, GDN.value_heads), torch.rand(num, GDN.value_heads)
        inputs = [x.requires_grad_() for x in (q, k, v, log_decay, beta)]
        with timeline.phase("forward"):
            outputs = delta_rule.gated_delta_rule((q, k, v), log_decay, beta, chunks)
        grad = torch.ones_like(outputs)
        with timeline.phase("backward"):
            torch.autograd.grad(outputs, inputs, grad)
    return timeline.phases


def test_the_stand_in_needs_the_memory_and_operations_of_the_loop() -> None:
    loop = measured(LENGTHS)
    with replaced([(delta_rule, "_read_in_order", kernels.read_in_order)]):
        stand_in = measured(LENGTHS)
    for real, answered in zip(loop, stand_in, strict=True):
        assert answered.peak == pytest.approx(real.peak, rel=0.01)
        # The loop has no gradient of the zeros before the first chunk.
        assert answered.flops == pytest.approx(real.flops, rel=0.03)


def test_the_plan_counts_what_the_loop_needs() -> None:
    lengths = np.array([1024, 1024])
    forward, backward = measured(lengths)
    for phase, is_backward in ((forward, False), (backward, True)):
        planned = delta_work_bytes(GDN, 1, backward=is_backward) * lengths.sum()
        assert phase.peak - phase.before == pytest.approx(planned, rel=0.01), phase.name
