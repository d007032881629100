"""SGLang's worker writes each parameter once, and always answers the trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from mrl.errors import RolloutError
from mrl.rollout.engine import EngineSettings
from mrl.weight_sync import sglang_receiver
from mrl.weight_sync.digest import digest
from tests.rollout.trainer_side import InBackground, send

Tensors = list[tuple[str, Tensor]]
EXPERTS = "0.experts.routed_experts.w2_weight"


class Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.Module()
        self.experts.w2_weight = torch.nn.Parameter(torch.zeros(2, 3))


def model() -> torch.nn.Module:
    return torch.nn.Sequential(Experts(), torch.nn.Linear(2, 2, bias=False))


def right() -> Tensors:
    return [(EXPERTS, torch.arange(6.0).view(2, 3)), ("1.weight", torch.arange(4.0).view(2, 2))]


def test_parameters_have_what_was_sent_and_its_digests() -> None:
    written = model()
    assert sglang_receiver.write(written, iter(right())) == {name: digest(tensor) for name, tensor in right()}
    for parameter, (_, tensor) in zip(written.parameters(), right(), strict=True):
        assert torch.equal(parameter, tensor)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda sent: sent[:1], "1 of the model's parameters were not sent: 1.weight"),
        (lambda sent: [*sent, sent[0]], f"{EXPERTS}: this parameter was sent twice"),
        (lambda sent: [("1.bias", sent[1][1])], r"1\.bias: the model has no parameter of this name"),
        (lambda sent: [("1.weight", sent[0][1])], r"sends float32 \[2, 3\], but the model has float32 \[2, 2\]"),
        (lambda sent: [("1.weight", sent[1][1].bfloat16())], r"sends bfloat16 \[2, 2\]"),
    ],
)
def test_what_does_not_fit_is_refused(spoil: Callable[[Tensors], Tensors], message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        sglang_receiver.write(model(), iter(spoil(right())))


def test_modules_that_rearrange_their_weights_are_refused() -> None:
    for name, value in (("quant_method", SimpleNamespace()), ("use_intel_amx_backend", True)):
        rearranging = model()
        setattr(rearranging[1], name, value)  # type: ignore[index]
        with pytest.raises(RolloutError, match=r"1, which rearranges|weights of 1|^1 is stored by"):
            sglang_receiver.write(rearranging, iter(right()))


def test_a_refusal_reaches_both_sides_and_the_next_version_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_receiver, "_of_all_ranks", lambda reason: (not reason, reason))
    monkeypatch.setenv(sglang_receiver.SOCKETS, str(tmp_path))
    monkeypatch.setenv(sglang_receiver.REPLICA, "replica")
    settings = EngineSettings(Path("model"), "float32", "cpu", 40, 100, tmp_path, "replica")
    written = model()
    updater = SimpleNamespace(tp_rank=0, get_model=lambda: written)
    try:
        sending = InBackground(send, settings, 4, right())
        answer = sglang_receiver.receive_update(lambda *_: (True, ""), updater, [], "mrl:5")
        assert answer == (False, "the trainer sends version 4 instead of version 5")
        with pytest.raises(RolloutError, match="refused the weights: the trainer sends version 4"):
            sending.result()
        sending = InBackground(send, settings, 5, right())
        assert sglang_receiver.receive_update(lambda *_: (False, ""), updater, [], "mrl:5") == (True, "")
        assert sending.result().keys() == {EXPERTS, "1.weight"}
    finally:
        sglang_receiver._receiver(0).close()
        sglang_receiver._receiver.cache_clear()


def test_other_updates_are_left_to_sglang() -> None:
    assert sglang_receiver.receive_update(lambda *_: (True, "its own"), None, [], "direct") == (True, "its own")
