"""Gradients equal those of transformers' autograd, tensor by tensor under the names of its files, for every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from mrl.config.schema import ParallelConfig as Layout
from mrl.engine.parallel import model_parallel
from mrl.engine.scores import ScoreRequest
from mrl.engine.weights import held_tensors
from mrl.models.families import read_spec
from mrl.models.hf_reader import HfReader
from mrl.models.regions import slices
from mrl.models.table import Head, hf_tensors
from mrl.verify.spawn import run_distributed
from tests.engine.tiny_training import build, negative_score, share

LIMIT_S = 300.0
MAX_RELATIVE = 2e-5
DECAYS = (".A_log", ".dt_bias")
DECAYS_RELATIVE = 1e-4
"""Their gradients are sums that cancel: both, mrl's and transformers', are up to 6e-5 from a gradient in float64."""
Gradients = dict[str, npt.NDArray[np.float32]]


def engine_gradients(models: list[tuple[str, Head]]) -> list[Gradients]:
    """Return each model's gradients on one rank, as Hugging Face tensors."""
    found = []
    for path, head in models:
        with model_parallel(Layout(), seed=1) as groups:
            engine = build(path, Layout(), groups, head=head)
            assert engine.optimizer is not None, "the engine is trained"
            engine.optimizer.zero_grad()
            engine.forward_backward(*share(engine), negative_score, ScoreRequest())
            spec = engine.request.spec
            whole = {name: np.zeros(shape, np.float32) for name, shape in hf_tensors(spec, head).items()}
            for shard, parameter in held_tensors(engine.models, spec, head, groups):
                if not shard.trained:
                    assert not parameter.requires_grad, shard.name
                    del whole[shard.pieces[0].hf]
                    continue
                gradient: Any = parameter.main_grad  # type: ignore[attr-defined]  # Megatron's
                for piece in shard.pieces:
                    whole[piece.hf][slices(piece.source)] = gradient[slices(piece.target)].numpy()
            found.append(whole)
    return found


def transformers_gradients(path: str, head: Head, directory: Path) -> Gradients:
    """Return gradients of the same loss, exported as if they were weights, so that they get the names of the files."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    from tests.engine.tiny_training import LENGTHS, VOCAB

    kind = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
    model = kind.from_pretrained(path, dtype=torch.float32).eval()
    tokens = torch.randint(0, VOCAB, (int(LENGTHS.sum()),), generator=torch.Generator().manual_seed(7))
    loss = torch.zeros(())
    for row in torch.split(tokens, LENGTHS.tolist()):
        if head == "score":
            scores = model.score(model.model(row[None]).last_hidden_state[0])[1:-1, 0]
        else:
            scores = model(row[None]).logits[0, 1:-1].log_softmax(-1).gather(1, row[2:, None])
        loss = loss - scores.sum() / 100
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    model.save_pretrained(directory)
    buffers = {name for name, _ in model.named_buffers()}  # saved with their values: they have no gradient
    reader = HfReader(directory)  # some files have a layer's experts in one tensor
    names = hf_tensors(read_spec(directory), head).keys() - buffers
    return {name: reader.whole(name).numpy() for name in names}


@pytest.fixture(scope="module")
def gradients(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Gradients, Gradients]]:
    """Return mrl's and transformers' gradients for each family and head."""
    from tests.models.tiny_models import TINY_FAMILIES, make_tiny

    directory = tmp_path_factory.mktemp("gradients")
    heads: list[tuple[str, Head]] = [(family, "lm") for family in TINY_FAMILIES]
    heads += [("llama", "score"), ("qwen3_moe", "score")]
    models = [(str(make_tiny(family, directory / f"{family}-{head}", 0, head)), head) for family, head in heads]
    (ours,) = run_distributed(1, engine_gradients, models, timeout_s=LIMIT_S)
    theirs = [transformers_gradients(path, head, Path(f"{path}-gradients")) for path, head in models]
    names = [f"{family} {head}" for family, head in heads]
    return dict(zip(names, zip(ours, theirs, strict=True), strict=True))


def test_gradients_are_those_of_transformers(gradients: dict[str, tuple[Gradients, Gradients]]) -> None:
    worst = {}
    for model, (ours, theirs) in gradients.items():
        assert ours.keys() == theirs.keys(), model
        for name, expected in theirs.items():
            scale = np.abs(expected).max()
            assert scale > 0, f"{model}: {name} has no gradient, so nothing is compared"
            limit = DECAYS_RELATIVE if name.endswith(DECAYS) else MAX_RELATIVE
            worst[model, name] = float(np.abs(ours[name] - expected).max() / scale / limit)
    assert max(worst.values()) < 1, sorted(worst.items(), key=lambda item: -item[1])[:5]
