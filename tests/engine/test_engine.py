"""An engine on two ranks, beyond the parity of layouts: order of rows, stale copies, memory, and shared failures."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from mrl.config.schema import MegatronModelConfig
from mrl.config.schema import ParallelConfig as Layout
from mrl.engine import checkpoint
from mrl.engine.checkpoint import random_states, set_random_states
from mrl.engine.engine import EngineRequest, MegatronEngine
from mrl.engine.parallel import ParallelGroups, model_parallel
from mrl.engine.scores import LossInput, LossOutput, ScoreRequest
from mrl.engine.training_state import MegatronState
from mrl.engine.weights import held_tensors
from mrl.errors import EngineError, ModelError, MrlError
from mrl.models.families import read_spec
from mrl.models.hf_reader import HfReader
from mrl.verify.spawn import run_distributed
from tests.engine.tiny_training import LENGTHS, VOCAB, build, log_probs, negative_score, on_host, share, step

LIMIT_S = 300.0
Found = dict[str, Any]
GREEDY_IN = [
    Layout(),
    Layout(tp=2),
    Layout(tp=2, sequence_parallel=True),
    Layout(cp=2),
    Layout(pp=2),
    Layout(pp=2, vpp=2),
]
CUTS = [[[0, 1, 2, 3]], [[3, 1], [0], [2]], [[2], [], [0, 3, 1]], [[3], [2], [1], [0]]]


def raised(action: Callable[[], object]) -> tuple[str, str]:
    try:
        action()
    except (MrlError, OSError) as error:
        return type(error).__name__, str(error)
    return "", ""


# --- on each rank -----------------------------------------------------------------------------------------------------


def drawing(groups: ParallelGroups) -> Found:
    """Draw random numbers before and after states are restored, from torch and from Megatron's own generator."""
    from megatron.core import tensor_parallel

    def draw() -> list[float]:
        with tensor_parallel.get_cuda_rng_tracker().fork():
            tracked = torch.rand(2).tolist()
        return [*torch.rand(2).tolist(), *tracked]

    torch.manual_seed(3)
    state = MegatronState(groups, [], *[cast(Any, None)] * 4)
    states = random_states(state)
    first, second = draw(), draw()
    set_random_states(state, states)
    again = draw()
    set_random_states(state, states)  # the states are copies: drawing has not moved them
    return {"names": sorted(states), "first": first, "second": second, "again": [again, draw()]}


def marks(path: str, layout: Layout) -> dict[str, tuple[bool, bool | None]]:
    """Return for each parameter whether tensor ranks split it, and whether it is reduced with all others."""
    with model_parallel(layout, seed=1) as groups:
        engine = build(path, layout, groups, trained=False)
        return {
            name: (parameter.tensor_model_parallel, getattr(parameter, "allreduce", None))
            for name, parameter in engine.models[0].named_parameters()
        }


def scoring(path: str, groups: ParallelGroups) -> Found:
    """Score the same rows in several divisions into micro-batches."""
    engine = build(path, Layout(), groups)
    rows, _ = share(engine)
    with_entropy = ScoreRequest(temperature=0.5, entropy="value")
    found: Found = {"log_probs": [], "entropy": [], "plain": [], "seen": [], "norms": []}
    rows = replace(rows, columns={"number": torch.arange(int(rows.response_lengths.sum())).float()})
    for cut in CUTS:
        parts = [np.array(index, np.int64) for index in cut]
        scores = engine.forward(rows, parts, with_entropy)
        assert scores is not None
        assert scores.entropy_T is not None
        assert scores.log_probs_T is not None
        found["log_probs"].append(scores.log_probs_T.tolist())
        found["entropy"].append(scores.entropy_T.tolist())
        plain = engine.forward(rows, parts, ScoreRequest())
        assert plain is not None
        found["plain"].append((plain.entropy_T is None, plain.values_T is None))
    for cut in CUTS:
        parts = [np.array(index, np.int64) for index in cut]
        seen: list[tuple[list[int], list[float]]] = []
        found["seen"].append(seen)

        def loss(batch: LossInput, seen: list[Any] = seen) -> LossOutput:
            seen.append((batch.response_lengths.tolist(), batch.columns["number"].tolist()))
            log_probs_T = batch.scores.log_probs_T
            assert log_probs_T is not None
            count = torch.tensor(float(log_probs_T.numel()))
            return LossOutput(-log_probs_T.sum() / 100, {"tokens": count, "two": torch.tensor(2.0)})

        evaluating = engine.models[0].training
        reports, _ = engine.update(rows, parts, loss, ScoreRequest())
        found["norms"].append((reports, evaluating, engine.models[0].training))
        engine.forward(rows, parts, ScoreRequest())
    found["lengths"] = rows.response_lengths.tolist()
    return found


