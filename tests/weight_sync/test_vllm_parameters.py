"""Writes into a model's parameters, and their digests. Two modules replace the models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mrl.weight_sync.digest import Digests


def test_the_digest_is_of_what_a_parameter_holds_and_not_of_what_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter with lower precision than the sent tensor has lost bits, and the sender must notice."""
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


def test_whole_tensors_are_kept_although_the_sender_uses_its_buffer_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM keeps its inputs until it has all of a module's tensors."""
    from mrl.weight_sync import vllm_parameters

    for name in ("initialize_layerwise_reload", "finalize_layerwise_reload"):
        monkeypatch.setattr(vllm_parameters, name, lambda *_: None)
    kept: list[tuple[str, torch.Tensor]] = []
    model = torch.nn.Module()
    model.load_weights = kept.extend  # type: ignore[assignment]

    def sent() -> Iterator[tuple[str, torch.Tensor]]:
        buffer = torch.empty(4)
        for number in range(3):
            yield f"tensor {number}", buffer.fill_(number)

    expected = Digests()
    for number in range(3):
        expected.add(f"tensor {number}", torch.full((4,), float(number)))
    assert vllm_parameters.load_full_tensors(model, None, sent()) == expected.read()
    assert [tensor.tolist() for _, tensor in kept] == [[float(number)] * 4 for number in range(3)]
