"""The reference engine: its distributions by hand, and its samples by the whole model at once."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from mrl.errors import RolloutError
from mrl.rollout.engine import RolloutEngine
from mrl.rollout.requests import GenerationRequest, Sampling
from mrl.rollout.transformers_engine import sampled_log_probs
from tests.models.quantized import quantize
from tests.rollout.conftest import Small, requests, run
from tests.rollout.trainer_side import InBackground, send, update, whole

PROBS = torch.tensor([0.1, 0.4, 0.05, 0.25, 0.2])


def kept(sampling: Sampling) -> dict[int, float]:
    """Return the tokens that can be sampled, and their probabilities."""
    log_probs = sampled_log_probs(PROBS.log() + 3, sampling)
    return {token: float(x.exp()) for token, x in enumerate(log_probs) if x > -torch.inf}


@pytest.mark.parametrize(
    ("sampling", "weights"),
    [
        (Sampling(), {0: 0.1, 1: 0.4, 2: 0.05, 3: 0.25, 4: 0.2}),
        (Sampling(top_k=1), {1: 1.0}),
        (Sampling(top_k=3), {1: 0.4, 3: 0.25, 4: 0.2}),
        (Sampling(top_k=99), {0: 0.1, 1: 0.4, 2: 0.05, 3: 0.25, 4: 0.2}),
        (Sampling(top_p=0.3), {1: 0.4}),
        (Sampling(top_p=0.7), {1: 0.4, 3: 0.25, 4: 0.2}),
        (Sampling(top_p=0.6, top_k=3), {1: 0.4, 3: 0.25}),  # of the three that remain these have 0.76
        (Sampling(temperature=0.5), {0: 0.01, 1: 0.16, 2: 0.0025, 3: 0.0625, 4: 0.04}),
        (Sampling(temperature=0.5, top_p=0.6), {1: 0.16, 3: 0.0625}),  # 0.58 of the sharper distribution is too little
        (Sampling(temperature=0.5, top_p=0.55), {1: 0.16}),
    ],
    ids=str,
)
def test_what_can_be_drawn_and_with_what_chance(sampling: Sampling, weights: dict[int, float]) -> None:
    total = sum(weights.values())
    assert kept(sampling) == {token: pytest.approx(weight / total, rel=1e-4) for token, weight in weights.items()}


def test_a_distribution_is_computed_in_float32() -> None:
    log_probs = sampled_log_probs(PROBS.log().bfloat16(), Sampling())
    assert log_probs.dtype == torch.float32
    assert float(log_probs.exp().sum()) == pytest.approx(1, abs=1e-6)


@pytest.fixture(scope="module")
def engine(make_engine: Callable[..., RolloutEngine], small: Small) -> RolloutEngine:
    made = make_engine("transformers", small("qwen3", 5))  # what it starts with is not what it is sent
    update(made, small("qwen3"), version=3)
    return made


def test_a_failed_update_leaves_the_engine_stale(make_engine: Callable[..., RolloutEngine], small: Small) -> None:
    engine, (request,) = make_engine("transformers", small("qwen3")), requests(1, 1)
    sending = InBackground(send, engine.settings, 1, list(whole(small("qwen3")))[:-1])
    with pytest.raises(RolloutError, match=r"missing keys.*lm_head\.weight"):
        engine.receive_weights(1)
    with pytest.raises(RolloutError, match=r"refused the weights: .*lm_head\.weight"):
        sending.result()
    with pytest.raises(RolloutError, match="stale"):
        engine.start([request], Sampling())
    InBackground(send, engine.settings, 3, whole(small("qwen3")))
    with pytest.raises(RolloutError, match="sends version 3 instead of version 2"):
        engine.receive_weights(2)
    update(engine, small("qwen3"), version=2)
    assert len(run(engine, [request], Sampling())["p0/0"].token_ids) == 24


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.6, top_p=0.9, top_k=40)], ids=str)
def test_log_probs_are_those_of_the_whole_sequence_at_once(
    engine: RolloutEngine, small: Small, sampling: Sampling
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(small("qwen3"), dtype=torch.float32)
    wanted = requests(2, 2, 12)
    for request, sample in zip(wanted, [run(engine, wanted, sampling)[each.key] for each in wanted], strict=True):
        tokens = torch.tensor([*request.prompt_ids.tolist(), *sample.token_ids.tolist()])
        with torch.no_grad():
            logits = model(tokens[None]).logits[0]
        begin = len(request.prompt_ids)
        for at, (token, log_prob) in enumerate(zip(sample.token_ids, sample.log_probs, strict=True)):
            expected = sampled_log_probs(logits[begin + at - 1], sampling)
            assert float(log_prob) == pytest.approx(float(expected[token]), abs=1e-4)
        assert (sample.finish, sample.weight_version, len(sample.token_ids)) == ("length", 3, 12)
        assert sample.token_ids.dtype == np.int32
        assert sample.log_probs.dtype == np.float32


def test_a_sample_is_its_seeds_and_nobody_elses(engine: RolloutEngine) -> None:
    wanted = requests(2, 3, 10)
    together = run(engine, wanted, Sampling())
    alone = run(engine, wanted[4:5], Sampling())
    np.testing.assert_array_equal(alone[wanted[4].key].token_ids, together[wanted[4].key].token_ids)
    other = dataclasses.replace(wanted[4], seed=wanted[4].seed + 1)
    assert run(engine, [other], Sampling())[other.key].token_ids.tolist() != together[other.key].token_ids.tolist()


def test_a_sample_ends_with_the_first_stop_token_or_at_its_length(engine: RolloutEngine) -> None:
    (request,) = requests(1, 1, 20)
    whole = run(engine, [request], Sampling())[request.key].token_ids.tolist()
    stop = whole[6]
    first = whole.index(stop)
    stopped = run(engine, [request], Sampling(stop_token_ids=(stop, 130)))[request.key]
    assert stopped.token_ids.tolist() == whole[: first + 1]
    assert (stopped.finish, len(stopped.log_probs)) == ("stop", first + 1)
    cut: GenerationRequest = dataclasses.replace(request, max_tokens=first + 1)
    both = run(engine, [cut], Sampling(stop_token_ids=(stop,)))[request.key]
    assert both.finish == "stop"  # it ends with both
    assert run(engine, [dataclasses.replace(cut, max_tokens=first)], Sampling(stop_token_ids=(stop,)))[
        request.key
    ].finish == ("length" if first else "stop")


def test_a_model_in_fp8_is_refused(make_engine: Callable[..., RolloutEngine], small: Small, tmp_path: Path) -> None:
    quantized = quantize(Path(shutil.copytree(small("qwen3"), tmp_path / "fp8")))
    with pytest.raises(
        RolloutError, match=r"fp8: this engine does not load quantized models\s*fix: rollout.engine=vllm"
    ):
        make_engine("transformers", quantized)
