"""Every engine, also the example of docs/extend.md, answers the same requests in the same way."""

from __future__ import annotations

import dataclasses
import importlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from mrl.config.sglang import ENVIRONMENT
from mrl.errors import RolloutError
from mrl.rollout.engine import Cache, RolloutEngine, can_step
from mrl.rollout.requests import Generated, GenerationRequest, Sampling
from mrl.rollout.transformers_engine import sampled_log_probs
from tests.docs.blocks import DOCS, blocks_of
from tests.rollout.conftest import VOCAB, Small, requests, run
from tests.rollout.trainer_side import InBackground, fused, send, whole

EXAMPLE = "my_engine"
HAS_SGLANG = Path(sys.prefix).with_name(ENVIRONMENT).is_dir()
SGLANG = (
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_SGLANG, reason=f"no {ENVIRONMENT}: make install-sglang"),
)
PLAIN = Sampling()
LENGTH = 50
WANTED = requests(2, 2, LENGTH)
CLOSE = 2e-5


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the name of the page's engine."""
    (code,) = [block.code for block in blocks_of(DOCS / "extend.md") if block.kind == f"python {EXAMPLE}.py"]
    directory = tmp_path_factory.mktemp("example")
    (directory / f"{EXAMPLE}.py").write_text(code)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(directory)
        importlib.import_module(EXAMPLE)
        yield f"{EXAMPLE}:PlainEngine"


@pytest.fixture(scope="module", params=["transformers", "example", "vllm", pytest.param("sglang", marks=SGLANG)])
def engine(
    request: pytest.FixtureRequest, make_engine: Callable[..., RolloutEngine], small: Small, example: str
) -> RolloutEngine:
    kind = example if request.param == "example" else request.param
    return make_engine(kind, small("qwen3", 1), in_flight=True)


@pytest.fixture(autouse=True)
def at_version_1(engine: RolloutEngine, small: Small) -> None:
    engine.abort()
    take(engine, small("qwen3"), 1)


def take(engine: RolloutEngine, model: Path, version: int, cache: Cache | None = None) -> None:
    """Send a model's weights to the engine. The engine's digests are those of the tensors that were sent."""
    sending = InBackground(send, engine.settings, version, list(tensors(engine, model)))
    engine.receive_weights(version, cache)
    assert len(sending.result()) == len(list(tensors(engine, model)))


def tensors(engine: RolloutEngine, model: Path) -> Iterator[tuple[str, torch.Tensor]]:
    return iter(whole(model) if engine.full_tensor_reason else fused(model))


def log_probs(model: Path, request: GenerationRequest, sample: Generated, sampling: Sampling = PLAIN) -> np.ndarray:
    """Return log-probs of the sample's tokens by transformers, over the whole sequence at once."""
    from transformers import AutoModelForCausalLM

    tokens = torch.from_numpy(sample.token_ids).long()
    ids = torch.cat([torch.from_numpy(request.prompt_ids).long(), tokens])
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(ids[None]).logits[0]
    rows = logits[len(request.prompt_ids) - 1 : -1]
    return np.asarray([float(sampled_log_probs(row, sampling)[token]) for row, token in zip(rows, tokens, strict=True)])


def finish(engine: RolloutEngine) -> dict[str, Generated]:
    samples: dict[str, Generated] = {}
    while engine.unfinished:
        samples |= {sample.key: sample for sample in engine.step()}
    return samples


@pytest.mark.parametrize(
    "sampling",
    [PLAIN, Sampling(temperature=0.7, top_p=0.8, top_k=30), Sampling(temperature=1.4, top_k=5), Sampling(top_k=1)],
    ids=str,
)
def test_log_probs_are_those_of_the_sampled_distribution(
    engine: RolloutEngine, small: Small, sampling: Sampling
) -> None:
    wanted = requests(2, 2, 16)
    samples = run(engine, wanted, sampling)
    for request in wanted:
        sample = samples[request.key]
        np.testing.assert_allclose(
            sample.log_probs, log_probs(small("qwen3"), request, sample, sampling), rtol=0, atol=CLOSE
        )
        assert (sample.finish, sample.weight_version, sample.switches) == ("length", 1, ())
        assert (sample.token_ids.dtype, sample.log_probs.dtype) == (np.int32, np.float32)


def test_equal_seeds_give_the_tokens_of_transformers(
    engine: RolloutEngine, make_engine: Callable[..., RolloutEngine], small: Small
) -> None:
    """Tokens do not depend on the engine or on the other samples of a batch. Samples of a prompt differ."""
    oracle = make_engine("transformers", small("qwen3"), loads_files=True)
    oracle.receive_weights(1)
    wanted = requests(3, 4, 16)
    ours, theirs = run(engine, wanted, PLAIN), run(oracle, wanted, PLAIN)
    for request in wanted:
        np.testing.assert_array_equal(ours[request.key].token_ids, theirs[request.key].token_ids)
    assert len({tuple(sample.token_ids.tolist()) for sample in ours.values()}) == len(wanted)
    alone = run(engine, wanted[5:6], PLAIN)[wanted[5].key]
    np.testing.assert_array_equal(alone.token_ids, ours[wanted[5].key].token_ids)
    other = dataclasses.replace(wanted[5], seed=wanted[5].seed + 1)
    assert run(engine, [other], PLAIN)[other.key].token_ids.tolist() != alone.token_ids.tolist()


