"""What is written into a model's parameters, and what is said of them afterwards; the models are two modules."""

from __future__ import annotations

import pytest
import torch

from mrl.weight_sync.digest import Digests


def test_the_digest_is_of_what_a_parameter_holds_and_not_of_what_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter of fewer digits than was sent has lost some: the sender must hear of it."""
    from mrl.weight_sync import vllm_parameters  # loads vLLM

    exact, rounded = (torch.nn.Linear(3, 2, bias=False, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    slot = vllm_parameters.ParameterSpec(torch.float32, (2, 3), in_place=True)
    owners = {
        name: vllm_parameters.ModuleParameters(module, {"weight": slot})
        for name, module in (("exact", exact), ("rounded", rounded))
    }
    monkeypatch.setattr(vllm_parameters, "_owners", lambda model: owners)
    sent = torch.linspace(0.1, 0.7, 6).view(2, 3)
    writing = vllm_parameters.ParameterWriter(torch.nn.Module())
    for name in owners:
        writing.write(f"{name}.weight", sent)
    expected = Digests()
    expected.add("exact.weight", sent)
    expected.add("rounded.weight", sent.bfloat16().float())
    assert writing.finish() == expected.read()
    assert torch.equal(exact.weight, sent)
    assert expected.read()["exact.weight"] != expected.read()["rounded.weight"]
