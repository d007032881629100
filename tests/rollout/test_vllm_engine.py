"""A real vLLM engine against transformers: tokens, log-probs, stops, seeds."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mrl.errors import RolloutError
from mrl.rollout.engine import RolloutEngine
from mrl.rollout.requests import GenerationRequest, Sampling
from mrl.weight_sync.digest import digest
from tests.rollout.conftest import VOCAB, Small, requests, run
from tests.rollout.trainer_side import InBackground, fused, send, update

PLAIN = Sampling()


@pytest.fixture(scope="module")
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The engine's directory for temporary files during its start."""
    return tmp_path_factory.mktemp("temporary")


@pytest.fixture(scope="module")
def vllm(
    make_engine: Callable[..., RolloutEngine], small: Small, tmp_path_factory: pytest.TempPathFactory, temporary: Path
) -> RolloutEngine:
    without_weights = tmp_path_factory.mktemp("model") / "without"
    shutil.copytree(small("qwen3", 5), without_weights, ignore=shutil.ignore_patterns("*.safetensors*"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(temporary))
        engine = make_engine("vllm", without_weights)  # an engine starts without reading what it is sent later
    update(engine, small("qwen3"), version=1)
    return engine


@pytest.fixture(scope="module")
def oracle(make_engine: Callable[..., RolloutEngine], small: Small) -> RolloutEngine:
    engine = make_engine("transformers", small("qwen3"))
    update(engine, small("qwen3"), version=1)
    return engine


def assert_same(one: RolloutEngine, other: RolloutEngine, wanted: list[GenerationRequest], sampling: Sampling) -> None:
    """Both engines return the same tokens, and log-probs that differ only by float32 rounding."""
    ours, theirs = run(one, wanted, sampling), run(other, wanted, sampling)
    for request in wanted:
        mine, yours = ours[request.key], theirs[request.key]
        np.testing.assert_array_equal(mine.token_ids, yours.token_ids)
        np.testing.assert_allclose(mine.log_probs, yours.log_probs, rtol=0, atol=1e-5)
        assert (mine.finish, mine.weight_version) == (yours.finish, yours.weight_version)
        assert mine.token_ids.dtype == np.int32
        assert mine.log_probs.dtype == np.float32


@pytest.mark.parametrize(
    "sampling",
    [
        PLAIN,
        Sampling(temperature=0.7, top_p=0.8, top_k=30),
        Sampling(temperature=1.4, top_k=5),
    ],
    ids=str,
)
def test_tokens_and_log_probs_are_those_of_transformers(
    vllm: RolloutEngine, oracle: RolloutEngine, sampling: Sampling
) -> None:
    assert_same(vllm, oracle, requests(4, 3), sampling)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"head_dtype": "float32"}),
        ({"rope_theta": 5.0}, {"head_dtype": "float32", "rope_theta": 5.0}),
        ({"head_dtype": "model"}, {"head_dtype": "model"}),
    ],
)
def test_heads_multiply_in_float32_unless_the_user_says_otherwise(
    vllm: RolloutEngine, given: dict[str, object], expected: dict[str, object]
) -> None:
    from mrl.rollout.vllm_engine import engine_arguments

    found = engine_arguments(dataclasses.replace(vllm.settings, vllm={"hf_overrides": given} if given else {}))
    assert found["hf_overrides"] == expected


def test_samples_end_with_a_stop_token_or_at_their_length(vllm: RolloutEngine, oracle: RolloutEngine) -> None:
    sampling = Sampling(stop_token_ids=tuple(range(0, VOCAB, 9)))
    wanted = requests(6, 4)
    assert_same(vllm, oracle, wanted, sampling)
    samples = run(vllm, wanted, sampling)
    for sample in samples.values():
        is_stop = np.isin(sample.token_ids, sampling.stop_token_ids)
        assert not is_stop[:-1].any()
        assert is_stop[-1] if sample.finish == "stop" else len(sample.token_ids) == 24
    assert {sample.finish for sample in samples.values()} == {"stop", "length"}


def test_the_models_own_end_token_is_no_stop_unless_it_is_named(vllm: RolloutEngine) -> None:
    end = 2  # of config.json
    long = [dataclasses.replace(request, max_tokens=55) for request in requests(5, 8)]
    passed = [sample for sample in run(vllm, long, PLAIN).values() if end in sample.token_ids[:-1]]
    assert passed
    stopped = run(vllm, long, Sampling(stop_token_ids=(end,)))
    for sample in passed:
        cut = int(np.flatnonzero(sample.token_ids == end)[0]) + 1
        np.testing.assert_array_equal(stopped[sample.key].token_ids, sample.token_ids[:cut])


