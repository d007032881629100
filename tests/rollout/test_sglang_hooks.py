"""SGLang's hooks and the engine's answers, without SGLang: noise, truncation, stops, and what an engine refuses."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mrl.config.sglang import SglangConfig
from mrl.errors import RolloutError, SetupError
from mrl.rollout import sglang_hooks
from mrl.rollout.engine import EngineSettings
from mrl.rollout.engine_channel import Channel
from mrl.rollout.requests import GenerationRequest, Sampling
from mrl.rollout.sglang_engine import SglangEngine, engine_arguments, interpreter
from mrl.rollout.transformers_engine import sampled_log_probs
from tests.rollout.conftest import Small

VOCAB = 17
REQUEST = GenerationRequest("a", "p", np.arange(3, dtype=np.int32), 7, 4)
SAMPLE = {"key": "a", "tokens": [1, 2, 3, 4], "log_probs": [-1.0] * 4, "finish": "length", "cached": 0}


def row(seed: int, num_written: int = 0, chunks: int = 0) -> SimpleNamespace:
    params = SimpleNamespace(sampling_seed=seed, stop_token_ids={3})
    return SimpleNamespace(sampling_params=params, output_ids=[0] * num_written, inflight_middle_chunks=chunks)


def drawn(rows: list[SimpleNamespace], probs: torch.Tensor) -> list[int]:
    info = SimpleNamespace()
    sglang_hooks.note_rows(lambda *_: None, info, SimpleNamespace(reqs=rows), VOCAB)
    tokens, _ = sglang_hooks.draw(lambda *_: None, None, probs, info, torch.zeros(len(rows)), True)
    for each in rows:
        each.output_ids.append(0)
    return [int(token) for token in tokens]


def test_each_sample_draws_from_its_own_noise_in_any_batch() -> None:
    probs = torch.softmax(torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0)), -1)
    together = [row(seed) for seed in (5, 6, 7)]
    steps = [drawn(together, probs.clone()) for _ in range(6)]
    for index in range(3):
        alone, noise = row(5 + index), torch.Generator().manual_seed(5 + index)
        for step in steps:
            expected = probs[index] / torch.empty(VOCAB).exponential_(generator=noise)
            assert drawn([alone], probs[index : index + 1].clone()) == [step[index]] == [int(expected.argmax())]


def test_a_chunk_of_a_prompt_draws_nothing() -> None:
    probs = torch.full((1, VOCAB), 1 / VOCAB)
    chunked, plain = row(5, chunks=1), row(5)
    drawn([chunked], probs.clone())
    chunked.output_ids.clear()
    chunked.inflight_middle_chunks = 0
    assert drawn([chunked], probs.clone()) == drawn([plain], probs.clone())


def test_rows_follow_their_requests() -> None:
    infos = [SimpleNamespace(), SimpleNamespace()]
    for info, names in zip(infos, ("abc", "de"), strict=True):
        sglang_hooks.note_rows(lambda *_: None, info, SimpleNamespace(reqs=names), VOCAB)
        assert not info.is_all_greedy
    sglang_hooks.filter_rows(lambda *_: None, infos[0], [0, 2], torch.zeros(2))
    sglang_hooks.merge_rows(lambda *_: None, *infos)
    assert getattr(infos[0], sglang_hooks._ROWS) == ["a", "c", "d", "e"]


def test_truncation_is_that_of_the_other_engines() -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1)) * 2
    settings = [(0, 1.0), (1, 1.0), (5, 1.0), (6, 0.7)]
    probs = logits.softmax(-1)
    sglang_hooks.truncate(
        probs, torch.tensor([k or VOCAB for k, _ in settings]), torch.tensor([p for _, p in settings])
    )
    for found, row_logits, (top_k, top_p) in zip(probs, logits, settings, strict=True):
        expected = sampled_log_probs(row_logits, Sampling(top_k=top_k, top_p=top_p)).exp()
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_the_log_probs_are_taken_from_the_truncated_distribution() -> None:
    probs = torch.full((1, VOCAB), 1 / VOCAB)
    probs[0, 4] *= 1.5
    info = SimpleNamespace(top_ks=torch.tensor([1]), top_ps=torch.ones(1))
    sglang_hooks.note_rows(lambda *_: None, info, SimpleNamespace(reqs=[row(5)]), VOCAB)
    tokens, _ = sglang_hooks.draw(lambda *_: None, None, probs, info, torch.zeros(1), False)
    assert (tokens.tolist(), float(probs[0, 4].log())) == ([4], 0.0)


def test_only_requested_tokens_stop() -> None:
    def finds_end_tokens(*_: Any) -> bool:
        return True

    assert sglang_hooks.is_stop(finds_end_tokens, row(5), [3])
    assert not sglang_hooks.is_stop(finds_end_tokens, row(5), [2])


class Scripted(SglangEngine):
    """An engine whose process answers each poll with one of these samples."""

    def __init__(self, *samples: dict[str, Any]) -> None:
        super(SglangEngine, self).__init__(EngineSettings(Path("m"), "float32", "cpu", 40, 100, Path("s"), "r"))
        self._samples, self._asked, self._first = [*samples], {}, ""
        self.commands: list[str] = []

    def _command(self, command: str, **arguments: Any) -> Any:
        self.commands.append(command)
        return [self._samples.pop(0)] if command == "poll" else ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cached": 2}, "2 tokens of the first sample after a change of weights came from the cache"),
        ({"tokens": [1, 2]}, "ended this sample after 2 of 4 tokens: length"),
        ({"finish": "abort"}, "after 4 of 4 tokens: abort"),
        ({"error": "too long"}, "SGLang refused this request: too long"),
    ],
)
def test_an_answer_that_cannot_be_right_is_refused(changes: dict[str, Any], message: str) -> None:
    engine = Scripted(SAMPLE | {"versions": [[0, "1"]]} | changes)
    engine.receive_weights(1)
    engine.start([REQUEST], Sampling())
    with pytest.raises(RolloutError, match=message):
        engine.step()


def test_samples_carry_the_versions_that_sglang_counted() -> None:
    engine = Scripted(SAMPLE | {"versions": [[0, "1"], [3, "2"]]}, SAMPLE | {"versions": [[0, "2"]]})
    engine.receive_weights(1)
    engine.start([REQUEST], Sampling())
    engine.receive_weights(2, "recompute")
    (sample,) = engine.step()
    assert (sample.weight_version, sample.switches, sample.token_versions().tolist()) == (1, ((3, 2),), [1, 1, 1, 2])
    assert not engine.unfinished
    assert engine.commands == ["pause", "receive", "proceed", "start", "pause", "receive", "proceed", "poll"]


def test_a_sleeping_engine_stays_paused_until_it_has_a_cache() -> None:
    engine = Scripted()
    engine.receive_weights(1)
    engine.commands.clear()
    engine.sleep()
    engine.wake("weights")
    engine.receive_weights(2)
    engine.wake("kv_cache")
    assert engine.commands == ["pause", "release", "resume", "pause", "receive", "resume", "proceed"]


def test_a_process_that_ends_is_named() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours, "the SGLang process 12")
    theirs.close()
    with pytest.raises(RolloutError, match="the SGLang process 12 has ended"):
        channel.receive()


def test_what_a_user_can_get_wrong_has_a_fix(small: Small, tmp_path: Path) -> None:
    settings = EngineSettings(
        small("mixtral"), "float32", "cpu", 40, 100, tmp_path, "r", sglang=SglangConfig(python="nowhere")
    )
    with pytest.raises(SetupError, match=r"no interpreter for SGLang at nowhere\s+fix: make install-sglang"):
        interpreter(settings)
    with pytest.raises(RolloutError, match="weights of the family mixtral have not been compared"):
        engine_arguments(settings)
