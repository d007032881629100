"""Weights that arrive between two tokens: the version of each token, the cache, and which samples continue."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mrl.errors import RolloutError
from mrl.rollout.engine import Cache, RolloutEngine, can_step
from mrl.rollout.requests import Generated, GenerationRequest, Sampling
from tests.rollout.conftest import VOCAB, Small, requests, run
from tests.rollout.trainer_side import InBackground, fused, send, whole

PLAIN = Sampling()
WANTED = requests(3, 2, 20)
AT = 8
"""Tokens that each sample has when the weights come."""


@pytest.fixture(scope="module", params=["transformers", "vllm", "vllm ahead"])
def engine(request: pytest.FixtureRequest, make_engine: Callable[..., RolloutEngine], small: Small) -> RolloutEngine:
    kind, _, is_ahead = request.param.partition(" ")
    with steps_ahead() if is_ahead else nullcontext():
        made: Any = make_engine(kind, small("qwen3"), in_flight=True)
    if kind == "vllm":
        core = made._engine.engine_core.engine_core
        assert (core.async_scheduling, core.batch_queue_size) == ((True, 2) if is_ahead else (False, 1))
    engine: RolloutEngine = made
    return engine


@contextmanager
def steps_ahead() -> Iterator[None]:
    """Enable asynchronous scheduling in vLLM, as on GPUs. vLLM disables it on CPUs, although it works there."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def keep_asynchronous(config: Any) -> None:
        check(config)
        config.scheduler_config.async_scheduling = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", staticmethod(keep_asynchronous))
        yield


@pytest.fixture(autouse=True)
def at_version_1(engine: RolloutEngine, small: Small) -> None:
    """Start each test with the first model and no unfinished samples."""
    engine.abort()
    take(engine, small("qwen3"), 1)


def take(engine: RolloutEngine, model: Path, version: int, cache: Cache | None = "recompute") -> None:
    """Send a model's weights to the engine."""
    tensors = whole(model) if engine.full_tensor_reason else fused(model)
    sending = InBackground(send, engine.settings, version, tensors)
    engine.receive_weights(version, cache)
    sending.result()


def finished(engine: RolloutEngine) -> dict[str, Generated]:
    """Return all samples that are being generated."""
    samples: dict[str, Generated] = {}
    while engine.unfinished:
        samples |= {sample.key: sample for sample in engine.step()}
    return samples


def log_probs(model: Path, request: GenerationRequest, sample: Generated) -> np.ndarray:
    """Return log-probs of the sample's tokens, computed over the whole sequence at once."""
    from transformers import AutoModelForCausalLM

    ids = torch.tensor([[*request.prompt_ids.tolist(), *sample.token_ids.tolist()]])
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(ids).logits[0]
    num_prompt = len(request.prompt_ids)
    rows = logits[num_prompt - 1 : -1].log_softmax(-1)
    return rows.gather(1, ids[0, num_prompt:, None])[:, 0].numpy()


def switched(engine: RolloutEngine, small: Small, cache: Cache) -> dict[str, Generated]:
    """Return samples whose first tokens come from the first model, and the others from the second."""
    engine.start(WANTED, PLAIN)
    for _ in range(AT):
        assert engine.step() == []
    take(engine, small("qwen3", 1), 2, cache)
    return finished(engine)


def test_each_token_is_of_the_weights_that_it_is_said_to_be_of(engine: RolloutEngine, small: Small) -> None:
    before = run(engine, WANTED, PLAIN)
    samples = switched(engine, small, "recompute")
    for request in WANTED:
        sample = samples[request.key]
        assert (sample.weight_version, sample.switches) == (1, ((AT, 2),))
        assert sample.token_versions().tolist() == [1] * AT + [2] * (20 - AT)
        np.testing.assert_array_equal(sample.token_ids[:AT], before[request.key].token_ids[:AT])
        old, new = (log_probs(small("qwen3", seed), request, sample) for seed in (0, 1))
        np.testing.assert_allclose(sample.log_probs[:AT], old[:AT], rtol=0, atol=1e-4)
        np.testing.assert_allclose(sample.log_probs[AT:], new[AT:], rtol=0, atol=1e-4)
        assert np.abs(old - new).min() > 1e-4, "the two models can be told apart at every token"
    assert any(not np.array_equal(samples[key].token_ids, before[key].token_ids) for key in samples)


