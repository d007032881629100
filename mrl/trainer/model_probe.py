"""Comparison of a role's loaded model with transformers. It covers the models that are not compared with an engine.

Transformers computes a fixed text in the driver, layer by layer, while the workers start. Then the workers compute it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from mrl.controller.transport import fetch
from mrl.data.chat import ChatTokenizer
from mrl.errors import AuditFailed
from mrl.events import EventLog, ModelCompared
from mrl.models.families import read_spec
from mrl.models.open_model import OpenSpec
from mrl.protocol import DataProto
from mrl.protocol.columns import from_rows
from mrl.trainer.engine_probe import TEXT
from mrl.trainer.role_client import RoleClient
from mrl.verify.transformers_model import ModelAnswer, answer
from mrl.workers.messages import PROBED, ModelSetup

MAX_TOKENS = 48
_ROUNDING: Mapping[str, float] = {"bfloat16": 2.0**-8, "float32": 2.0**-16, "tf32": 2.0**-11}
"""Largest relative error of one operation. On a CPU float32 is exact to 2^-24, and sums lose some of it."""


class ModelProbe:
    """Compares each role with transformers, once."""

    def __init__(
        self, setups: Mapping[str, ModelSetup], tokenizer: ChatTokenizer, events: EventLog, timeout_s: float
    ) -> None:
        (ids,) = tokenizer([TEXT], add_special_tokens=False)["input_ids"]
        # A model without a table is compared with transformers where it is loaded, by `fsdp/probe.py`.
        self._setups = {role: own for role, own in setups.items() if not isinstance(read_spec(own.path), OpenSpec)}
        self._ids, self._events = torch.tensor(ids[:MAX_TOKENS]), events
        self._timeout_s = timeout_s
        self._is_over = threading.Event()
        self._answers: dict[str, Future[ModelAnswer]] = {}

    @contextmanager
    def asked(self) -> Iterator[ModelProbe]:
        """Compute the models with transformers, one after another, in a thread that ends with the block."""
        with ThreadPoolExecutor(1, "transformers") as thread:
            try:
                self._answers = {role: thread.submit(self._ask, role) for role in self._setups}
                yield self
            finally:
                self._is_over.set()
                thread.shutdown(cancel_futures=True)

    def _ask(self, role: str) -> ModelAnswer:
        setup = self._setups[role]
        return answer(setup.path, setup.head, self._ids_of(role), self._check_over)

    def _check_over(self) -> None:
        if self._is_over.is_set():
            raise CancelledError

    def _ids_of(self, role: str) -> Tensor:
        """Return the text as token ids within the model's vocabulary. Their meaning does not matter."""
        return self._ids % read_spec(self._setups[role].path).vocab

    def compare(self, role: str, client: RoleClient) -> None:
        """Raise an error if the role's workers compute different results from transformers with the same files."""
        if role not in self._answers:
            return
        began, setup = time.monotonic(), self._setups[role]
        row, spec = self._ids_of(role)[: client.longest_row], read_spec(setup.path)
        expected = self._answers[role].result().first(len(row) - 1)
        measured = self._answer(client, row)
        dtype: str = setup.settings.dtype
        if dtype == "float32" and client.device != "cpu":
            dtype = "tf32"
        limit = expected.limit(setup.head, _ROUNDING[dtype], spec.num_layers)
        # Rounding may send a token at a tie to another expert.
        difference = expected.difference(measured, setup.head, len(row) // 10 if spec.moe else 0)
        self._events.write(ModelCompared(role, len(row), difference, limit, time.monotonic() - began))
        if not difference <= limit:
            outputs = "log-probs" if setup.head == "lm" else "hidden states or scores"
            raise AuditFailed(
                f"{role} and transformers disagree on {setup.path}: on a fixed text of {len(row)} tokens its {outputs} "
                f"differ by {difference:.3g} (root mean square), and rounding in "
                f"{setup.settings.dtype} explains at most {limit:.3g}",
                fix="run mrl verify layout CONFIG, which compares the layout on a small model; if it passes, check the "
                "model's config.json; model.verify=false skips this comparison",
            )

    def _answer(self, client: RoleClient, row: Tensor) -> ModelAnswer:
        columns = {"prompts": from_rows([row[:1].int()]), "responses": from_rows([row[1:].int()])}
        columns_written = fetch(client.score("probe", DataProto.from_dict(columns)), self._timeout_s)
        hidden_TH, scores_T = (columns_written.values(name).float().cpu() for name in PROBED)
        return ModelAnswer(hidden_TH, scores_T)
