"""Ends of a response: several tokens, or a text, equal in both engines, on a model with a tokenizer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mrl.data.chat import ChatTokenizer, load_tokenizer
from mrl.demo.model import make_model
from mrl.rollout.engine import EngineSettings, RolloutEngine, engine_class
from mrl.rollout.requests import GenerationRequest, Sampling, request_seed
from tests.rollout.conftest import VLLM, run
from tests.rollout.test_engine_conformance import SGLANG

MAX_TOKENS = 48


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("stop") / "model", seed=1)


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> ChatTokenizer:
    return load_tokenizer(str(model))


@pytest.fixture
def started(model: Path, tmp_path: Path) -> Iterator[Callable[[str], RolloutEngine]]:
    """Return a function that starts engines with the weights and the tokenizer of the model's files."""
    engines: list[RolloutEngine] = []

    def start(kind: str) -> RolloutEngine:
        vocab = len(load_tokenizer(str(model)))
        settings = EngineSettings(
            model, "float32", "cpu", 64, vocab, tmp_path, kind, vllm=VLLM if kind == "vllm" else {},
            loads_files=True, reads_text=True,
        )  # fmt: skip
        engines.append(engine_class(kind)(settings))
        engines[-1].receive_weights(1)
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def wanted(tokenizer: ChatTokenizer) -> list[GenerationRequest]:
    (prompt,) = tokenizer(["12+34="], add_special_tokens=False)["input_ids"]
    ids = np.asarray(prompt, np.int32)
    return [GenerationRequest(str(n), "p", ids, request_seed(7, 3, "p", n), MAX_TOKENS) for n in range(12)]


def test_texts_of_the_run_and_of_a_format_both_end_a_sample() -> None:
    from mrl.rollout.vllm_engine import _sampling_params  # loads vLLM

    plain = GenerationRequest("0", "p", np.ones(3, np.int32), 7, MAX_TOKENS)
    of_run = Sampling(stop=("END",))
    for sampling, own, stops in (
        *((of_run, (), ["END"]), (of_run, ("</call>",), ["END", "</call>"])),
        *((Sampling(), ("</call>",), ["</call>"]), (Sampling(), (), [])),
    ):
        params = _sampling_params(replace(plain, stop=own), sampling, 100)
        assert (params.stop, params.detokenize) == (stops, bool(stops))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vllm", pytest.param("sglang", marks=SGLANG)])
def test_texts_and_tokens_end_responses_in_both_engines_alike(
    started: Callable[[str], RolloutEngine], tokenizer: ChatTokenizer, kind: str
) -> None:
    """The text has two tokens. The log-probs remain those of the sampled tokens."""
    plain, other = started("transformers"), started(kind)
    free = run(plain, wanted(tokenizer), Sampling())
    assert all(sample.finish == "length" for sample in free.values()), "nothing ends them"
    texts = [tokenizer.decode(sample.token_ids.tolist()) for sample in free.values()]
    stop = next(pair for text in texts for pair in re.findall("[ -~]{2}", text[5:]))
    token = int(free["1"].token_ids[9])
    sampling = Sampling(stop_token_ids=(token, int(free["2"].token_ids[20])), stop=(stop,))
    found = run(plain, wanted(tokenizer), sampling)
    same = run(other, wanted(tokenizer), sampling)
    for key, sample in found.items():
        ids = sample.token_ids.tolist()
        assert ids == free[key].token_ids.tolist()[: len(ids)], "what is drawn does not depend on what ends it"
        assert same[key].token_ids.tolist() == ids
        assert same[key].finish == sample.finish
        np.testing.assert_allclose(same[key].log_probs, free[key].log_probs[: len(ids)], atol=1e-4)
        text = tokenizer.decode(ids)
        if sample.finish == "stop":
            assert stop in text or ids[-1] in sampling.stop_token_ids
            assert stop not in tokenizer.decode(ids[:-1])
            assert not set(ids[:-1]) & set(sampling.stop_token_ids)
    assert any(stop in tokenizer.decode(sample.token_ids.tolist()) for sample in found.values())
    assert len(found["1"].token_ids) <= 10


@pytest.mark.slow
@pytest.mark.on_demand
@pytest.mark.parametrize("kind", ["transformers", "vllm"])
def test_a_text_of_the_prompt_ends_no_response(
    started: Callable[[str], RolloutEngine], tokenizer: ChatTokenizer, kind: str
) -> None:
    """The text is among the last tokens of the prompt, which vLLM reads again before it returns the first sampled
    token.

    If the prompt's last token were half a character, vLLM would find the text there and end the response. Prompts and
    observations are encoded from text, so they end with whole characters.
    """
    ids = np.asarray(tokenizer(["12]\u00e9"], add_special_tokens=False)["input_ids"][0], np.int32)
    asked = [replace(request, prompt_ids=ids) for request in wanted(tokenizer)]
    engine = started(kind)
    free = run(engine, asked, Sampling())
    found = run(engine, [replace(request, stop=("]",)) for request in asked], Sampling())
    for key, sample in free.items():
        drawn = sample.token_ids.tolist()
        ends = [at for at in range(1, len(drawn) + 1) if "]" in tokenizer.decode(drawn[:at])]
        assert found[key].token_ids.tolist() == drawn[: ends[0] if ends else None]
        assert found[key].finish == ("stop" if ends else "length")
