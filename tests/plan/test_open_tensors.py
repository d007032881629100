"""The tensors of published models without a table are those of transformers."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mrl.models.open_model import OpenSpec
from mrl.plan.known_models import known_config, known_models, model_spec
from mrl.plan.open_tensors import OPEN_FAMILIES


def test_tensors_of_models_known_by_name_are_those_of_transformers() -> None:
    names = [name for name, family in known_models().items() if family in OPEN_FAMILIES]
    assert names
    for name in names:
        values = known_config(name)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
        spec = model_spec(name)
        assert isinstance(spec, OpenSpec)
        assert dict(spec.weights) == {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
        assert spec.architecture == type(model).__name__
