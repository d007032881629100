"""The teachers of a run: each reads the samples of its data sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mrl.config.arithmetic import teaches_itself
from mrl.config.role_kinds import kind_of, rows_by_teacher
from mrl.config.schema import Config
from mrl.config.step_calls import StepCall
from mrl.data.chat import ChatTokenizer
from mrl.data.teacher_context import OF_SUCCESS, OF_TEXT, TeacherContext, Untaught, teacher_context
from mrl.data.teacher_text import response_aligners
from mrl.protocol import DataProto
from mrl.protocol.columns import from_rows
from mrl.trainer.role_client import Metrics, RoleClient
from mrl.trainer.text_teacher import TextTeacher, all_taught


class Teachers:
    """Calls the teacher of each row, with the prompts that teachers read."""

    def __init__(
        self,
        config: Config,
        clients: Mapping[str, RoleClient],
        context: TeacherContext | None = None,
        by_text: Mapping[str, TextTeacher] | None = None,
    ) -> None:
        """Take the teachers by role. `by_text` has those with another tokenizer than the policy's."""
        self._config, self._clients, self._context, self._by_text = config, clients, context, by_text or {}

    def columns(self, call: StepCall, batch: DataProto, rows: DataProto) -> tuple[DataProto, Metrics]:
        """Return the columns that a call writes, and metrics. `rows` are those of the batch, with their texts.

        Rows without a teacher have no values in these columns. If a teacher has another tokenizer, the column
        `teacher_spans` marks them.
        """
        numbers, figures = self._rows(rows), Metrics()
        if self._context is not None:
            prompts = self._context.prompts(rows)
            batch = _as_read(batch, rows, prompts)
            if self._context.shows_success:
                figures = _untaught(prompts, OF_SUCCESS)
        if len(self._clients) > 1:
            figures |= {f"{role}/share": len(numbers.get(role, ())) / len(rows) for role in self._clients}
        parts = {
            role: self._clients[role].score(call.method, batch.take(of_role)).select(*call.writes)
            for role, of_role in numbers.items()
            if role not in self._by_text
        }
        if self._by_text:
            parts, of_texts = self._with_texts(parts, numbers, rows)
            figures |= of_texts
        return DataProto.concat([parts[role] for role in numbers]), figures

    def _with_texts(
        self, parts: Mapping[str, DataProto], numbers: Mapping[str, list[int]], rows: DataProto
    ) -> tuple[dict[str, DataProto], Metrics]:
        """Return the columns of all teachers with their spans, and metrics."""
        whole = {role: all_taught(part) for role, part in parts.items()}
        read: list[Any] = [part for part in whole.values() for _ in range(len(part))]
        figures = Metrics()
        for role, of_role in numbers.items():
            if role in self._by_text:
                whole[role], of_rows, sizes = self._by_text[role].columns(rows.take(of_role))
                read, figures = [*read, *of_rows], figures | sizes
        return whole, figures | _untaught(read, OF_TEXT)

    def _rows(self, rows: DataProto) -> dict[str, list[int]]:
        if teaches_itself(self._config):
            return {"actor": list(range(len(rows)))}
        return rows_by_teacher(self._config, list(rows["data_source"]))


def _as_read(batch: DataProto, rows: DataProto, prompts: Sequence[list[int] | Untaught]) -> DataProto:
    """Return the batch with the teacher's prompts. Rows without one are a single token, with no response to score."""
    if not any(isinstance(prompt, Untaught) for prompt in prompts):
        return batch.with_column("prompts", from_rows([torch.tensor(ids, dtype=torch.int32) for ids in prompts]))
    read, answers = [], []
    for prompt, own, response in zip(prompts, rows["prompts"].rows(), rows["responses"].rows(), strict=True):
        is_taught = not isinstance(prompt, Untaught)
        read.append(torch.tensor(prompt, dtype=torch.int32) if is_taught else own[:1])
        answers.append(response if is_taught else response[:0])
    return batch.with_column("prompts", from_rows(read)).with_column("responses", from_rows(answers))


def _untaught(read: Sequence[Any], reasons: Sequence[Untaught]) -> Metrics:
    """Return the share of the samples without a teacher, and their numbers by reason, among what teachers read."""
    numbers = {reason: float(sum(sample is reason for sample in read)) for reason in reasons}
    by_reason = {f"teacher/untaught/{reason.value}": number for reason, number in numbers.items()}
    return {"teacher/untaught_share": sum(numbers.values()) / len(read), **by_reason}


def teachers_of(config: Config, roles: Mapping[str, Any], tokenizer: ChatTokenizer) -> Teachers | None:
    """Return the teachers among the clients of all roles, if the run has any."""
    clients = {role: client for role, client in roles.items() if kind_of(role) == "teacher"}
    if teaches_itself(config):
        clients = {"actor": roles["actor"]}
    if not clients:
        return None
    aligners = response_aligners(config, tokenizer)
    by_text = {role: TextTeacher(role, config.model_of(role)[1], clients[role], own) for role, own in aligners.items()}
    return Teachers(config, clients, teacher_context(config, tokenizer), by_text)
