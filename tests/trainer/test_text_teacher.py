"""A teacher with another tokenizer: its column in the policy's tokens, the rows that it does not teach, refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mrl.algos.kl import BEGINS, CONTINUES, UNTAUGHT, span_sums
from mrl.config.agent import AgentConfig, EnvironmentConfig
from mrl.config.algorithm import AlgorithmConfig, DistillationConfig
from mrl.config.resolved.load import load_config
from mrl.config.schema import Config, ModelConfig, TeacherConfig
from mrl.config.step_calls import TEACHER_LOG_PROB
from mrl.data.chat import load_tokenizer
from mrl.data.rlhf_dataset import open_dataset
from mrl.data.teacher_text import AlignedResponse, ResponseAligner, response_aligners
from mrl.errors import ModelError
from mrl.preflight.data import check_data
from mrl.preflight.teachers import check_teachers_prompts
from mrl.protocol import DataProto
from mrl.protocol.columns import from_rows
from mrl.trainer.checks import check_teachers
from mrl.trainer.teachers import Teachers, teachers_of
from mrl.trainer.text_teacher import TextTeacher
from mrl.trainer.validation import validated_kl
from tests.data.two_tokenizers import END, TURN, byte_level

LAPTOP = str(Path(__file__).parents[2] / "configs" / "laptop-distill.yaml")
ASKED = ({"role": "user", "content": "the theory?"},)
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two tokenizers, each with a tiny model."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    directory, models = tmp_path_factory.mktemp("models"), {}
    for name, size, words in (("policy", 420, True), ("teacher", 600, False)):
        path = models[name] = byte_level(directory / name, size, words=words)
        config = Qwen3Config(
            vocab_size=len(load_tokenizer(str(path))),
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            max_position_embeddings=96,
            initializer_range=0.3,
        )
        torch.manual_seed(size)
        Qwen3ForCausalLM(config).save_pretrained(path)
    return models


def config_of(models: dict[str, Path], form: Any = "advantage", **distillation: Any) -> Config:
    config = load_config(LAPTOP).config
    return replace(
        config,
        model=ModelConfig(path=str(models["policy"])),
        teacher=TeacherConfig(path=str(models["teacher"]), max_tokens_per_device=64),
        algorithm=AlgorithmConfig(advantage="grpo", distillation=DistillationConfig(form=form, **distillation)),
    )


def log_probs_of(path: Path) -> Callable[[list[int], list[int]], torch.Tensor]:
    """Function of prompt and response: transformers' log-prob of each token of the response."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)

    @torch.no_grad()
    def log_probs(prompt: list[int], response: list[int]) -> torch.Tensor:
        logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
        return logits.log_softmax(-1)[range(len(response)), response]

    return log_probs


def client_of(path: Path, asked: list[DataProto] | None = None, longest: int = 64) -> Any:
    """Client of a teacher that computes with transformers."""
    log_probs = log_probs_of(path)

    def score(method: str, batch: DataProto) -> DataProto:
        if asked is not None:
            asked.append(batch)
        assert set(batch.columns()) == {"prompts", "responses"}
        assert method == "compute_own_log_prob"
        pairs = zip(batch["prompts"].rows(), batch["responses"].rows(), strict=True)
        values = [log_probs(prompt.tolist(), response.tolist()).float() for prompt, response in pairs]
        return batch.with_column("teacher_log_probs", from_rows(values))

    return SimpleNamespace(score=score, longest_row=longest)


def rows_of(responses: list[list[int]]) -> DataProto:
    names = {
        "uid": np.array([f"sums/{row // 2}" for row in range(len(responses))], object),
        "data_source": np.array(["sums"] * len(responses), object),
        "messages": np.array([None] * len(responses), object),
    }
    names["messages"][:] = [ASKED] * len(responses)
    columns = {"prompts": from_rows([[1, 2]] * len(responses)), "responses": from_rows(responses)}
    return DataProto.from_dict(columns | names, row_ids=10 + np.arange(len(responses)))


def text_teacher(models: dict[str, Path], **client: Any) -> TextTeacher:
    config, policy = config_of(models), load_tokenizer(str(models["policy"]))
    aligner = ResponseAligner(config, policy, str(models["teacher"]), "")
    return TextTeacher("teacher", str(models["teacher"]), client_of(models["teacher"], **client), aligner)


