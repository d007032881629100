"""Router replay: forced experts give the log-probs and gradients of transformers with the same experts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mrl.config.schema import ParallelConfig as Layout
from mrl.engine.engine import EngineRequest, MegatronEngine
from mrl.engine.packed_rows import SequenceSharding, TokenRows, pack
from mrl.engine.parallel import model_parallel
from mrl.engine.router_replay import ReplayedRouter, RouterReplay
from mrl.engine.scores import ScoreRequest
from mrl.engine.weights import held_tensors
from mrl.errors import BatchError, EngineError
from mrl.models.families import read_spec
from mrl.models.hf_reader import HfReader
from mrl.models.regions import slices
from mrl.models.table import hf_tensors
from mrl.plan.known_models import model_spec
from mrl.verify.parity import TEMPERATURE, Difference, Floats, ParityCase, make_rows, measure, merge_ranks
from mrl.verify.spawn import run_distributed
from tests.engine.tiny_training import negative_score

LIMIT_S = 300.0
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
EXPERTS_RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
LAYOUTS = [
    (Layout(tp=2, ep=2, sequence_parallel=True), RECOMPUTED),
    (Layout(tp=2, pp=2, sequence_parallel=True), {}),
    (Layout(pp=2, vpp=2, ep=2), RECOMPUTED),
    (Layout(pp=2, vpp=2, cp=2), {}),
    (Layout(cp=2, ep=2), EXPERTS_RECOMPUTED),
]


def case_of(path: str, layout: Layout, megatron: dict[str, Any], max_tokens: int = 64) -> ParityCase:
    return ParityCase(path, "lm", layout, max_tokens, megatron=megatron, routes=True)


def gradients(path: str) -> tuple[list[float], dict[str, Floats], dict[str, float]]:
    """Return log-probs, the gradient of every tensor of the files, and the share of other choices."""
    case = case_of(path, Layout(), RECOMPUTED)
    spec = read_spec(path)
    with model_parallel(case.parallel, seed=1) as groups:
        engine = MegatronEngine(EngineRequest(spec, "lm", case.settings, replays_routes=True), groups)
        engine.load(HfReader(path))
        rows = make_rows(spec, case)
        batches = np.array_split(np.arange(len(rows.lengths)), 3)
        scores = engine.forward(rows, batches, ScoreRequest(TEMPERATURE))
        assert engine.optimizer is not None
        assert engine.router_replay is not None
        share = engine.router_replay.take_difference()
        engine.optimizer.zero_grad()
        engine.forward_backward(rows, batches, negative_score, ScoreRequest(TEMPERATURE))
        shapes = hf_tensors(spec, "lm")
        whole: dict[str, Floats] = {}
        for shard, tensor in held_tensors(engine.models, spec, "lm", groups):
            for piece in shard.pieces if shard.trained else ():
                whole.setdefault(piece.hf, np.zeros(shapes[piece.hf], np.float32))
                whole[piece.hf][slices(piece.source)] = tensor.main_grad[slices(piece.target)].numpy()
        assert scores is not None
        assert scores.log_probs_T is not None
        return scores.log_probs_T.tolist(), whole, share


class ForcedRouter:
    """Replaces the choice of a router of transformers; counts the tokens for which it chose other experts."""

    def __init__(self, routes_TK: torch.Tensor, kind: str, scaling: float) -> None:
        self.routes_TK, self.kind, self.scaling = routes_TK, kind, scaling
        self.row_routes_TK = routes_TK
        self.num_others = 0

    def __call__(self, gate: Any, inputs: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        logits_TE, _, own_TK = output
        has_route_T = self.row_routes_TK[:, 0] >= 0
        others_T = (own_TK.sort(1).values != self.row_routes_TK.sort(1).values).any(1)
        self.num_others += int((others_T & has_route_T).sum())
        chosen_TK = torch.where(has_route_T[:, None], self.row_routes_TK, own_TK)
        score_TE = logits_TE.sigmoid() if self.kind == "sigmoid" else logits_TE.softmax(-1)
        weights_TK = score_TE.gather(1, chosen_TK)
        return logits_TE, self.scaling * weights_TK / weights_TK.sum(1, keepdim=True), chosen_TK


def transformers_gradients(path: Path) -> tuple[list[float], dict[str, Floats], dict[str, float]]:
    from transformers import AutoModelForCausalLM  # not for the ranks, which import this module

    spec = read_spec(path)
    rows = make_rows(spec, case_of(str(path), Layout(), {}))
    assert spec.moe is not None
    assert rows.routes is not None
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    layers = [layer for layer in range(spec.num_layers) if spec.has_experts(layer)]
    routers = [
        ForcedRouter(rows.routes[:, at].long(), spec.moe.scoring, spec.moe.scaling) for at, _ in enumerate(layers)
    ]
    for layer, router in zip(layers, routers, strict=True):
        model.model.layers[layer].mlp.gate.register_forward_hook(router)
    scores = []
    starts = np.cumsum(rows.lengths - 1) - (rows.lengths - 1)
    for row, tokens in enumerate(torch.split(rows.tokens, rows.lengths.tolist())):
        num = int(rows.response_lengths[row])
        for router in routers:
            of_row = router.routes_TK[starts[row] : starts[row] + len(tokens) - 1]
            router.row_routes_TK = torch.cat([of_row, torch.full_like(router.routes_TK[:1], -1)])
        logits = model(tokens[None]).logits[0] / TEMPERATURE
        predicted = logits[len(tokens) - num - 1 : len(tokens) - 1].log_softmax(-1)
        scores.append(predicted.gather(1, tokens[len(tokens) - num :, None])[:, 0])
    log_probs = torch.cat(scores)
    (-log_probs.sum() / 100).backward()  # the loss of `negative_score`
    found = {name: weight.grad.numpy() for name, weight in model.named_parameters() if weight.grad is not None}
    num_forced = int((rows.routes[:, 0, 0] >= 0).sum())
    shares = [router.num_others / num_forced for router in routers]
    names = [f"other_experts/layer_{layer}" for layer in layers]
    whole = {"other_experts": sum(shares) / len(shares), "other_experts_worst": max(shares)}
    return log_probs.tolist(), found, whole | dict(zip(names, shares, strict=True))


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_forced_experts_give_the_gradients_of_transformers(family: str, tmp_path: Path) -> None:
    from tests.models.tiny_models import make_tiny

    path = make_tiny(family, tmp_path)
    expected, expected_gradients, others = transformers_gradients(path)
    ((log_probs, found, share),) = run_distributed(1, gradients, str(path), timeout_s=LIMIT_S)
    assert log_probs == pytest.approx(expected, abs=2e-5)
    assert share == pytest.approx(others)
    assert share["other_experts"] > 0.5, "random experts are rarely the router's own"
    by_layer = [others[name] for name in others if "layer" in name]
    assert len({*by_layer}) == len(by_layer) > 1, "the layers can be told apart"
    compared = 0
    found["model.embed_tokens.weight"][0] = 0.0  # the padding token, which transformers does not train
    for name, gradient in found.items():
        if name in expected_gradients:
            compared += 1
            assert np.abs(gradient - expected_gradients[name]).max() < 1e-5, name
        else:  # transformers stacks the experts of a layer
            layer, _, rest = name.partition(".experts.")
            number, projection, _ = rest.split(".")
            stacked = "down_proj" if projection == "down_proj" else "gate_up_proj"
            of_expert = expected_gradients[f"{layer}.experts.{stacked}"][int(number)]
            half = len(of_expert) // 2
            parts = {"gate_proj": of_expert[:half], "up_proj": of_expert[half:], "down_proj": of_expert}
            assert np.abs(gradient - parts[projection]).max() < 1e-5, name
    assert compared > 20


@pytest.mark.slow
def test_every_layout_replays_as_one_rank_does(tmp_path: Path) -> None:
    from tests.models.tiny_models import make_tiny

    path = str(make_tiny("qwen3_moe", tmp_path))
    one = merge_ranks([run_distributed(1, measure, [case_of(path, Layout(), {}, 1000)], timeout_s=LIMIT_S)[0][0]])
    cases = [case_of(path, layout, megatron) for layout, megatron in LAYOUTS]
    by_rank = run_distributed(4, measure, cases, timeout_s=LIMIT_S)
    for (layout, _), ranks in zip(LAYOUTS, zip(*by_rank, strict=True), strict=True):
        difference = Difference.between(one, merge_ranks(list(ranks)))
        assert difference.scores < 2e-5, (layout, difference)
        assert max(difference.loss, difference.grad_norm, difference.parameters) < 1e-5, (layout, difference)


def own_routes(path: str, layouts: list[tuple[Layout, dict[str, Any]]]) -> list[dict[int, Floats]]:
    """Return the choices that each layout records, by row, after checking that replaying them changes nothing."""
    found = []
    for layout, megatron in layouts:
        case = replace(case_of(path, layout, megatron), routes=False)
        spec = read_spec(path)
        with model_parallel(layout, seed=1) as groups:
            engine = MegatronEngine(EngineRequest(spec, "lm", case.settings, replays_routes=True), groups)
            engine.load(HfReader(path))
            assert engine.router_replay is not None
            mine = np.arange(groups.at.dp, case.num_rows, groups.mesh.dp)
            rows = make_rows(spec, case).take(mine)
            batches = [np.arange(len(mine))[::-1][part::2] for part in range(2)]
            request = ScoreRequest(TEMPERATURE)
            scores, routes = engine.forward_with_routes(rows, batches, request)
            again = engine.forward(replace(rows, routes=routes), batches, request)
            assert engine.router_replay.take_difference()["other_experts"] == 0
            if scores is not None and again is not None:
                assert torch.equal(scores.log_probs_T, again.log_probs_T)  # type: ignore[arg-type]
            by_row = torch.split(routes, (rows.lengths - 1).tolist())
            found.append({int(row): part.numpy() for row, part in zip(mine, by_row, strict=True)})
    return found


def test_every_layout_records_the_choices_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM  # not for the ranks, which import this module

    from tests.models.tiny_models import make_tiny

    path = make_tiny("qwen3_moe", tmp_path)
    rows = make_rows(read_spec(path), replace(case_of(str(path), Layout(), {}), routes=False))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    expected = []
    for tokens in torch.split(rows.tokens, rows.lengths.tolist()):
        with torch.no_grad():
            logits = model(tokens[None], output_router_logits=True).router_logits
        expected.append(torch.stack([layer[:-1].topk(2).indices for layer in logits], 1).sort(-1).values.numpy())
    by_rank = run_distributed(4, own_routes, str(path), LAYOUTS, timeout_s=LIMIT_S)
    for (layout, _), ranks in zip(LAYOUTS, zip(*by_rank, strict=True), strict=True):
        for of_rank in ranks:
            for row, routes in of_rank.items():
                assert np.array_equal(np.sort(routes, -1), expected[row]), (layout, row)


def test_padding_and_last_tokens_have_no_routes() -> None:
    routes = torch.arange(5 * 2, dtype=torch.uint8).view(5, 1, 2)
    rows = TokenRows(torch.arange(7), np.array([4, 3]), np.array([2, 1]), {}, routes=routes)
    one = pack(rows, SequenceSharding(), torch.device("cpu")).routes_TLK
    assert one is not None
    assert one[:, 0, 0].tolist() == [0, 2, 4, -1, 6, 8, -1]
    second = pack(rows.take([1]), SequenceSharding(cp=2, cp_rank=0), torch.device("cpu")).routes_TLK
    assert second is not None
    assert second[:, 0, 0].tolist() == [6, -1], "the first and the last token of a row of four, which is padding"
    with pytest.raises(BatchError, match="routes of 4 tokens, but the rows have 5 tokens before their last ones"):
        TokenRows(torch.arange(7), np.array([4, 3]), np.array([2, 1]), {}, routes=routes[1:])


def test_a_router_uses_each_route_once() -> None:
    scores_TE, routes_TK = torch.randn(3, 4), torch.tensor([[0, 1], [2, 3], [-1, -1]])
    top_k = partial(torch.topk, dim=1)

    def choose(router: ReplayedRouter) -> list[list[int]]:
        def own(scores: torch.Tensor, topk: int, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
            return top_k(scores, topk)

        experts: list[list[int]] = router.get_replay_topk(scores_TE, 2, default_compute_topk=own)[1].tolist()
        return experts

    router = ReplayedRouter(torch.zeros(2, dtype=torch.int64))
    own = top_k(scores_TE, 2)[1].tolist()
    assert choose(router) == own, "without replay it chooses itself"
    router.begin(replays=True, trains=True)
    router.tell(routes_TK)
    with torch.no_grad():
        assert choose(router) == [[0, 1], [2, 3], own[2]]
    assert router.num_left == 1, "the layer will be recomputed"
    assert choose(router) == [[0, 1], [2, 3], own[2]]
    assert router.num_left == 0
    with pytest.raises(EngineError, match="ran more often"):
        choose(router)
    replay = RouterReplay([], model_spec("Qwen/Qwen3-30B-A3B"), SimpleNamespace(device="cpu"))  # type: ignore[arg-type]
    replay._routers[object()] = [(0, router)]  # type: ignore[index]
    replay.end()
    router.tell(routes_TK)
    with pytest.raises(EngineError, match="after a pass with router replay, 1 routes of micro-batches were not used"):
        replay.end()
    router.begin(replays=True, trains=True)
    router.tell(routes_TK[:2])
    with pytest.raises(EngineError, match=r"the shape \[2, 2\], but the router chose \[3, 2\]"):
        choose(router)