def moving(path: str, directory: str, groups: ParallelGroups) -> Found:
    """Return results for copies on the host that are stale or not."""
    engine = build(path, Layout(), groups)
    memory, traffic = engine.memory, engine.memory.traffic

    def moved(action: Callable[[], object]) -> int:
        before = traffic.to_host_bytes
        action()
        return traffic.to_host_bytes - before

    def away_and_back() -> None:
        with on_host(memory, "parameters", "gradients", "optimizer"):
            pass

    step(engine)
    checkpoint.save(engine, directory, {})
    saved = log_probs(engine)
    step(engine)
    found: Found = {"after a step": moved(away_and_back), "again": moved(away_and_back)}
    engine.update(*share(engine), lambda batch: LossOutput(math.nan * negative_score(batch).loss, {}), ScoreRequest())
    found["after a skip"] = moved(away_and_back)
    checkpoint.load(engine, directory)
    found["after loading"] = moved(away_and_back)
    found["same"] = log_probs(engine) == saved
    copy = memory.copy_weights()
    step(engine)
    own = log_probs(engine)
    memory.offload("gradients")
    with on_host(memory, "parameters", "gradients"):
        away = dict(memory.device_bytes)
    found["stays away"] = (away["gradients"], memory.device_bytes["gradients"], memory.device_bytes["parameters"] > 0)
    memory.onload("gradients")

    def fail() -> None:
        with memory.weights_of(copy):
            found["reference"] = log_probs(engine) == saved
            raise EngineError("in the middle")

    found["failed"] = raised(fail)
    found["own again"] = log_probs(engine) == own
    wrong = replace(copy, host=copy.host[:-64])
    found["wrong copy"] = raised(lambda: memory.weights_of(wrong).__enter__())
    step(engine)  # nothing is in place that would keep it from training
    return found


def tables(path: str, groups: ParallelGroups) -> list[tuple[str, str]]:
    """Return errors of tables that do not match a model."""
    engine = build(path, Layout(), groups, trained=False)
    spec, model = engine.request.spec, engine.models[0]

    def pairs(head: Any = "lm") -> Callable[[], object]:
        return lambda: list(held_tensors(engine.models, spec, head, groups))

    found = [raised(pairs()), raised(pairs("score"))]
    model.strange = torch.nn.Parameter(torch.zeros(2))
    found.append(raised(pairs()))
    del model.strange
    norm = model.decoder.final_layernorm
    norm.weight = torch.nn.Parameter(norm.weight[:-1].detach().clone())
    found.append(raised(pairs()))
    return found


def new_heads(path: str, groups: ParallelGroups) -> Found:
    def critic(new_head: bool) -> MegatronEngine:
        settings = MegatronModelConfig(max_tokens_per_device=64)
        engine = MegatronEngine(EngineRequest(read_spec(path), "score", settings, new_head), groups)
        for parameter in engine.models[0].parameters():
            parameter.data.fill_(7)
        engine.load(HfReader(path))
        return engine

    refused = raised(lambda: critic(new_head=False))
    engine = critic(new_head=True)
    scores = engine.forward(*share(engine), ScoreRequest())
    assert scores is not None
    assert scores.values_T is not None
    return {
        "refused": refused,
        "values": sorted(set(scores.values_T.tolist())),
        "policy": (scores.log_probs_T is None, scores.entropy_T is None),
    }


