"""Memory of layers with experts: tokens on their way to the experts and back, by hand."""

from __future__ import annotations

import pytest

from mrl.config.schema import ParallelConfig
from mrl.plan.activations import forward_activations, layer_bytes, stage_activations
from tests.plan.planning import subject_of
from tests.plan.test_memory import FUSED, QWEN_MOE, trained


def test_backward_in_a_layer_of_experts_takes_what_a_235b_takes_by_hand() -> None:
    """Qwen3-235B-A22B at tp 2, ep 32: h 4096, g 1536, 8 experts a token, of which the busiest rank has 1.25 times as
    many as the mean. All is made again. When the experts' outputs return, 4 rows of the hidden size are sorted for
    sending, 5 received, 5 put out, and 5 in the order of arrival."""
    subject = subject_of("grpo-qwen3-235b-a22b-16n8g")
    spec, model = subject.specs["actor"], subject.config.actor
    taken, tokens = stage_activations(spec, model, 0, 100), model.max_tokens_per_device
    layer, row = layer_bytes(spec, model, has_experts=True), 2 * 4096
    assert taken.at_work == pytest.approx(tokens * (layer.total + (4 + 5 + 5 + 5) * row + 3 * row), rel=1e-6)
    # Without backward: the residual, the norms' outputs, the gathered sequence and the router; inputs and outputs of
    # the experts with their three inner tensors.
    router = (24 * 8 + 5 * 128) / 2
    scored = 4 * row / 2 + row + router + (4 + 5 + 5 + 5) * row + 5 * 3 * 2 * 1536
    assert forward_activations(spec, model, 0) == pytest.approx(tokens * scored, rel=1e-6)


def test_a_rank_with_one_expert_sorts_no_tokens() -> None:
    """Mixtral-8x22B at tp 2, ep 8: h 6144, g 16384, 2 experts a token. A rank sends a row of the hidden size for each
    token and receives 1.25; gradients of the experts' inner tensors are larger."""
    subject = subject_of("grpo-mixtral-8x22b-8n8g")
    spec, model = subject.specs["actor"], subject.config.actor
    taken, tokens = stage_activations(spec, model, 0, 100), model.max_tokens_per_device
    layer, row, inner = layer_bytes(spec, model, has_experts=True), 2 * 6144, 1.25 * 2 * 16384
    assert taken.at_work == pytest.approx(tokens * (layer.total + 2 * inner + 3 * row), rel=1e-6)
    router = (24 * 2 + 5 * 8) / 2
    scored = 4 * row / 2 + row + router + (1 + 1.25 + 1.25) * row + 3 * inner
    assert forward_activations(spec, model, 0) == pytest.approx(tokens * scored, rel=1e-6)


def test_experts_that_are_split_sum_their_outputs_in_float32() -> None:
    split = trained(
        parallel=ParallelConfig(tp=2, ep=4, etp=2, sequence_parallel=True), megatron=dict.fromkeys(FUSED, True)
    )
    layer, row = layer_bytes(QWEN_MOE, split, has_experts=True), 2 * 2048
    # Sorted for sending 4, received 5; of the experts' outputs 10, 10 in the order of arrival, 20 in float32, and 10 of
    # the sum.
    taken = stage_activations(QWEN_MOE, split, 0, 100)
    assert taken.at_work / 1000 == pytest.approx((4 + 5 + 10 + 10 + 20 + 10) * row + 3 * row, rel=1e-6)
    assert layer.mlp == pytest.approx(10 * row + 5 * 2 * 2 * 768 + (24 * 8 + 5 * 128) / 2)


def test_experts_keep_the_tokens_that_are_sent_to_them() -> None:
    dense = layer_bytes(QWEN_MOE, trained(), has_experts=False)
    experts = layer_bytes(QWEN_MOE, trained(parallel=ParallelConfig(ep=8)), has_experts=True)
    assert experts.attention == dense.attention
    sent = 2 * 8 * 1.25 * (2048 + 6 * 768) + 24 * 8 + 5 * 128
    assert experts.mlp + experts.expert_activation == pytest.approx(sent)
