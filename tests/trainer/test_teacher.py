"""Which teachers are refused before Ray starts, and what figures say of the others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mrl.config.algorithm import AlgorithmConfig, DistillationConfig
from mrl.config.resolved.load import load_config
from mrl.config.role_kinds import teacher_of
from mrl.config.schema import Config, ModelConfig, TeacherConfig
from mrl.config.step_calls import TEACHER_LOG_PROB
from mrl.data.chat import load_tokenizer
from mrl.data.teacher_context import Untaught
from mrl.demo.model import save_toy_tokenizer
from mrl.errors import DataError, ModelError
from mrl.protocol import DataProto
from mrl.protocol.columns import from_rows
from mrl.trainer.checks import check_teachers
from mrl.trainer.components import model_setup, role_worker
from mrl.trainer.step_metrics import distillation_metrics
from mrl.trainer.teachers import Teachers
from mrl.trainer.validation import validated_kl

LAPTOP = Path(__file__).parents[2] / "configs" / "laptop-distill.yaml"
SHAPE = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def model(directory: Path, more: int = 0) -> Path:
    """A tokenizer, and a shape with room for more tokens."""
    vocab = save_toy_tokenizer(directory)
    (directory / "config.json").write_text(json.dumps({**SHAPE, "vocab_size": vocab + more}))
    return directory


def taught(directory: Path, more: int, **distillation: Any) -> tuple[Config, list[tuple[str, str]]]:
    config = load_config(str(LAPTOP)).config
    policy, teacher = model(directory / "policy"), model(directory / "teacher", more)
    config = replace(
        config,
        model=ModelConfig(path=str(policy)),
        teacher=TeacherConfig(path=str(teacher), max_tokens_per_device=64),
        algorithm=AlgorithmConfig(advantage="grpo", distillation=DistillationConfig(**distillation)),
    )
    return config, list(check_teachers(config, load_tokenizer(str(policy))))


def test_a_teacher_may_have_rows_for_more_tokens_but_not_for_fewer(tmp_path: Path) -> None:
    _, warnings = taught(tmp_path / "more", 7, form="top_k")
    assert not warnings
    with pytest.raises(ModelError, match=r"has embeddings for \d+ tokens, but the policy writes \d+"):
        taught(tmp_path / "fewer", -1, form="top_k")


def test_a_teacher_names_no_more_tokens_than_there_are(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"top_k=100000 exceeds the policy's \d+ tokens"):
        taught(tmp_path, 0, form="top_k", top_k=100_000)


def test_a_policy_that_teaches_itself_names_no_more_tokens_than_there_are(tmp_path: Path) -> None:
    config, _ = taught(tmp_path, 0, form="full")
    own = DistillationConfig(form="top_k", top_k=100_000, context="Answer {prompt}")
    config = replace(config, teacher=None, algorithm=replace(config.algorithm, distillation=own))
    with pytest.raises(ModelError, match=r"top_k=100000 exceeds the policy's \d+ tokens"):
        list(check_teachers(config, load_tokenizer(config.model.path)))


def test_a_form_with_distributions_refuses_a_teacher_of_other_tokens(tmp_path: Path) -> None:
    config, _ = taught(tmp_path, 0, form="full")
    assert config.teacher is not None
    file = Path(config.teacher.path, "tokenizer.json")
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    (first, one), (second, other) = list(vocab.items())[40:42]
    vocab[first], vocab[second] = other, one
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError, match=r"2 of the policy's .*form=full compares distributions"):
        list(check_teachers(config, load_tokenizer(config.model.path)))


def test_the_share_of_what_is_earned() -> None:
    assert distillation_metrics({"actor/taught_abs": 1.0, "actor/advantages_abs": 3.0}) == {"actor/taught_share": 0.25}
    assert distillation_metrics({"actor/loss": 1.0}) == {}


def test_means_of_a_teacher_are_over_the_tokens_that_have_one() -> None:
    means = {"actor/teacher_kl": 0.3, "actor/teacher_mass": 0.2, "actor/taught_tokens": 0.25, "actor/loss": 1.0}
    assert distillation_metrics(means) == pytest.approx({"actor/teacher_kl": 1.2, "actor/teacher_mass": 0.8})
    assert distillation_metrics(means | {"actor/taught_tokens": 0.0}) == {}


@pytest.mark.parametrize("with_mask", [False, True])
def test_the_kl_of_validation_is_a_mean_over_the_tokens_that_the_policy_wrote(with_mask: bool) -> None:
    columns = {"prompts": from_rows([[1], [2, 3]]), "responses": from_rows([[4, 5], [6]])}
    if with_mask:
        columns["response_mask"] = from_rows([torch.tensor([True, False]), torch.tensor([True])])
    names = {"uid": np.array(["a", "b"], object), "data_source": np.array(["sums", "sums"], object)}
    samples = [DataProto.from_dict(columns | names, row_ids=np.array([3, 5])) for _ in range(2)]
    asked = []

    def role(name: str, values: list[list[float]]) -> Any:
        def score(method: str, batch: DataProto) -> DataProto:
            asked.append(method)
            return batch.with_column(name, from_rows([torch.tensor(row) for row in values]))

        return SimpleNamespace(score=score)

    actor, teacher = role("old_log_probs", [[-1.0, -7.0], [-2.0]]), role("teacher_log_probs", [[-2.0, -1.0], [-4.0]])
    teachers = Teachers(load_config(str(LAPTOP)).config, {"teacher": teacher})
    values, untaught = validated_kl(actor, teachers, samples, 1.0)
    assert untaught == {}
    assert np.mean(list(values.values())) == (1.5 if with_mask else -1.0)
    assert list(values) == ["sums a", "sums b"]
    assert values["sums b"] > values["sums a"], "the second prompt's tokens differ more"
    assert asked == ["compute_log_prob", "compute_teacher_log_prob"] * 2


BY_SOURCE: dict[str, Any] = {
    "teacher": TeacherConfig(path="general", max_tokens_per_device=64),
    "teachers": {
        "math": TeacherConfig(path="math", max_tokens_per_device=64, sources=["gsm8k", "math/*"]),
        "code": TeacherConfig(path="code", max_tokens_per_device=64, sources=["code"]),
    },
}


def test_each_row_is_read_by_the_teacher_of_its_data_source() -> None:
    sources = ["math/algebra", "code", "web", "gsm8k", "web"]
    of_rows = {"responses": from_rows([[i, i] for i in range(5)]), "data_source": np.array(sources, object)}
    rows = DataProto.from_dict(of_rows, row_ids=np.array([9, 7, 5, 3, 1]))
    batch = rows.select("responses")
    asked: dict[str, list[int]] = {}

    def client(role: str, level: float) -> Any:
        def score(method: str, rows: DataProto) -> DataProto:
            assert method == "compute_teacher_log_prob"
            asked[role] = rows.row_ids.tolist()
            return rows.with_column("teacher_log_probs", from_rows([torch.full((2,), level)] * len(rows)))

        return SimpleNamespace(score=score)

    clients = {
        "teacher": client("teacher", -1),
        "teachers.math": client("math", -2),
        "teachers.code": client("code", -3),
    }
    teachers = Teachers(replace(load_config(str(LAPTOP)).config, **BY_SOURCE), clients)
    columns, figures = teachers.columns(TEACHER_LOG_PROB, batch, rows)
    taught = batch.union(columns)
    assert taught.values("teacher_log_probs").tolist() == [-2, -2, -3, -3, -1, -1, -2, -2, -1, -1]
    assert asked == {"teacher": [5, 1], "math": [9, 3], "code": [7]}
    assert figures == {"teacher/share": 0.4, "teachers.math/share": 0.4, "teachers.code/share": 0.2}
    asked.clear()
    teachers.columns(TEACHER_LOG_PROB, batch.take([1]), rows.take([1]))
    assert asked == {"code": [7]}, "the others have no row of this batch"


def test_a_data_source_without_a_teacher_or_with_two_is_refused() -> None:
    config = replace(load_config(str(LAPTOP)).config, **BY_SOURCE)
    assert teacher_of(config, "web") == "teacher"
    with pytest.raises(DataError, match='no teacher reads the samples of "web"'):
        teacher_of(replace(config, teacher=None), "web")
    all_sources = TeacherConfig(path="all", max_tokens_per_device=64, sources=["*"])
    with pytest.raises(DataError, match=r'"code" is in the sources of teachers\.code and of teachers\.all'):
        teacher_of(replace(config, teachers={**config.teachers, "all": all_sources}), "code")


def test_a_further_teacher_is_a_language_model_with_the_policys_vocabulary(tmp_path: Path) -> None:
    config, _ = taught(tmp_path, 7, form="top_k")
    assert config.teacher is not None
    config = replace(config, teachers={"math": replace(config.teacher, sources=["math"])})
    one, further = model_setup("teacher", config), model_setup("teachers.math", config)
    assert replace(further, settings=one.settings) == one
    assert role_worker("teachers.math", config).args[1:] == role_worker("teacher", config).args[1:]
    warnings = list(check_teachers(config, load_tokenizer(config.model.path)))
    assert warnings == [("teachers.math", "no data source is one of its sources: toy:addition")]


def test_a_policy_that_teaches_itself_scores_its_samples_after_the_teachers_prompts() -> None:
    own = ["algorithm.distillation={form: advantage, context: 'Answer {prompt}'}", "placement.roles.teacher=null"]
    config = load_config(str(LAPTOP), ["teacher=null", *own]).config
    columns = {"prompts": from_rows([[1], [2]]), "data_source": np.array(["sums", "code"], object)}
    rows = DataProto.from_dict(columns, row_ids=np.array([9, 7]))
    asked = []

    def score(method: str, batch: DataProto) -> DataProto:
        asked.append((method, [row.tolist() for row in batch["prompts"].rows()]))
        return batch.with_column("teacher_log_probs", from_rows([[-1.0], [-2.0]]))

    context: Any = SimpleNamespace(
        prompts=lambda of: [[10, int(source == "code")] for source in of["data_source"]], shows_success=False
    )
    actor: Any = SimpleNamespace(score=score)
    teachers = Teachers(config, {"actor": actor}, context)
    found, figures = teachers.columns(TEACHER_LOG_PROB, rows.select("prompts"), rows)
    assert list(found.columns()) == ["teacher_log_probs"]
    assert asked == [("compute_teacher_log_prob", [[10, 0], [10, 1]])]
    assert figures == {}


def test_samples_without_a_success_are_counted_and_sent_without_a_response() -> None:
    own = "{form: advantage, context: '{prompt} {success}', context_tokens: 900, success_at: 1}"
    config = load_config(
        "configs/laptop-grpo.yaml", [f"algorithm.distillation={own}", "actor.max_tokens_per_device=2048"]
    ).config
    columns = {"prompts": from_rows([[1, 2], [3, 4], [5, 6]]), "responses": from_rows([[7], [8, 9], [10]])}
    rows = DataProto.from_dict(columns | {"data_source": np.array(["sums"] * 3, object)}, row_ids=np.array([9, 7, 5]))
    asked = {}

    def score(method: str, batch: DataProto) -> DataProto:
        for name in ("prompts", "responses"):
            asked[name] = [row.tolist() for row in batch[name].rows()]
        return batch.with_column("teacher_log_probs", from_rows([[], [-1.0, -2.0], []]))

    prompts = [Untaught.NO_SUCCESS, [30, 40, 50], Untaught.TOO_LONG]
    context: Any = SimpleNamespace(prompts=lambda of: prompts, shows_success=True)
    actor: Any = SimpleNamespace(score=score)
    found, figures = Teachers(config, {"actor": actor}, context).columns(TEACHER_LOG_PROB, rows, rows)
    assert asked == {"prompts": [[1], [30, 40, 50], [5]], "responses": [[], [8, 9], []]}
    assert found.lengths("teacher_log_probs").tolist() == [0, 2, 0]
    assert figures == pytest.approx(
        {
            "teacher/untaught_share": 2 / 3,
            "teacher/untaught/no_success": 1,
            "teacher/untaught/control_token": 0,
            "teacher/untaught/too_long": 1,
        }
    )
