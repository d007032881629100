"""Conversions between batches and rows, and one real rank: initialization, checkpoints and offload of a model."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import constants

from mrl.config.algorithm import AlgorithmConfig, KlConfig
from mrl.config.mesh import Mesh
from mrl.config.schema import TrainedModelConfig
from mrl.controller import Dispatch
from mrl.controller.worker import registered_methods
from mrl.engine.checkpoint_files import export_checkpoint
from mrl.engine.scores import LossOutput, ScoreRequest, Scores
from mrl.errors import BatchError
from mrl.models.families import read_spec
from mrl.models.hf_reader import HfReader
from mrl.models.small import small_config
from mrl.plan.known_models import model_values
from mrl.protocol import DataProto
from mrl.protocol.columns import from_rows
from mrl.verify.layout import make_random
from mrl.verify.spawn import run_distributed
from mrl.workers.actor import ActorRolloutRefWorker
from mrl.workers.messages import ModelSetup
from mrl.workers.model_worker import ModelWorker, optional_values, response_column, response_mask, token_rows
from tests.hub import make_hub_cache
from tests.workers.stubs import SETUP, StubEngine, batch_of, make_place, make_rows


@pytest.mark.parametrize("with_holes", [True, False])
def test_rows_are_prompt_and_response_one_after_another(with_holes: bool) -> None:
    made = make_rows("values", "returns", with_holes=with_holes)
    batch = batch_of(made)
    rows = token_rows(batch, optional_values(batch, "values", "returns", "advantages"))
    assert rows.tokens.tolist() == [token for row in made for token in row.prompt + row.response]
    assert rows.lengths.tolist() == [len(row.prompt) + len(row.response) for row in made]
    assert rows.response_lengths.tolist() == [len(row.response) for row in made]
    assert rows.response_lengths.dtype == np.int64
    assert rows.before
    assert rows.columns.keys() == {"response_mask", "values", "returns"}
    assert rows.columns["response_mask"].dtype == torch.bool
    assert rows.columns["response_mask"].tolist() == [is_written for row in made for is_written in row.mask]
    for name in ("values", "returns"):
        assert torch.equal(rows.columns[name], torch.cat([row.columns[name] for row in made]))


def test_rows_have_the_sampling_masks_and_each_contains_its_token() -> None:
    rows = {"prompts": from_rows([[9], [8]]), "responses": from_rows([[1, 2], [3]])}
    masks = [torch.tensor([[1, -1], [5, 2]]), torch.tensor([[3, 4]])]
    batch = DataProto.from_dict({**rows, "sampling_mask": from_rows(masks)})
    assert token_rows(batch, {}).columns["sampling_mask"].tolist() == [[1, -1], [5, 2], [3, 4]]
    assert token_rows(batch, {}).take([1]).columns["sampling_mask"].tolist() == [[3, 4]]
    masks[0][1, 1] = 7
    with pytest.raises(BatchError, match="response token 1 of the batch, 2, is not in its sampling mask"):
        token_rows(DataProto.from_dict({**rows, "sampling_mask": from_rows(masks)}), {})


def test_a_mask_says_what_was_written_and_without_one_everything_was() -> None:
    responses = from_rows([[1, 2, 3], [4]])
    assert response_mask(DataProto.from_dict({"responses": responses})).tolist() == [True] * 4
    masked = DataProto.from_dict({"responses": responses, "response_mask": from_rows([[0, 1, 0], [1]])})
    assert response_mask(masked).tolist() == [False, True, False, True]
    assert response_mask(masked).dtype == torch.bool


def test_an_answer_is_a_float32_column_of_the_rows_that_were_asked_about() -> None:
    batch = DataProto.from_dict({"responses": from_rows([[1, 2, 3], [4]])}, row_ids=[7, 3])
    answer = response_column(batch, "values", torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64))
    assert answer is not None
    assert [row.tolist() for row in answer["values"].rows()] == [
        pytest.approx([0.1, 0.2, 0.3]),
        pytest.approx([0.4]),
    ]
    assert answer.values("values").dtype == torch.float32
    assert answer.row_ids.tolist() == [7, 3]
    assert response_column(batch, "values", None) is None


def test_micro_batches_are_those_of_the_data_parallel_rank() -> None:
    sizes = [[2, 3], [1, 1, 4], [6], [1]]
    for rank in range(16):
        mesh = Mesh(16, tp=2, pp=2)
        worker = ModelWorker(make_place(rank, mesh), SETUP)
        dp = rank // 2 % 4
        found = [index.tolist() for index in worker.micro_batches(sizes)]
        assert [len(index) for index in found] == sizes[dp]
        assert [row for index in found for row in index] == list(range(sum(sizes[dp])))


def test_a_worker_reads_the_copy_of_its_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tmp_path / "made"
    made.mkdir()
    for name in ("config.json", "model.safetensors"):
        (made / name).write_text("{}")
    own = make_hub_cache(tmp_path / "own", "maker/tiny", made)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "own"))
    setup = replace(SETUP, path=str(tmp_path / "drivers" / own.relative_to(tmp_path / "own")))
    assert ModelWorker(make_place(), setup).setup.path == str(own)
    assert ModelWorker(make_place(), SETUP).setup == SETUP


def test_an_empty_micro_batch_stays_one() -> None:
    worker = ModelWorker(make_place(), SETUP)
    assert [index.tolist() for index in worker.micro_batches([[2, 0, 1]])] == [[0, 1], [], [2]]


def test_the_parts_that_leave_and_come_are_the_named_ones() -> None:
    worker = ModelWorker(make_place(), SETUP)
    worker.engine = engine = StubEngine(None)  # type: ignore[assignment]
    worker.offload("gradients", "optimizer")
    worker.onload("parameters")
    assert engine.memory.asked == [("offload", ("gradients", "optimizer")), ("onload", ("parameters",))]


def test_memory_is_given_back_when_the_turn_ends_and_not_after_every_pass() -> None:
    made = make_rows("advantages", "old_log_probs")
    worker = ModelWorker(make_place(), SETUP)
    rows, sizes = token_rows(batch_of(made), {}), [[len(made)]]
    worker.engine = engine = StubEngine(Scores(torch.zeros(rows.response_lengths.sum()), None))  # type: ignore[assignment]
    worker.forward(rows, sizes, ScoreRequest())
    worker.update(rows, sizes, lambda _: LossOutput(torch.zeros((), requires_grad=True), {}), ScoreRequest())
    assert engine.memory.asked == []
    worker.give_back()
    assert engine.memory.asked == [("give_back", ())]


def test_every_rank_takes_part_in_what_concerns_the_whole_model() -> None:
    specs = registered_methods(ModelWorker)
    for name in (
        *("init_model", "begin_checkpoint", "checkpoint_is_written", "finish_checkpoint", "load_checkpoint"),
        *("offload", "onload", "give_back", "device_memory"),
    ):
        assert specs[name].dispatch is Dispatch.ONE_TO_ALL, name


def test_reductions_go_over_the_ranks_and_leave_what_they_are_given() -> None:
    store, found = torch.distributed.HashStore(), dict[int, Any]()

    def work(rank: int) -> None:
        ranks = torch.distributed.ProcessGroupGloo(store, rank, 2, timedelta(seconds=20))
        worker = ModelWorker(make_place(rank, Mesh(2)), SETUP)
        worker.engine = SimpleNamespace(  # type: ignore[assignment]
            groups=SimpleNamespace(device=torch.device("cpu"), dp=ranks)
        )
        mine = torch.tensor([float(rank), 5.0 - rank])
        found[rank] = [worker.sum_over_shards(mine).tolist(), worker.max_over_shards(mine).tolist(), mine.tolist()]

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {rank: [[1.0, 9.0], [1.0, 5.0], [float(rank), 5.0 - rank]] for rank in range(2)}


# --- a real rank ------------------------------------------------------------------------------------------------------

PROMPTS, RESPONSES, TEMPERATURE = [[1, 2, 3], [4]], [[5, 6, 7, 8], [9, 10, 11]], 0.7


class RankOfLocalWorld(ActorRolloutRefWorker):
    """A worker in a world that `run_distributed` has already created."""

    def init_process_group(self, backend: str, timeout_s: float) -> None:
        assert (backend, timeout_s) == ("gloo", 61), "what the setup says"


def life_of_a_model(path: str, directory: str) -> dict[str, Any]:
    """Create a worker, train, and save; then create another, load, and return both results for the same rows."""
    settings = TrainedModelConfig(dtype="float32", max_tokens_per_device=64, optimizer={"lr": 1e-2})
    setup = ModelSetup(path, "lm", settings, seed=1, timeout_s=61, keeps_reference=True)
    algorithm = AlgorithmConfig(advantage="grpo", kl=KlConfig(where="loss"))
    columns: dict[str, Any] = {"prompts": from_rows(PROMPTS), "responses": from_rows(RESPONSES)}
    sizes, found = [[1, 1], [2]], dict[str, Any]()
    batch = DataProto.from_dict(columns)

    def record(worker: ActorRolloutRefWorker, when: str) -> None:
        for name, method in (("policy", worker.compute_log_prob), ("reference", worker.compute_ref_log_prob)):
            answer = method(batch, sizes)
            assert answer is not None, "one stage is the last"
            (column,) = answer.columns()
            found[f"{name} {when}"] = answer.values(column).tolist()

    for seed, life in ((1, "first"), (7, "second")):
        worker = RankOfLocalWorld(make_place(), replace(setup, seed=seed), algorithm, TEMPERATURE, 50)
        with worker._groups:
            facts = worker.init_model()
            found[f"seed of the {life} life"] = torch.initial_seed()
            record(worker, f"at the {life} beginning")
            if life == "first":
                advantages = from_rows([[1.0] * 4, [0.5] * 3])
                given = {"advantages": advantages, "ref_log_probs": from_rows([[-1.0] * 4, [-2.0] * 3])}
                report = worker.update_actor(DataProto.from_dict(columns | given), sizes)
                record(worker, "after the update")
                worker.begin_checkpoint(directory)
                worker.update_actor(DataProto.from_dict(columns | given), sizes)  # is in no checkpoint
                worker.finish_checkpoint()
                found["is written"] = worker.checkpoint_is_written()
                found |= {"report": report, "facts": facts, "threads": torch.get_num_threads()}
            else:
                worker.load_checkpoint(directory)
                record(worker, "after loading")
    return found


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Any]]:
    """Return a model, its export, and the results of both workers."""
    directory = tmp_path_factory.mktemp("life")
    values = small_config(model_values("Qwen3-8B"), TrainedModelConfig(max_tokens_per_device=64).parallel)
    path = make_random(values, "lm", directory / "model")
    (found,) = run_distributed(1, life_of_a_model, str(path), str(directory / "checkpoint"), timeout_s=120)
    export_checkpoint(directory / "checkpoint", path, "lm", torch.float32, directory / "checkpoint-hf")
    return path, directory / "checkpoint-hf", found


Lives = tuple[Path, Path, dict[str, Any]]


def test_the_reference_stays_what_the_run_began_with_even_on_resume(lives: Lives) -> None:
    found = lives[2]
    first = found["policy at the first beginning"]
    assert found["is written"], "the save has ended"
    assert found["reference at the first beginning"] == first
    assert found["reference after the update"] == first
    assert found["policy at the second beginning"] == first
    assert found["reference after loading"] == first, "not the weights of the checkpoint"
    assert found["policy after the update"] != first, "it has changed"
    assert found["policy after loading"] == found["policy after the update"], "it continues from the checkpoint"


def test_what_is_drawn_follows_from_the_seed_of_the_run(lives: Lives) -> None:
    assert (lives[2]["seed of the first life"], lives[2]["seed of the second life"]) == (1, 7)


def test_log_probs_are_those_of_the_tempered_distribution(lives: Lives) -> None:
    from transformers import AutoModelForCausalLM

    path, exported, found = lives
    for directory, when in ((path, "at the first beginning"), (exported, "after the update")):
        oracle = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        expected: list[float] = []
        for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
            with torch.no_grad():
                logits = oracle(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
            log_probs = torch.log_softmax(logits.double() / TEMPERATURE, -1)
            expected += [float(log_probs[at, token]) for at, token in enumerate(response)]
        assert found[f"policy {when}"] == pytest.approx(expected, abs=1e-4), when


def test_a_rank_reports_its_part_and_what_all_know(lives: Lives) -> None:
    report = lives[2]["report"]
    assert report.parts["tokens"] == 7.0
    assert report.grad_norm > 0
    assert (report.learning_rate, report.applied) == (1e-2, True)


def test_the_driver_learns_what_it_plans_with(lives: Lives) -> None:
    path, exported, found = lives
    spec, facts = read_spec(str(path)), found["facts"]
    assert facts.num_parameters == spec.num_parameters
    assert facts.flops_per_token == spec.flops_per_token
    assert facts.device == "cpu"
    assert facts.packing.row_multiple == facts.packing.pack_multiple == facts.packing.context_size == 1
    assert found["threads"] == 1, "a rank is a CPU slot"
    HfReader(str(exported)).check(read_spec(str(exported)), "lm", False)