def staged(path: str) -> Found:
    """Return the results of a rank that is not on the last stage, and the ranks' coordinates."""
    layout = Layout(pp=2)
    with model_parallel(layout, seed=1) as groups:
        engine = build(path, layout, groups)
        rows, parts = share(engine)
        scores = engine.forward(rows, parts, ScoreRequest())
        reports = engine.forward_backward(rows, parts, negative_score, ScoreRequest())
        with pytest.raises(EngineError, match="already has Megatron groups"), model_parallel(layout, seed=1):
            pass
        return {
            "stage": (groups.is_first_stage, groups.is_last_stage),
            "scores": scores is None,
            "reports": sorted(reports),
        }


def likeliest(path: str, layout: Layout) -> dict[int, list[int]]:
    """Return the likeliest token at each response position of this rank's rows. Padding columns have larger logits."""
    with model_parallel(layout, seed=1) as groups:
        engine = build(path, layout, groups, trained=False)
        if groups.is_last_stage:
            weight_VH = engine.models[-1].vocabulary_weight()
            weight_VH.data[VOCAB - groups.at.tp * len(weight_VH) :] = 50
        rows, parts = share(engine)
        scores = engine.forward(rows, parts, ScoreRequest(greedy=True))
        if scores is None:
            return {}
        assert scores.greedy_T is not None
        found = torch.split(scores.greedy_T, rows.response_lengths.tolist())
        return {groups.at.dp + groups.mesh.dp * at: tokens.tolist() for at, tokens in enumerate(found)}


def everything(llama: str, mixtral: str, directory: str) -> Found:
    found: Found = {"staged": staged(llama)}
    with model_parallel(Layout(tp=2), seed=1) as groups:
        found["random"] = drawing(groups)
    with model_parallel(Layout(), seed=1) as groups:
        found["scoring"] = scoring(llama, groups)
        found["moving"] = moving(llama, directory, groups)
        found["tables"] = tables(llama, groups)
        found["new heads"] = new_heads(llama, groups)
    found["likeliest"] = [likeliest(llama, layout) for layout in GREEDY_IN]
    found["marks"] = [marks(llama, Layout(tp=2))]
    for layout in (Layout(ep=2), Layout(tp=2, etp=2, sequence_parallel=True), Layout(tp=2, sequence_parallel=True)):
        found["marks"].append(marks(mixtral, layout))
    return found


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="module")
def ranks(directory: Path) -> list[Found]:
    """Results of the two ranks."""
    from tests.models.tiny_models import make_tiny  # transformers is not for the ranks, which import this module

    models = [str(make_tiny(family, directory / family)) for family in ("llama", "mixtral")]
    return run_distributed(2, everything, *models, str(directory / "saved"), timeout_s=LIMIT_S)


# --- what they must have found ----------------------------------------------------------------------------------------


def test_all_generators_go_back_to_where_their_states_were_taken(ranks: list[Found]) -> None:
    for found in ranks:
        random = found["random"]
        assert random["again"] == [random["first"]] * 2
        assert random["second"] != random["first"]
        assert "cpu" in random["names"]
        assert [name for name in random["names"] if name.startswith("tensor-parallel/")]
    one, other = (found["random"]["first"] for found in ranks)
    assert one[:2] == other[:2]  # the same seed on both
    assert one[2:] != other[2:]  # what tensor ranks draw for their own parts differs


def test_scores_come_in_row_order_however_rows_were_grouped(ranks: list[Found]) -> None:
    for found in (ranks[0]["scoring"], ranks[1]["scoring"]):
        assert all(len(each) == sum(found["lengths"]) for each in found["log_probs"])
        for kind in ("log_probs", "entropy"):
            for other in found[kind]:
                np.testing.assert_allclose(other, found[kind][0], rtol=1e-4, atol=1e-5)
        assert all(plain == (True, True) for plain in found["plain"])
        assert min(found["entropy"][0]) > 0


