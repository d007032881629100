"""Predicted bytes equal Megatron's real ones, and predicted traffic equals that of the reshard's own planner."""

from __future__ import annotations

import pytest

from mrl.config.lora import LoraConfig
from mrl.config.schema import ParallelConfig as Layout
from mrl.engine import vocab_head
from mrl.plan import activations
from mrl.verify.spawn import run_distributed
from tests.plan.accounting import Accounts, Case, accounts
from tests.plan.saved import SavedCase, saved_and_predicted

LIMIT_S = 300.0


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Case, list[Accounts]]]:
    """Each case with what both ranks hold."""
    from tests.models.tiny_models import make_tiny  # transformers is not for the ranks, which import this module

    directory = tmp_path_factory.mktemp("accounting")
    models = {
        family: str(make_tiny(family, directory / family))
        for family in ("qwen2", "qwen3", "mixtral", "glm4_moe", "qwen3_5_moe_text")
    }
    value_model = str(make_tiny("qwen2", directory / "values", head="score"))
    cases = [
        Case(models["qwen2"], Layout()),  # two data-parallel ranks share the optimizer state; tied embeddings
        Case(models["qwen2"], Layout(tp=2)),  # a vocabulary that two does not divide
        Case(models["qwen2"], Layout(pp=2)),  # both stages hold the embedding
        Case(models["qwen2"], Layout(pp=2, vpp=2), dtype="float32"),
        Case(value_model, Layout(), head="score"),
        Case(models["qwen3"], Layout()),  # norms of heads, which buffers pad
        Case(models["mixtral"], Layout(ep=2)),
        Case(
            models["glm4_moe"], Layout(tp=2, ep=2, sequence_parallel=True)
        ),  # a shared expert, and biases in no buffer
        Case(models["mixtral"], Layout(tp=2, sequence_parallel=True)),  # experts whole on each tensor rank
        Case(models["qwen3_5_moe_text"], Layout(tp=2, ep=2, sequence_parallel=True)),  # trained numbers in float32
        Case(models["mixtral"], Layout(pp=2)),
        Case(models["mixtral"], Layout()),
        Case(models["qwen3"], Layout(tp=2, sequence_parallel=True), lora=LoraConfig(rank=3, alpha=1.0)),
        Case(models["qwen2"], Layout(pp=2, vpp=2), lora=LoraConfig(rank=8, alpha=1.0, targets=["q_proj", "v_proj"])),
        Case(models["glm4_moe"], Layout(), lora=LoraConfig(rank=8, alpha=1.0, targets=["q_proj", "o_proj"])),
        Case(value_model, Layout(pp=2), head="score", lora=LoraConfig(rank=8, alpha=1.0)),
        Case(models["mixtral"], Layout(ep=2), lora=LoraConfig(rank=8, alpha=1.0)),
        Case(models["glm4_moe"], Layout(tp=2, sequence_parallel=True), lora=LoraConfig(rank=8, alpha=1.0)),
    ]
    ranks = run_distributed(2, accounts, cases, timeout_s=LIMIT_S)
    return list(zip(cases, map(list, zip(*ranks, strict=True)), strict=True))


def test_parameters_and_gradients_are_predicted_to_the_byte(found: list[tuple[Case, list[Accounts]]]) -> None:
    for case, ranks in found:
        for rank in ranks:
            assert rank.held["parameters"] == rank.predicted.parameters, case
            assert rank.held["gradients"] == rank.predicted.gradients, case
            assert rank.predicted.parameters > 0


def test_the_optimizer_state_is_predicted_to_the_byte(found: list[tuple[Case, list[Accounts]]]) -> None:
    """For all owners together; the prediction is for the owner with the most."""
    for case, ranks in found:
        held = [rank.held["optimizer"] for rank in ranks]
        assert sum(held) == sum(rank.owned_bytes for rank in ranks), case
        for rank, size in zip(ranks, held, strict=True):
            assert 0 <= rank.predicted.optimizer - size <= 0.01 * size, case
        if all(rank.is_exact for rank in ranks):
            assert held == [rank.predicted.optimizer for rank in ranks], case
    assert sum(rank.is_exact for _, ranks in found for rank in ranks) > 5


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_layer_saves_what_is_predicted_to_the_byte(num_ranks: int) -> None:
    """But for what the CPU's layers do otherwise: norms in float32, and attention that copies what it gives."""
    h, q, k, heads, kv_heads = 128, 128, 64, 4, 2
    norms = 2 * (4 * h + 4)
    head_norms = 4 * (q + k) + 4 * (heads + kv_heads)
    latent_norms = 4 * (48 + 40) + 4 * 2
    # Zero-centered norms keep float32 in place of bfloat16, and 1 + weight. A convolution has zeros before each row.
    wide_norms, weights, zeros, decays = norms + 2 * 2 * h, 4 * 2 * h / 256, 3 * 2 * 160 / 64, 2 * 4 * 4 / 256
    linear = wide_norms + 4 * 96 + weights + zeros + decays  # the norm of the 96 values also keeps float32
    gated = wide_norms + weights + 2 * q + head_norms + 2 * (q + k) + 4 * 2 * 32 / 256
    exact: dict[SavedCase, float] = {
        SavedCase("Qwen2.5-0.5B", Layout()): norms + 2 * q,
        SavedCase("Qwen3-8B", Layout()): norms + 2 * q + head_norms,
        SavedCase("Mixtral-8x7B", Layout()): norms + 2 * q,
        SavedCase("GLM-4.5", Layout()): norms + 2 * q + head_norms,
        SavedCase("DeepSeek-V3", Layout()): norms + latent_norms,  # the copy takes off the padding, and is planned
        SavedCase("GLM-4.7-Flash", Layout()): norms + 2 * q + latent_norms,
        SavedCase("Qwen3.5-35B-A3B", Layout()): (linear + gated) / 2,
    }
    if num_ranks == 2:
        whole = Layout(tp=2, sequence_parallel=True)
        exact = {
            SavedCase("Qwen2.5-0.5B", Layout(tp=2)): norms + q,
            SavedCase("Qwen2.5-0.5B", whole): norms / 2 + q,
            SavedCase("Qwen3-8B", whole): norms / 2 + q + head_norms / 2,
            SavedCase("Mixtral-8x7B", whole): norms / 2 + q,
            SavedCase("GLM-4.5-Air", whole): norms / 2 + q,
            SavedCase("DeepSeek-V3", whole): (norms + latent_norms) / 2,
            SavedCase("Qwen3.5-9B", whole): (linear + weights + gated + weights + 1) / 4,
        }
    found = run_distributed(num_ranks, saved_and_predicted, list(exact), timeout_s=LIMIT_S)
    for rank in found:
        for (case, extra), (saved, predicted) in zip(exact.items(), rank, strict=True):
            assert saved == predicted + extra, case


def test_the_head_is_planned_with_its_own_tiles() -> None:
    assert {"cpu": activations.TILE_BYTES["cpu"], "cuda": activations.TILE_BYTES["gpu"]} == vocab_head.TILE_BYTES
    assert vocab_head.MIN_COLUMNS == activations.MIN_COLUMNS