def test_sums_over_spans_are_those_of_transformers(models: dict[str, Path]) -> None:
    """Expected: the teacher's log-prob of each piece of text, from its whole response in its own tokens."""
    policy, teacher = (load_tokenizer(str(models[name])) for name in ("policy", "teacher"))
    texts, end = ["the theory of 123+", "café (日本語) 🙂"], policy.get_vocab()[END]
    ids = [[*row, end] for row in policy(texts, add_special_tokens=False)["input_ids"]]
    columns, _, sizes = text_teacher(models).columns(rows_of(ids))
    assert columns.row_ids.tolist() == [10, 11]
    assert columns.values("teacher_log_probs").dtype == torch.float32
    expected, log_probs = [], log_probs_of(models["teacher"])
    (prompt,) = teacher([f"{TURN}user:the theory?{END}{TURN}assistant:"], add_special_tokens=False)["input_ids"]
    for text, of_policy in zip(texts, ids, strict=True):
        (own,) = teacher([text + END], add_special_tokens=False)["input_ids"]
        values = log_probs(prompt, own)
        ends = [
            [len(t.decode(row[: at + 1])) for at in range(len(row))] for t, row in ((policy, of_policy), (teacher, own))
        ]
        expected += [
            (span_end, float(values[: ends[1].index(span_end) + 1].sum()))
            for span_end in sorted({*ends[0]} & {*ends[1]})
            if "\ufffd" not in policy.decode(of_policy[: ends[0].index(span_end) + 1])
        ]
    cumulative, spans = [], [row.tolist() for row in columns["teacher_spans"].rows()]
    for of_policy, row, of_row in zip(ids, columns["teacher_log_probs"].rows(), spans, strict=True):
        assert of_row[0] == BEGINS
        lasts = [at for at in range(len(row)) if at + 1 == len(row) or of_row[at + 1] == BEGINS]
        cumulative += [(len(policy.decode(of_policy[: at + 1])), float(row[: at + 1].sum())) for at in lasts]
    assert any(CONTINUES in row for row in spans)
    assert [end for end, _ in cumulative] == [end for end, _ in expected]
    assert [sum_ for _, sum_ in cumulative] == pytest.approx([sum_ for _, sum_ in expected], abs=1e-4)
    assert sizes["teacher/tokens_per_token"] < 1, "its vocabulary is larger"