def test_samples_end_at_the_stop_tokens_and_at_no_others(engine: RolloutEngine) -> None:
    stops = tuple(range(0, VOCAB, 9))
    wanted = requests(1, 5, 24)
    free = run(engine, wanted, PLAIN)
    assert all(len(sample.token_ids) == 24 for sample in free.values())
    assert any(2 in sample.token_ids[:-1] for sample in free.values()), "the model's own end token ends nothing"
    for key, sample in run(engine, wanted, Sampling(stop_token_ids=stops)).items():
        is_stop = np.isin(free[key].token_ids, stops)
        length = int(is_stop.argmax()) + 1 if is_stop.any() else 24
        np.testing.assert_array_equal(sample.token_ids, free[key].token_ids[:length])
        assert (sample.finish, len(sample.log_probs)) == ("stop" if is_stop.any() else "length", length)


def test_a_sample_uses_the_newest_weights(engine: RolloutEngine, small: Small) -> None:
    """The prompt is long, and was in the cache of the previous weights."""
    ids = np.random.default_rng(1).integers(0, VOCAB, 70).astype(np.int32)
    long = dataclasses.replace(WANTED[0], prompt_ids=ids, max_tokens=8)
    run(engine, [long], PLAIN)
    take(engine, small("qwen3", 1), 2)
    sample = run(engine, [long], PLAIN)[long.key]
    assert sample.weight_version == 2
    np.testing.assert_allclose(sample.log_probs, log_probs(small("qwen3", 1), long, sample), rtol=0, atol=CLOSE)


@pytest.mark.parametrize("spoil", ["version", "missing"])
def test_a_refused_update_leaves_the_engine_stale(engine: RolloutEngine, small: Small, spoil: str) -> None:
    incomplete = list(tensors(engine, small("qwen3", 1)))[: -1 if spoil == "missing" else None]
    sending = InBackground(send, engine.settings, 3 if spoil == "version" else 2, incomplete)
    with pytest.raises(RolloutError, match="sends version 3" if spoil == "version" else "lm_head"):
        engine.receive_weights(2)
    with pytest.raises(RolloutError, match="refused the weights"):
        sending.result()
    with pytest.raises(RolloutError, match="stale"):
        engine.start(WANTED[:1], PLAIN)
    take(engine, small("qwen3", 1), 2)
    assert run(engine, requests(1, 1), PLAIN)["p0/0"].weight_version == 2


def test_weights_in_flight_are_noted_at_their_first_token(engine: RolloutEngine, small: Small) -> None:
    engine.start(WANTED, PLAIN)
    for _ in range(3):
        engine.step()
    take(engine, small("qwen3", 1), 2, "recompute")
    samples = finish(engine)
    for request in WANTED:
        sample = samples[request.key]
        new = sample.token_versions() == 2
        old_ones, new_ones = (log_probs(small("qwen3", seed), request, sample) for seed in (0, 1))
        np.testing.assert_allclose(sample.log_probs, np.where(new, new_ones, old_ones), rtol=0, atol=CLOSE)
    assert any(0 < switch < LENGTH for sample in samples.values() for switch, _ in sample.switches)


def test_samples_continue_after_a_sleep(engine: RolloutEngine, small: Small) -> None:
    before = run(engine, WANTED, PLAIN)
    engine.start(WANTED, PLAIN)
    for _ in range(3):
        engine.step()
    engine.sleep(keep=True)
    with pytest.raises(RolloutError, match="asleep"):
        engine.receive_weights(2)
    engine.wake("weights")
    take(engine, small("qwen3"), 2, "recompute")
    assert not can_step(engine)
    engine.wake("kv_cache")
    for key, sample in finish(engine).items():
        np.testing.assert_array_equal(sample.token_ids, before[key].token_ids)
        np.testing.assert_allclose(sample.log_probs, before[key].log_probs, rtol=0, atol=CLOSE)
        assert sample.token_versions()[-1] == 2


def test_aborted_samples_do_not_return(engine: RolloutEngine, small: Small) -> None:
    engine.start(WANTED, PLAIN)
    engine.step()
    engine.abort()
    assert not engine.unfinished
    fresh = run(engine, requests(1, 1), PLAIN)
    assert set(fresh) == {"p0/0"}
    np.testing.assert_array_equal(run(engine, requests(1, 1), PLAIN)["p0/0"].token_ids, fresh["p0/0"].token_ids)


@pytest.mark.parametrize("engine", [pytest.param("sglang", marks=SGLANG)], indirect=True)
def test_an_engine_without_requests_leaves_the_cores_to_the_trainer(engine: Any) -> None:
    """SGLang's scheduler is a separate process, which asks for messages without a pause unless it may sleep."""
    process = psutil.Process(engine._process.pid)

    def seconds() -> float:
        return sum(sum(each.cpu_times()[:2]) for each in [process, *process.children(recursive=True)])

    begin = seconds()
    time.sleep(1.0)
    assert seconds() - begin < 0.3
