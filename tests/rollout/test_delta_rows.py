"""States of linear attention in the engine that computes each row with transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from mrl.rollout.engine import RolloutEngine
from mrl.rollout.requests import Sampling
from tests.models.conftest import Tiny
from tests.rollout.conftest import requests, run


def test_log_probs_of_single_tokens_are_those_of_the_whole_row(
    make_engine: Callable[..., RolloutEngine], tiny: Tiny
) -> None:
    engine = make_engine("transformers", tiny("qwen3_5_text"))
    engine.weight_version = 1  # its model is that of the files
    model: Any = AutoModelForCausalLM.from_pretrained(tiny("qwen3_5_text"), dtype=torch.float32)
    wanted = requests(2, 1, 6)
    samples = run(engine, wanted, Sampling(temperature=1.0))
    for request in wanted:
        sample = samples[request.key]
        row = torch.from_numpy(np.concatenate([request.prompt_ids, sample.token_ids])).long()
        with torch.no_grad():
            log_probs = model(row[None], use_cache=False).logits[0].log_softmax(-1)
        start, places = len(request.prompt_ids), torch.arange(len(sample.token_ids))
        expected = log_probs[start - 1 + places, row[start:]]
        np.testing.assert_allclose(sample.log_probs, expected.numpy(), rtol=0, atol=1e-5)