def test_with_the_policys_tokenizer_the_column_is_that_of_token_ids(models: dict[str, Path]) -> None:
    same = {"policy": models["teacher"], "teacher": models["teacher"]}
    tokenizer, log_probs = load_tokenizer(str(models["teacher"])), log_probs_of(models["teacher"])
    texts = ["the theory of 123+", "café 🙂", "="]
    ids = [[*row, tokenizer.get_vocab()[END]] for row in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    columns, _, sizes = text_teacher(same).columns(rows_of(ids))
    (prompt,) = tokenizer([f"{TURN}user:the theory?{END}{TURN}assistant:"], add_special_tokens=False)["input_ids"]
    expected = torch.cat([log_probs(prompt, row) for row in ids])
    assert torch.allclose(columns.values("teacher_log_probs").double(), expected, rtol=0, atol=1e-6)
    assert columns.values("teacher_spans").tolist() == [BEGINS] * len(expected)
    assert sizes == {"teacher/tokens_per_token": 1.0, "teacher/spans_per_token": 1.0}


def test_rows_without_a_teacher_are_counted_and_not_sent(models: dict[str, Path]) -> None:
    policy = load_tokenizer(str(models["policy"]))
    vocab, asked = policy.get_vocab(), list[DataProto]()
    (said, long) = policy(["the 12", "()+=" * 20], add_special_tokens=False)["input_ids"]
    responses = [[vocab["ÿ"]], said, [*said, vocab[TURN], *said], long]
    teachers = Teachers(config_of(models), {"teacher": None}, None, {"teacher": text_teacher(models, asked=asked)})  # type: ignore[dict-item]
    rows = rows_of(responses)
    columns, figures = teachers.columns(TEACHER_LOG_PROB, rows, rows)
    assert [batch.row_ids.tolist() for batch in asked] == [[11]]
    assert {name: value for name, value in figures.items() if "untaught" in name} == {
        "teacher/untaught_share": 3 / 4,
        "teacher/untaught/control_token": 1,
        "teacher/untaught/too_long": 1,
        "teacher/untaught/not_text": 1,
        "teacher/untaught/other_text": 0,
    }
    for number, (values, spans) in enumerate(
        zip(columns["teacher_log_probs"].rows(), columns["teacher_spans"].rows(), strict=True)
    ):
        assert len(values) == len(spans) == len(responses[number])
        assert (spans != UNTAUGHT).all() if number == 1 else (spans == UNTAUGHT).all()
        of_read = [column.rows()[1] for column in (columns["teacher_log_probs"], columns["teacher_spans"])]
        mean = float(span_sums(*of_read).mean())
        assert CONTINUES in of_read[1].tolist()
        assert (values < 0).all() if number == 1 else values.tolist() == pytest.approx([mean] * len(values))
    none, figures = teachers.columns(TEACHER_LOG_PROB, rows.take([0]), rows.take([0]))
    assert none["teacher_spans"].rows()[0].tolist() == [UNTAUGHT]
    assert none["teacher_log_probs"].rows()[0].tolist() == [0]
    assert figures["teacher/untaught_share"] == 1
    assert len(asked) == 1, "no row is left to send"


def test_a_teacher_has_no_more_positions_than_its_model(models: dict[str, Path]) -> None:
    """Positions: 96. The prompt has 19 tokens, and the response one per character."""
    policy = load_tokenizer(str(models["policy"])).get_vocab()
    teacher = text_teacher(models, longest=200)
    prompt = len(teacher._aligner.encoder.prompt(ASKED))
    for length, is_read in ((96 - prompt, True), (97 - prompt, False)):
        _, read, _ = teacher.columns(rows_of([[policy["Q"]] * length]))
        assert isinstance(read[0], AlignedResponse) is is_read


def test_only_some_teachers_have_another_tokenizer(models: dict[str, Path]) -> None:
    near = TeacherConfig(path=str(models["policy"]), max_tokens_per_device=64, sources=["code"])
    config = replace(config_of(models), teachers={"near": near})
    policy = load_tokenizer(str(models["policy"]))
    (said,) = policy(["the theory of 12"], add_special_tokens=False)["input_ids"]
    rows = rows_of([said, said[:2], said])
    rows["data_source"][1] = "code"

    def score(method: str, batch: DataProto) -> DataProto:
        assert method == "compute_teacher_log_prob"
        assert batch.row_ids.tolist() == [11]
        return batch.with_column("teacher_log_probs", from_rows([torch.tensor([-1.0, -2.0])]))

    clients: Any = {"teacher": client_of(models["teacher"]), "teachers.near": SimpleNamespace(score=score)}
    teachers = teachers_of(config, clients, policy)
    assert teachers is not None
    batch = rows.select("prompts", "responses")
    columns, figures = teachers.columns(TEACHER_LOG_PROB, batch, rows)
    columns = batch.union(columns)
    by_row = dict(zip(rows.row_ids.tolist(), columns["teacher_log_probs"].rows(), strict=True))
    assert by_row[11].tolist() == [-1, -2]
    assert torch.equal(by_row[10], by_row[12])
    spans = dict(zip(rows.row_ids.tolist(), columns["teacher_spans"].rows(), strict=True))
    assert spans[11].tolist() == [BEGINS, BEGINS], "each token is a span"
    assert CONTINUES in spans[10].tolist()
    assert figures["teacher/untaught_share"] == 0
    assert figures["teacher/share"] == pytest.approx(2 / 3)


def test_validation_leaves_out_samples_without_a_teacher_and_shows_their_share(models: dict[str, Path]) -> None:
    policy = load_tokenizer(str(models["policy"]))
    (said,) = policy(["the theory of 12"], add_special_tokens=False)["input_ids"]
    rows, lost = rows_of([said, [policy.get_vocab()["ÿ"]] * 3]), [[policy.get_vocab()["ÿ"]]]

    def score(method: str, batch: DataProto) -> DataProto:
        zeros = [torch.zeros(length) for length in batch.lengths("responses").tolist()]
        return batch.with_column("old_log_probs", from_rows(zeros))

    teacher, actor = text_teacher(models), SimpleNamespace(score=score)
    teachers = Teachers(config_of(models), {"teacher": None}, None, {"teacher": teacher})  # type: ignore[dict-item]
    values, figures = validated_kl(actor, teachers, [rows], 1.0)  # type: ignore[arg-type]
    total = -float(teacher.columns(rows)[0]["teacher_log_probs"].rows()[0].sum())
    assert values == pytest.approx({"sums sums/0": total / len(said)}, rel=1e-6)
    assert figures == {"val/untaught_share": 0.5}
    assert validated_kl(actor, teachers, [rows_of(lost)], 1.0) == ({}, {"val/untaught_share": 1.0})  # type: ignore[arg-type]


def test_a_teacher_with_other_tokens_reads_texts_which_the_run_reports(models: dict[str, Path]) -> None:
    config, policy = config_of(models), load_tokenizer(str(models["policy"]))
    ((role, message),) = check_teachers(config, policy)
    assert role == "teacher"
    assert f"{models['teacher']} reads texts, tokenized again with its own tokenizer and template: " in message
    same = replace(config, teacher=replace(config.teacher, path=str(models["policy"])))  # type: ignore[type-var]
    assert list(response_aligners(config, policy)) == ["teacher"]
    assert response_aligners(same, policy) == {}
    assert list(check_teachers(same, policy)) == []


@pytest.mark.parametrize(
    ("distillation", "problem", "fix"),
    [
        ({"form": "full"}, "form=full compares distributions over one vocabulary", "form=advantage, or a teacher"),
        ({"form": "top_k"}, "form=top_k compares distributions over one vocabulary", "form=advantage, or a teacher"),
        ({"form": "sampled"}, "an estimate at each token needs the teacher's log-prob of the token", "form=advantage"),
        ({"form": "advantage", "context": "Answer {prompt}"}, "context is written in the policy's tokens", "=null"),
    ],
)
def test_what_needs_the_policys_tokens_is_refused(
    distillation: dict[str, Any], problem: str, fix: str, models: dict[str, Path]
) -> None:
    config, policy = config_of(models, **distillation), load_tokenizer(str(models["policy"]))
    with pytest.raises(ModelError, match=r"tokens have other ids or none: ") as caught:
        list(check_teachers(config, policy))
    assert problem in caught.value.what
    assert fix in str(caught.value.fix)
    assert caught.value.where == str(models["teacher"])


def test_check_reports_a_refused_teacher_once(models: dict[str, Path]) -> None:
    results = list(check_data(config_of(models, form="full"), all_rows=False))
    assert [result.about for result in results if "ids or none" in result.what] == ["teacher"]


def test_conversations_with_environments_are_refused(models: dict[str, Path]) -> None:
    agent = AgentConfig(environments={"shop": EnvironmentConfig(name="a:b")})
    config = replace(config_of(models), agent=agent)
    with pytest.raises(ModelError, match="conversations with environments are token ids") as caught:
        list(check_teachers(config, load_tokenizer(str(models["policy"]))))
    assert caught.value.fix == "choose a teacher with the policy's tokenizer"


@pytest.mark.parametrize(("room", "verdict"), [(1024, "ok"), (256, "warn")])
def test_check_shows_the_teachers_tokens_of_real_rows(room: int, verdict: str, models: dict[str, Path]) -> None:
    config, policy = config_of(models), load_tokenizer(str(models["policy"]))
    config = replace(config, teacher=replace(config.teacher, max_tokens_per_device=room))  # type: ignore[type-var]
    dataset = open_dataset(config.data.train, config.data, config.rollout, policy)
    prompts: Any = dataset.read(dataset.draws(0, 4))
    (result,) = check_teachers_prompts(config, policy, {"data.train.sums": prompts})
    assert result.verdict == verdict
    texts = [prompt.row.messages[-1]["content"] for prompt in prompts]
    sizes = [
        sum(map(len, load_tokenizer(str(models[name]))(texts, add_special_tokens=False)["input_ids"]))
        for name in ("teacher", "policy")
    ]
    assert f"the teacher reads {sizes[0] / sizes[1]:.2f} tokens and " in result.what
