"""Values that follow from the section `lora`."""

from __future__ import annotations

from mrl.config.lora import TARGETS, LoraConfig


def test_scale_is_alpha_over_the_rank_or_over_its_root() -> None:
    assert LoraConfig(rank=16, alpha=8.0).scale == 0.5
    assert LoraConfig(rank=16, alpha=8.0, rslora=True).scale == 2.0


def test_all_linear_names_every_module() -> None:
    assert LoraConfig(rank=1, alpha=1.0).modules == {*TARGETS, "w1", "w2", "w3"}, "Mixtral's names as well"
    assert LoraConfig(rank=1, alpha=1.0, targets=["v_proj"]).modules == {"v_proj"}
    assert LoraConfig(rank=1, alpha=1.0, targets=["up_proj"]).modules == {"up_proj", "w3"}


def test_saved_adapters_of_all_modules_mean_the_same_as_before_latents_had_any() -> None:
    """A checkpoint with `all-linear` names these seven."""
    names = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert LoraConfig(rank=1, alpha=1.0).identity["targets"] == names
