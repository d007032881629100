"""Record a run: requests to the engines and their results, columns, updates and weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mrl.config.step_calls import STEP
from mrl.controller.transport import fetch
from mrl.engine.checkpoint_files import export_checkpoint
from mrl.hub import local_files
from mrl.models.table import Head
from mrl.protocol import DataProto, RemoteColumn
from mrl.protocol.columns import Jagged
from mrl.rollout.requests import Generated, GenerationRequest, Sampling
from mrl.trainer.generation import ScoredBatch
from mrl.trainer.ppo import RayPPOTrainer
from mrl.trainer.role_client import RoleClient

FETCH_S = 60.0
TEXTS = ("uid", "data_source", "prompt_text", "response_text", "ground_truth")


class Recorder:
    """Records a trainer whose workers have started. The recording is plain JSON."""

    def __init__(self, trainer: RayPPOTrainer, weights: Path) -> None:
        self._trainer, self._weights = trainer, weights
        self._now: dict[str, Any] = _empty()
        self._steps: list[dict[str, Any]] = []
        self._validations: list[dict[str, Any]] = []
        self._asked: dict[str, Any] = {}
        team = trainer.components
        self._wrap(team.hybrid, "generate", self._on_generate)
        self._wrap(team.stream.collector.generator, "run", self._on_run)
        self._wrap(trainer, "step", self._on_step)
        self._wrap(trainer, "validate", self._on_validate)
        models = {model.role: model.client for model in team.model_scores._models}
        for name, role in {**team.roles, **models}.items():
            self._listen(name, role)
        if team.teachers is not None:
            self._wrap(team.teachers, "columns", self._on_columns)

    def recorded(self) -> dict[str, Any]:
        """Return the recording."""
        return {"steps": self._steps, "validations": self._validations}

    @staticmethod
    def _wrap(owner: Any, name: str, listener: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: listener(original, *args, **kwargs))

    def _listen(self, name: str, role: RoleClient) -> None:
        def on_update(original: Callable[..., Any], batch: DataProto) -> Any:
            report = original(batch)
            self._now["updates"].setdefault(name, []).append(report | {"row_ids": sorted(batch.row_ids.tolist())})
            return report

        for call in STEP:
            if call.role == name:
                self._wrap(role, call.method, self._on_columns if call.writes else on_update)

    def _on_columns(self, original: Callable[..., Any], *args: Any) -> Any:
        written = original(*args)
        self._now["columns"] |= _columns(written[0] if isinstance(written, tuple) else written)
        return written

    def _on_generate(
        self,
        original: Callable[..., Iterator[Generated]],
        requests: Sequence[GenerationRequest],
        sampling: Sampling,
        follow_ups: None,
    ) -> Iterator[Generated]:
        recorded = [
            {"key": r.key, "uid": r.prompt, "prompt": r.prompt_ids.tolist(), "seed": r.seed, "max_tokens": r.max_tokens}
            for r in requests
        ]
        sampling_values = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
        self._asked = {"requests": recorded, "sampling": sampling_values | {"stop": list(sampling.stop_token_ids)}}
        return original(requests, sampling, follow_ups)

    def _on_run(
        self, original: Callable[..., ScoredBatch], batch: DataProto, sampling: Sampling, step: int
    ) -> ScoredBatch:
        scored = original(batch, sampling, step)
        generator = self._trainer.components.stream.collector.generator
        kinds = {id(generator.training): "training", id(generator.greedy): "greedy"}
        call = {"kind": kinds.get(id(sampling), "validation"), "step": step, "rows": _rows(scored.batch)}
        self._now["calls"].append(call | self._asked)
        return scored

    def _on_step(self, original: Callable[..., Any]) -> Any:
        before, self._now = self._now, _empty()
        report = original()
        team, step = self._trainer.components, report.step
        self._now |= {
            "step": step,
            "row_ids": report.batch.row_ids.tolist(),
            "scores": _values(report.batch, "scores"),
            "kl_coef": team.kl.coef,
            "weights": {name: str(self._weights / f"{step}-{name}") for name in team.roles},
        }
        for name, role in team.roles.items():
            saved = self._weights / f"{step}-{name}-saved"
            role.group.begin_checkpoint(str(saved))
            role.group.finish_checkpoint()
            source = local_files(self._trainer.config.model_of(name)[1])
            head: Head = "score" if name == "critic" else "lm"
            if not dist.is_initialized() or dist.get_rank() == 0:
                assert source is not None, "the models of a recorded run must be local"
                export_checkpoint(saved, source, head, torch.float32, Path(self._now["weights"][name]))
        self._steps.append(self._now)
        self._now = before
        return report

    def _on_validate(self, original: Callable[..., dict[str, float]]) -> dict[str, float]:
        before, self._now = self._now, _empty()
        figures = original()
        self._validations.append({"after": self._trainer.num_steps_done, "figures": figures} | self._now)
        self._now = before
        return figures


def _empty() -> dict[str, Any]:
    return {"calls": [], "columns": {}, "updates": {}}


def _rows(batch: DataProto) -> list[dict[str, Any]]:
    names = ["prompts", "responses", "rollout_log_probs", "scores", "truncated"]
    names += [name for name in ("response_mask", "sampling_mask") if name in batch.columns()]
    columns = {name: _values(batch, name) for name in names}
    texts = {name: batch.non_tensor_batch[name] for name in TEXTS}
    return [
        {"row_id": row_id}
        | {name: column[row_id] for name, column in columns.items()}
        | {name: texts[name][position] for name in TEXTS}
        for position, row_id in enumerate(batch.row_ids.tolist())
    ]


def _columns(written: DataProto) -> dict[str, dict[int, list[float]]]:
    local = written
    if any(isinstance(column, RemoteColumn) for column in written.columns().values()):
        local = fetch(written, FETCH_S)
    return {name: _values(local, name) for name in local.columns()}


def _values(batch: DataProto, name: str) -> dict[int, list[Any]]:
    """Return the values of each row by row id."""
    column = batch.columns()[name]
    ids = batch.row_ids.tolist()
    if isinstance(column, Jagged):
        ends = np.cumsum(batch.lengths(name))
        rows = np.split(batch.values(name).numpy(), ends[:-1])
        return dict(zip(ids, (row.tolist() for row in rows), strict=True))
    return dict(zip(ids, ([value] for value in column.tolist()), strict=True))  # type: ignore[union-attr]
