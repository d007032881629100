"""The reference model as a role: enabled by its pool, with the actor's layout by default."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from mrl.config.arithmetic import has_reference, role_mesh
from mrl.config.resolved.load import load_config, rename_models
from mrl.config.resolved.render import render
from mrl.config.schema import ParallelConfig

APART = ("placement.pools={train: 2, frozen: 2}", "placement.roles.reference=frozen")


def test_reference_stays_with_the_actor_unless_it_has_a_pool(valid: str, write: Callable[..., str]) -> None:
    config = load_config(write(valid)).config
    assert config.reference is None
    assert "reference" not in config.model_roles()
    assert has_reference(config)


def test_reference_with_a_pool_has_the_layout_of_the_actor(valid: str, write: Callable[..., str]) -> None:
    config = load_config(write(valid), [*APART, "actor.dtype=float32"]).config
    reference, actor = config.model_roles()["reference"], config.actor
    for name in ("parallel", "dtype", "max_tokens_per_device", "megatron"):
        assert getattr(reference, name) == getattr(actor, name), name
    assert role_mesh(config, "reference").world_size == 2
    assert config.model_of("reference") == ("model.path", "tiny/model")
    assert not has_reference(config), "the actor keeps no copy"


def test_reference_may_have_a_layout_and_a_model_of_its_own(valid: str, write: Callable[..., str]) -> None:
    own = ("reference.parallel={tp: 1, pp: 2}", "reference.path=other/model", "reference.max_tokens_per_device=2048")
    config = load_config(write(valid), [*APART, *own]).config
    assert config.reference is not None
    assert config.reference.parallel == ParallelConfig(pp=2)
    assert config.reference.max_tokens_per_device == 2048
    assert config.model_of("reference") == ("reference.path", "other/model")
    renamed = rename_models(config, {"model.path": "there/model", "reference.path": "there/other"})
    assert renamed.model_of("reference") == ("reference.path", "there/other")
    assert dataclasses.replace(renamed, model=config.model, reference=config.reference) == config


def test_reference_takes_from_the_actor_each_key_that_it_is_not_given(valid: str, write: Callable[..., str]) -> None:
    more = ("reference.parallel.sequence_parallel=true", "reference.megatron.bias_activation_fusion=true")
    of_actor = ("actor.megatron.bias_dropout_fusion=false", "reference.dtype=null", "actor.dtype=float32")
    config = load_config(write(valid), [*APART, *more, *of_actor]).config
    assert config.reference is not None
    assert config.reference.parallel == ParallelConfig(tp=2, sequence_parallel=True)
    assert config.reference.megatron == {"bias_dropout_fusion": False, "bias_activation_fusion": True}
    assert config.reference.dtype == "float32"
    assert config.actor.parallel == ParallelConfig(tp=2)


@pytest.mark.parametrize("more", [(), ("reference.parallel={tp: 1, pp: 2}",)])
def test_shown_configuration_loads_as_the_same(more: tuple[str, ...], valid: str, write: Callable[..., str]) -> None:
    resolved = load_config(write(valid), [*APART, *more])
    assert load_config(write(render(resolved), "again.yaml")).config == resolved.config