def test_a_cache_that_is_kept_is_neither_models(engine: RolloutEngine, small: Small) -> None:
    samples = switched(engine, small, "keep")
    for request in WANTED:
        sample = samples[request.key]
        assert sample.switches == ((AT, 2),)
        old, new = (log_probs(small("qwen3", seed), request, sample) for seed in (0, 1))
        np.testing.assert_allclose(sample.log_probs[:AT], old[:AT], rtol=0, atol=1e-4)
        assert np.abs(sample.log_probs[AT:] - new[AT:]).max() > 1e-3


def test_what_begins_later_reads_nothing_of_the_weights_before(engine: RolloutEngine, small: Small) -> None:
    """The prompts are the same, and whole blocks of them are in the cache."""
    noise = np.random.default_rng(1)
    long = [
        dataclasses.replace(request, prompt_ids=noise.integers(0, VOCAB, 70).astype(np.int32)) for request in WANTED[:3]
    ]
    engine.start(long, PLAIN)
    for _ in range(AT):
        engine.step()
    take(engine, small("qwen3", 1), 2, "keep")
    later = [dataclasses.replace(request, key=f"later {request.key}") for request in long]
    engine.start(later, PLAIN)
    samples = finished(engine)
    for request in later:
        sample = samples[request.key]
        assert (sample.weight_version, sample.switches) == (2, ())
        np.testing.assert_allclose(sample.log_probs, log_probs(small("qwen3", 1), request, sample), rtol=0, atol=1e-4)


def test_weights_that_drew_nothing_are_not_told_of(engine: RolloutEngine, small: Small) -> None:
    engine.start(WANTED[:1], PLAIN)
    take(engine, small("qwen3", 1), 2)  # before its first token
    for _ in range(3):
        engine.step()
    take(engine, small("qwen3"), 3)
    take(engine, small("qwen3", 1), 4)
    (sample,) = finished(engine).values()
    assert (sample.weight_version, sample.switches) == (2, ((3, 4),))
    assert sample.token_versions().tolist() == [2] * 3 + [4] * 17


def test_nothing_goes_on_with_half_an_update(engine: RolloutEngine, small: Small) -> None:
    engine.start(WANTED, PLAIN)
    for _ in range(AT):
        engine.step()
    tensors = list(whole(small("qwen3", 1)) if engine.full_tensor_reason else fused(small("qwen3", 1)))[:-1]
    sending = InBackground(send, engine.settings, 2, tensors)
    with pytest.raises(RolloutError):
        engine.receive_weights(2, "recompute")
    with pytest.raises(RolloutError):
        sending.result()
    assert engine.unfinished
    assert not can_step(engine)
    take(engine, small("qwen3", 1), 2)
    assert can_step(engine)
    samples = finished(engine)
    assert {sample.switches for sample in samples.values()} == {((AT, 2),)}


def test_what_is_under_way_goes_on_after_a_sleep(engine: RolloutEngine, small: Small) -> None:
    in_flight = switched(engine, small, "recompute")
    take(engine, small("qwen3"), 1)
    engine.start(WANTED, PLAIN)
    for _ in range(AT):
        engine.step()
    engine.sleep(keep=True)
    assert engine.unfinished
    assert not can_step(engine)
    engine.wake("weights")
    take(engine, small("qwen3", 1), 2)
    assert not can_step(engine), "there is no room for a cache yet"
    engine.wake("kv_cache")
    for key, sample in finished(engine).items():
        np.testing.assert_array_equal(sample.token_ids, in_flight[key].token_ids)
        np.testing.assert_allclose(sample.log_probs, in_flight[key].log_probs, rtol=0, atol=1e-5)
        assert sample.switches == ((AT, 2),)


def test_a_sample_that_ends_while_steps_end_is_given_by_the_next_step(engine: RolloutEngine, small: Small) -> None:
    """Its last token may be computed already when the weights arrive. It has the old version, and is not lost."""
    short, long = dataclasses.replace(WANTED[0], max_tokens=4), WANTED[1]
    before = run(engine, [short], PLAIN)[short.key]
    engine.start([short, long], PLAIN)
    samples: dict[str, Generated] = {}
    for _ in range(4):
        samples |= {sample.key: sample for sample in engine.step()}
    take(engine, small("qwen3", 1), 2)
    samples |= finished(engine)
    np.testing.assert_array_equal(samples[short.key].token_ids, before.token_ids)
    assert (samples[short.key].weight_version, samples[short.key].switches) == (1, ())
    assert samples[long.key].switches == ((4, 2),)