def test_a_sample_does_not_depend_on_its_company(vllm: RolloutEngine) -> None:
    wanted = requests(5, 4)
    together = run(vllm, wanted, PLAIN)
    for request in wanted[::3]:
        np.testing.assert_array_equal(
            run(vllm, [request], PLAIN)[request.key].token_ids, together[request.key].token_ids
        )
    backwards = run(vllm, wanted[::-1], PLAIN)
    vllm.start(wanted[::2], PLAIN)
    late = {sample.key: sample for _ in range(5) for sample in vllm.step()}
    late |= run(vllm, wanted[1::2], PLAIN)
    for key, sample in together.items():
        np.testing.assert_array_equal(backwards[key].token_ids, sample.token_ids)
        np.testing.assert_array_equal(late[key].token_ids, sample.token_ids)


def test_more_prompts_than_one_step_takes_in_are_sampled_all_the_same(
    vllm: RolloutEngine, oracle: RolloutEngine
) -> None:
    wanted = requests(100, 1, 3)
    assert sum(len(request.prompt_ids) for request in wanted) > 2048  # what vLLM takes in at once
    assert_same(vllm, oracle, wanted, PLAIN)


def test_an_engine_that_is_to_be_eager_compiles_nothing(vllm: RolloutEngine) -> None:
    from torch._dynamo.utils import counters

    counters.clear()
    run(vllm, requests(1, 1), PLAIN)
    assert not counters["frames"]


def test_nothing_of_an_aborted_sample_comes_back(vllm: RolloutEngine) -> None:
    vllm.start(requests(2, 2), PLAIN)
    vllm.step()
    vllm.abort()
    assert set(run(vllm, requests(1, 1), PLAIN)) == {"p0/0"}


def test_sleep_and_wake_lead_back_to_the_same_samples(vllm: RolloutEngine, oracle: RolloutEngine, small: Small) -> None:
    vllm.sleep()
    vllm.wake("weights")
    update(vllm, small("qwen3"), version=1)
    vllm.wake("kv_cache")
    assert_same(vllm, oracle, requests(2, 2), PLAIN)


def test_a_prefix_cache_that_outlives_its_weights_is_found(
    vllm: RolloutEngine, small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = dataclasses.replace(requests(1, 1)[0], prompt_ids=np.arange(70, dtype=np.int32) % VOCAB, max_tokens=2)
    run(vllm, [long], PLAIN)
    with monkeypatch.context() as patch:
        patch.setattr(vllm._engine, "reset_prefix_cache", lambda **_: True)  # type: ignore[attr-defined]
        update(vllm, small("qwen3"), version=2)
    with pytest.raises(RolloutError, match="tokens of the first sample after a change of weights came from the prefix"):
        run(vllm, [long], PLAIN)
    vllm.abort()
    update(vllm, small("qwen3"), version=1)
    run(vllm, [long], PLAIN)
    with monkeypatch.context() as patch:
        patch.setattr(vllm._engine, "reset_prefix_cache", lambda **_: False)  # type: ignore[attr-defined]
        with pytest.raises(RolloutError, match="did not drop its prefix cache"):
            update(vllm, small("qwen3"), version=2)
    assert vllm.weight_version is None
    update(vllm, small("qwen3"), version=1)


@pytest.mark.parametrize("argument", [{"logprobs_mode": "raw_logprobs"}, {"dtype": "bfloat16"}, {"max_model_len": 7}])
def test_arguments_that_mrl_sets_are_refused(vllm: RolloutEngine, argument: dict[str, object]) -> None:
    with pytest.raises(RolloutError, match=f"{next(iter(argument))} is set by "):
        type(vllm)(dataclasses.replace(vllm.settings, vllm=argument))


def test_the_digest_is_of_what_is_held(vllm: RolloutEngine, small: Small) -> None:
    """A tensor that changes in transit gets another digest. An intact tensor has the sender's."""
    tensors = dict(fused(small("qwen3")))
    sent = {name: digest(tensor) for name, tensor in tensors.items()}
    tensors["model.layers.2.self_attn.qkv_proj.weight"][7, 3] += 1e-7
    sending = InBackground(send, vllm.settings, 1, tensors.items())
    vllm.receive_weights(1)
    held = sending.result()
    assert [name for name in sent if sent[name] != held[name]] == ["model.layers.2.self_attn.qkv_proj.weight"]
    (reply,) = update(vllm, small("qwen3"), version=1)
    assert reply == sent


def test_an_engine_leaves_no_file_behind_however_it_ends(vllm: RolloutEngine, temporary: Path) -> None:
    """A killed process cleans up nothing: any file that exists while it works would stay."""
    assert run(vllm, requests(1, 1), PLAIN)
    assert list(temporary.iterdir()) == []
