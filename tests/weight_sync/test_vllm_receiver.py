"""A vLLM worker accepts only the requested version."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mrl.errors import RolloutError
from mrl.rollout.engine import EngineSettings
from tests.rollout.trainer_side import InBackground, send


def test_a_worker_refuses_weights_of_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its engine would report the wrong version for all later samples."""
    from mrl.weight_sync import vllm_parameters, vllm_receiver  # loads vLLM

    module = torch.nn.Linear(3, 2, bias=False)
    slot = vllm_parameters.ParameterSpec(torch.float32, (2, 3), in_place=True)
    owner = vllm_parameters.ModuleParameters(module, {"weight": slot})
    monkeypatch.setattr(vllm_parameters, "_owners", lambda model: {"only": owner})
    monkeypatch.setattr(vllm_receiver, "_worker_number", lambda: 0)
    settings = EngineSettings(Path("model"), "float32", "cpu", 40, 100, tmp_path, "replica")
    engine = vllm_receiver.IpcTransferEngine.__new__(vllm_receiver.IpcTransferEngine)
    engine.model, engine.vllm_config = module, SimpleNamespace(lora_config=None)
    engine.init_transfer_engine(vllm_receiver.ReceiverInfo(sockets=str(tmp_path), replica="replica"))
    before, sent = module.weight.detach().clone(), torch.arange(6.0).view(2, 3)
    try:
        for version in (4, 6):
            sending = InBackground(send, settings, version, [("only.weight", sent)])
            engine.receive_weights(vllm_receiver.UpdateInfo(version=5, full=False))
            with pytest.raises(RolloutError, match=f"the trainer sends version {version} instead of version 5"):
                sending.result()
            assert engine.refused_because
            assert torch.equal(module.weight, before)
        sending = InBackground(send, settings, 5, [("only.weight", sent)])
        engine.receive_weights(vllm_receiver.UpdateInfo(version=5, full=False))
        assert sending.result().keys() == {"only.weight"}
        assert not engine.refused_because
        assert torch.equal(module.weight, sent)
    finally:
        engine.shutdown()
