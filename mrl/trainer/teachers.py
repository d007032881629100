"""The teachers of a run: each reads the samples of its data sources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mrl.config.arithmetic import teaches_itself
from mrl.config.role_kinds import kind_of, rows_by_teacher
from mrl.config.schema import Config
from mrl.config.step_calls import StepCall
from mrl.data.chat import ChatTokenizer
from mrl.data.teacher_context import TeacherContext, teacher_context
from mrl.protocol import DataProto
from mrl.trainer.role_client import RoleClient


class Teachers:
    """Calls the teacher of each row, with the prompts that teachers read."""

    def __init__(
        self, config: Config, clients: Mapping[str, RoleClient], context: TeacherContext | None = None
    ) -> None:
        self._config, self._clients, self._context = config, clients, context

    def columns(self, call: StepCall, batch: DataProto, rows: DataProto) -> DataProto:
        """Return the columns that a call writes. `rows` are those of the batch, with their texts."""
        if self._context is not None:
            batch = batch.with_column("prompts", self._context.prompts(rows))
        parts = [
            self._clients[role].score(call.method, batch.take(of_role)).select(*call.writes)
            for role, of_role in self._rows(rows).items()
        ]
        return DataProto.concat(parts)

    def shares(self, rows: DataProto) -> dict[str, float]:
        """Return the share of the samples that each of several teachers read."""
        if len(self._clients) == 1:
            return {}
        numbers = self._rows(rows)
        return {f"{role}/share": len(numbers.get(role, ())) / len(rows) for role in self._clients}

    def _rows(self, rows: DataProto) -> dict[str, list[int]]:
        if teaches_itself(self._config):
            return {"actor": list(range(len(rows)))}
        return rows_by_teacher(self._config, list(rows["data_source"]))


def teachers_of(config: Config, roles: Mapping[str, Any], tokenizer: ChatTokenizer) -> Teachers | None:
    """Return the teachers among the clients of all roles, if the run has any."""
    clients = {role: client for role, client in roles.items() if kind_of(role) == "teacher"}
    if teaches_itself(config):
        clients = {"actor": roles["actor"]}
    return Teachers(config, clients, teacher_context(config, tokenizer)) if clients else None
