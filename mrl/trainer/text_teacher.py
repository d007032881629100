"""A teacher with another tokenizer: it reads texts, and its log-probs return as a column of the policy's tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from mrl.algos.kl import BEGINS, CONTINUES, UNTAUGHT, span_sums
from mrl.config.rules.model_shape import ModelShape, read_model_shape
from mrl.config.step_calls import TEACHER_SPANS
from mrl.controller.transport import fetch
from mrl.data.teacher_context import Untaught
from mrl.data.teacher_text import AlignedResponse, Read, ResponseAligner, aligned, aligned_sizes
from mrl.protocol import DataProto
from mrl.protocol.columns import from_rows, jagged
from mrl.trainer.role_client import Metrics, RoleClient

FETCH_S = 600.0


class TextTeacher:
    """Calls a teacher with its own template and tokens."""

    def __init__(self, role: str, path: str, client: RoleClient, aligner: ResponseAligner) -> None:
        self._role, self._client, self._aligner = role, client, aligner
        shape = read_model_shape(role, path)
        positions = shape.positions if isinstance(shape, ModelShape) else None
        self._longest = min(client.longest_row, positions or client.longest_row)

    def columns(self, rows: DataProto) -> tuple[DataProto, Read, Metrics]:
        """Return the teacher's columns, what it has read of each row, and metrics of the tokens."""
        prompts = {uid: self._aligner.encoder.prompt(messages) for uid, messages in self._prompts_of(rows).items()}
        responses = [self._aligner.align(response.tolist()) for response in rows["responses"].rows()]
        read = [self._fitting(prompts[uid], said) for uid, said in zip(rows["uid"], responses, strict=True)]
        log_probs = self._log_probs(rows, prompts, read)
        lengths = rows.lengths("responses").tolist()
        pairs = [policy_values(*row) for row in zip(read, log_probs, lengths, strict=True)]
        values_T, spans_T = (torch.from_numpy(np.concatenate(of_rows)) for of_rows in zip(*pairs, strict=True))
        if (spans_T != UNTAUGHT).any():  # `distilled_advantages` says why
            lost = np.repeat([isinstance(said, Untaught) for said in read], lengths)
            values_T[torch.from_numpy(lost)] = span_sums(values_T, spans_T)[spans_T != UNTAUGHT].mean()
        values = {"teacher_log_probs": jagged(values_T, lengths), TEACHER_SPANS: jagged(spans_T, lengths)}
        columns = DataProto.from_dict(values, row_ids=rows.row_ids)
        return columns, read, {f"{self._role}/{name}": value for name, value in aligned_sizes(read).items()}

    @staticmethod
    def _prompts_of(rows: DataProto) -> dict[str, Sequence[dict[str, str]]]:
        return dict(zip(rows["uid"], rows["messages"], strict=True))

    def _fitting(self, prompt: list[int], said: AlignedResponse | Untaught) -> AlignedResponse | Untaught:
        is_long = isinstance(said, AlignedResponse) and len(prompt) + len(said.ids) > self._longest
        return Untaught.TOO_LONG if is_long else said

    def _log_probs(self, rows: DataProto, prompts: dict[str, list[int]], read: Read) -> list[npt.NDArray[np.float64]]:
        """Return the log-probs of the teacher's tokens of each row, none for a row that it does not read."""
        taught = [row for row, said in enumerate(read) if isinstance(said, AlignedResponse)]
        found: list[npt.NDArray[np.float64]] = [np.zeros(0)] * len(read)
        if not taught:
            return found
        batch = DataProto.from_dict(
            {
                "prompts": from_rows([torch.tensor(prompts[rows["uid"][row]], dtype=torch.int32) for row in taught]),
                "responses": from_rows([torch.tensor(said.ids, dtype=torch.int32) for said in aligned(read)]),
            },
            row_ids=rows.row_ids[taught],
        )
        scored = self._client.score("compute_own_log_prob", batch).select("teacher_log_probs")
        for row, values in zip(taught, fetch(scored, FETCH_S)["teacher_log_probs"].rows(), strict=True):
            found[row] = values.double().numpy()
        return found


def policy_values(
    said: AlignedResponse | Untaught, log_probs: npt.NDArray[np.float64], length: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    """Return the teacher's log-prob of each of the policy's tokens, and the values of `teacher_spans`.

    The tokens of a span share the teacher's sum equally, so that sums over a span, and means over all tokens, are the
    teacher's.
    """
    values, spans = np.zeros(length, np.float32), np.full(length, UNTAUGHT, np.int32)
    if isinstance(said, AlignedResponse) and said.policy_spans:
        of_token = np.array(said.policy_spans)
        shares = np.bincount(said.spans, weights=log_probs) / np.bincount(of_token)
        values[: len(of_token)] = shares[of_token]
        spans[: len(of_token)] = np.where(np.diff(of_token, prepend=-1) > 0, BEGINS, CONTINUES)
    return values, spans


def all_taught(columns: DataProto) -> DataProto:
    """Return the columns of a teacher with the policy's tokenizer, with each token as a span."""
    columns = fetch(columns, FETCH_S)
    lengths = columns.lengths("teacher_log_probs")
    return columns.with_column(TEACHER_SPANS, jagged(torch.full((int(lengths.sum()),), BEGINS).int(), lengths))
