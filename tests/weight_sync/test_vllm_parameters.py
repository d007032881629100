"""Writes into a model's parameters, and their digests. Two modules replace the models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mrl.errors import RolloutError
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


class Packing:
    """A method of a module that counts how often its weights were packed."""

    count = 0

    def process_weights_after_loading(self, module: torch.nn.Module) -> None:
        self.count += 1


def test_a_parameter_of_two_modules_leaves_the_second_module_its_other_parameters() -> None:
    """The router's correction bias is a parameter of the gate and of the experts, whose weights are theirs alone."""
    from mrl.weight_sync import vllm_parameters

    layer, gate, experts, packing = torch.nn.Module(), torch.nn.Linear(3, 4, bias=False), torch.nn.Module(), Packing()
    layer.gate, layer.experts = gate, experts
    gate.correction_bias = experts.correction_bias = torch.nn.Parameter(torch.zeros(4))
    experts.w13, experts.w2 = (torch.nn.Parameter(torch.zeros(4, size, 3, dtype=torch.bfloat16)) for size in (6, 5))
    experts.quant_method = packing  # type: ignore[assignment]
    sent = {
        "gate.weight": torch.ones(4, 3),
        "gate.correction_bias": torch.arange(4) / 1000 + 7,
        "experts.w13": torch.ones(4, 6, 3).bfloat16(),
        "experts.w2": torch.ones(4, 5, 3).bfloat16(),
    }
    writing, counts, expected = vllm_parameters.ParameterWriter(layer), [], Digests()
    for name, tensor in sent.items():
        writing.write(name, tensor)
        expected.add(name, tensor)
        counts.append(packing.count)
    assert writing.finish() == expected.read()
    assert counts == [0, 0, 0, 1], "packed once, when its own parameters are complete"
    assert torch.equal(experts.correction_bias, sent["gate.correction_bias"])
    assert torch.equal(experts.w2, sent["experts.w2"])


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


def test_scales_belong_to_a_weight_in_fp8_and_fit_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from mrl.weight_sync import vllm_parameters

    layer = torch.nn.Linear(3, 2, bias=False, dtype=torch.bfloat16)
    slot = vllm_parameters.ParameterSpec(torch.bfloat16, (2, 3), in_place=False)
    monkeypatch.setattr(
        vllm_parameters, "_owners", lambda model: {"x": vllm_parameters.ModuleParameters(layer, {"weight": slot})}
    )
    monkeypatch.setattr(vllm_parameters, "takes_fp8", lambda module: "channel")
    weight, scales = layer.weight.data, torch.ones(2, 1)
    writing = vllm_parameters.ParameterWriter(torch.nn.Module())
    with pytest.raises(RolloutError, match=r"sends scales float32 \[1, 2\], but the model needs float32 \[2, 1\]"):
        writing.write("x.weight_scale", scales.t())
    with pytest.raises(RolloutError, match="no weight that takes scales"):
        writing.write("y.weight_scale", scales)
    writing.write("x.weight_scale", scales)
    writing.write("x.weight", weight)
    with pytest.raises(RolloutError, match=r"1 scales came without weights in FP8: x\.weight_scale"):
        writing.finish()
    with pytest.raises(RolloutError, match="the trainer sends float8_e4m3fn"):
        vllm_parameters.ParameterWriter(torch.nn.Module()).write("x.weight", weight.to(torch.float8_e4m3fn))