def test_the_likeliest_tokens_are_those_of_transformers_in_every_layout(ranks: list[Found], directory: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory / "llama", dtype=torch.float32)
    tokens = torch.randint(0, VOCAB, (int(LENGTHS.sum()),), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        rows = [model(row[None]).logits[0, 1:-1].argmax(-1).tolist() for row in torch.split(tokens, LENGTHS.tolist())]
    for number, layout in enumerate(GREEDY_IN):
        found = ranks[0]["likeliest"][number] | ranks[1]["likeliest"][number]
        assert [found[row] for row in range(len(rows))] == rows, layout


def test_each_micro_batch_sees_its_own_rows_columns(ranks: list[Found]) -> None:
    for found in (rank["scoring"] for rank in ranks):
        lengths = np.array(found["lengths"])
        starts = np.cumsum(lengths) - lengths
        for cut, seen in zip(CUTS, found["seen"], strict=True):
            assert len(seen) == len(cut)
            for index, (of_rows, numbers) in zip(cut, seen, strict=True):
                assert of_rows == [found["lengths"][row] for row in index]
                assert numbers == [float(x) for row in index for x in range(starts[row], starts[row] + lengths[row])]


def test_reports_are_added_up_over_micro_batches(ranks: list[Found]) -> None:
    for found in (rank["scoring"] for rank in ranks):
        for cut, (reports, was_training, is_training) in zip(CUTS, found["norms"], strict=True):
            assert reports == {"tokens": sum(found["lengths"]), "two": 2 * len(cut)}
            assert (was_training, is_training) == (False, True)


def test_a_host_copy_counts_until_the_weights_change(ranks: list[Found]) -> None:
    for found in (rank["moving"] for rank in ranks):
        assert found["after a step"] > 0
        assert (found["again"], found["after a skip"]) == (0, 0)
        assert found["after loading"] > 0
        assert found["same"], "weights of before the checkpoint came back from the host"


def test_what_was_away_stays_away_and_a_failure_leaves_the_own_weights(ranks: list[Found]) -> None:
    for found in (rank["moving"] for rank in ranks):
        assert found["stays away"] == (0, 0, True)
        assert found["reference"]
        assert found["failed"] == ("EngineError", "in the middle")
        assert found["own again"]
        assert found["wrong copy"][1].endswith("bytes does not fit a model of this shape and layout")


def test_a_table_that_does_not_fit_the_model_is_refused(ranks: list[Found]) -> None:
    for found in (rank["tables"] for rank in ranks):
        fits, score, strange, short = (said for _, said in found)
        assert fits == ""
        assert score == "the table has `score.weight` in chunk 0 of this rank, but Megatron does not"
        assert strange == "the table does not cover 1 of Megatron's parameters: `strange` in chunk 0"
        assert short == "`decoder.final_layernorm.weight` is (63,) in Megatron and (64,) in the table"


def test_a_new_score_head_begins_at_zero_and_only_where_it_was_asked_for(ranks: list[Found]) -> None:
    for found in (rank["new heads"] for rank in ranks):
        assert found["refused"][0] == ModelError.__name__
        assert found["values"] == [0.0]
        assert found["policy"] == (True, True)


def test_only_the_last_stage_speaks(ranks: list[Found]) -> None:
    first, last = (rank["staged"] for rank in ranks)
    assert first == {"stage": (True, False), "scores": True, "reports": []}
    assert last == {"stage": (False, True), "scores": False, "reports": ["loss"]}


def test_parameters_say_who_splits_them_and_with_whom_they_are_reduced(ranks: list[Found]) -> None:
    for found in ranks:
        dense, *experts = found["marks"]
        for name, (split, allreduce) in dense.items():
            assert split == ("layernorm" not in name), name
            assert allreduce is not False
        for marked, with_all_others in zip(experts, (False, True, False), strict=True):
            of_experts = {each for name, each in marked.items() if "experts" in name}
            assert of_experts == {(True, with_all_others)}
            assert all(allreduce is not False for name, (_, allreduce) in marked.items() if "experts" not in name)


def test_without_a_world_there_are_no_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    # vLLM leaves its world behind in a process that has tested an engine.
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    with pytest.raises(EngineError, match=r"torch\.distributed is not initialized"), model_parallel(Layout(), seed=1):
        pass
