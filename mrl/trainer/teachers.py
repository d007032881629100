"""The teachers of a run: each reads the samples of its data sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mrl.config.role_kinds import kind_of, rows_by_teacher
from mrl.config.schema import Config
from mrl.config.step_calls import StepCall
from mrl.protocol import DataProto
from mrl.trainer.role_client import TeacherClient


class Teachers:
    """Calls the teacher of each row."""

    def __init__(self, config: Config, clients: Mapping[str, TeacherClient]) -> None:
        self._config, self._clients = config, clients

    def columns(self, call: StepCall, batch: DataProto, sources: Sequence[str]) -> DataProto:
        """Return the columns that a call writes, for rows of these data sources."""
        parts = [
            self._clients[role].score(call.method, batch.take(rows)).select(*call.writes)
            for role, rows in rows_by_teacher(self._config, sources).items()
        ]
        return DataProto.concat(parts)

    def shares(self, sources: Sequence[str]) -> dict[str, float]:
        """Return the share of the samples that each of several teachers read."""
        if len(self._clients) == 1:
            return {}
        rows = rows_by_teacher(self._config, sources)
        return {f"{role}/share": len(rows.get(role, ())) / len(sources) for role in self._clients}


def teachers_of(config: Config, roles: Mapping[str, Any]) -> Teachers | None:
    """Return the teachers among the clients of all roles, if the run has any."""
    clients = {role: client for role, client in roles.items() if kind_of(role) == "teacher"}
    return Teachers(config, clients) if clients else None
