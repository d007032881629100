"""Base of all model workers: an engine, and conversions between batches and rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mrl.algos.rows import Rows
from mrl.controller import Dispatch, RankInfo, register
from mrl.engine import checkpoint
from mrl.engine.groups import take_device
from mrl.engine.offload import PartName, WeightCopy
from mrl.engine.packed_rows import TokenRows
from mrl.engine.scores import MASK, LossFunction, LossInput, ScoreRequest, Scores
from mrl.errors import BatchError
from mrl.hub import node_copy
from mrl.models.hf_reader import HfReader
from mrl.protocol import DataProto
from mrl.protocol.columns import jagged
from mrl.rollout.engine import RoleMemory
from mrl.workers.messages import PROBED, MicroBatchSizes, ModelFacts, ModelSetup, UpdateReport
from mrl.workers.recorded import RecordedWorker
from mrl.workers.strategies import make_engine, open_groups

if TYPE_CHECKING:
    from mrl.engine.engine import MegatronEngine


class ModelWorker(RecordedWorker):
    """One rank of a model. `init_model` creates the engine."""

    def __init__(self, place: RankInfo, setup: ModelSetup) -> None:
        super().__init__(place)
        self.setup = replace(setup, path=str(node_copy(setup.path)))
        self.engine: MegatronEngine  # or an `FsdpEngine`, which has the same methods
        self.reference: WeightCopy
        self._groups = ExitStack()
        self._save: checkpoint.PendingSave | None = None

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> ModelFacts:
        setup = self.setup
        self.init_process_group(take_device(self.place.local_rank), setup.timeout_s)
        groups = self._groups.enter_context(open_groups(setup.settings, setup.seed))
        return load_model(self, make_engine(setup, groups))

    @register(Dispatch.ONE_TO_ALL)
    def begin_checkpoint(self, directory: str) -> None:
        """Copy weights, optimizer, schedule and random states to the host, and begin to write them."""
        if self._save is not None:  # left by a save that failed on another rank
            self._save.discard()
        self._save = checkpoint.PendingSave(self.engine, directory, {})

    @register(Dispatch.ONE_TO_ALL)
    def checkpoint_is_written(self) -> bool:
        return self._save is None or self._save.is_written

    @register(Dispatch.ONE_TO_ALL)
    def finish_checkpoint(self) -> None:
        """Wait until the checkpoint is on disk, and publish it."""
        save, self._save = self._save, None
        assert save is not None, "a checkpoint was begun"
        save.finish()

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, directory: str) -> None:
        """Restore a checkpoint, written by any layout."""
        checkpoint.load(self.engine, directory)

    @register(Dispatch.ONE_TO_ALL)
    def offload(self, *parts: PartName) -> None:
        self.engine.memory.offload(*parts)

    @register(Dispatch.ONE_TO_ALL)
    def onload(self, *parts: PartName) -> None:
        self.engine.memory.onload(*parts)

    @register(Dispatch.ONE_TO_ALL)
    def give_back(self) -> None:
        """Release cached memory to other processes, at the end of this role's turn."""
        self.engine.memory.give_back()

    @register(Dispatch.ONE_TO_ALL)
    def device_memory(self) -> RoleMemory:
        return RoleMemory(torch.cuda.memory_reserved(), torch.cuda.memory_allocated())

    @register(Dispatch.DATA_PARALLEL, reads=("prompts", "responses"), writes=PROBED)
    def probe(self, batch: DataProto, sizes: MicroBatchSizes) -> DataProto | None:
        """Compute the values that `trainer/model_probe.py` compares with transformers."""
        scores = self.forward(token_rows(batch, {}), sizes, ScoreRequest(hidden=True))
        if scores is None:
            return None
        outputs = scores.values_T if self.setup.head == "score" else scores.log_probs_T
        assert scores.hidden_TH is not None, "hidden states were requested"
        assert outputs is not None, "every head returns outputs"
        lengths = batch.lengths("responses")
        columns = zip(PROBED, (scores.hidden_TH, outputs), strict=True)
        return DataProto.from_dict(
            {name: jagged(x.float().cpu(), lengths) for name, x in columns}, row_ids=batch.row_ids
        )

    def micro_batches(self, sizes: MicroBatchSizes) -> list[npt.NDArray[np.int64]]:
        """Return the positions of this rank's rows in each of its micro-batches."""
        ends = np.cumsum(sizes[self.place.coordinates.dp])
        return np.split(np.arange(ends[-1]), ends[:-1])

    def sum_over_shards(self, x: Tensor) -> Tensor:
        return _reduced(self.engine, x, torch.distributed.ReduceOp.SUM)

    def max_over_shards(self, x: Tensor) -> Tensor:
        return _reduced(self.engine, x, torch.distributed.ReduceOp.MAX)

    def forward(self, rows: TokenRows, sizes: MicroBatchSizes, scores: ScoreRequest) -> Scores | None:
        """Return scores of all response tokens; None on ranks outside the last stage."""
        return self.engine.forward(rows, self.micro_batches(sizes), scores)

    def update(self, rows: TokenRows, sizes: MicroBatchSizes, loss: LossFunction, scores: ScoreRequest) -> UpdateReport:
        reports, outcome = self.engine.update(rows, self.micro_batches(sizes), loss, scores)
        load = self.engine.expert_load.take(was_applied=outcome.applied) if self.engine.expert_load else {}
        load |= self.engine.other_experts()
        return UpdateReport(reports, outcome.grad_norm, outcome.learning_rate, outcome.applied, load)


def load_model(worker: ModelWorker, engine: MegatronEngine) -> ModelFacts:
    """Read the weights into the engine, which is the worker's from now on."""
    worker.engine, spec = engine, engine.request.spec
    engine.load(HfReader(worker.setup.path))
    if worker.setup.keeps_reference:
        worker.reference = engine.memory.copy_weights()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return ModelFacts(engine.packing, spec.num_parameters, spec.flops_per_token, device)


@contextmanager
def as_reference(worker: ModelWorker) -> Iterator[None]:
    """Compute with the model before training, for the block: adapters are off, or the kept weights are in use."""
    if worker.engine.adapters is not None:
        with worker.engine.adapters.off():
            yield
    else:
        with worker.engine.memory.weights_of(worker.reference):
            yield


def _reduced(engine: MegatronEngine, x: Tensor, operation: torch.distributed.ReduceOp.RedOpType) -> Tensor:
    x = x.to(engine.groups.device, copy=True)
    torch.distributed.all_reduce(x, operation, group=engine.groups.dp)
    return x.cpu()


def token_rows(batch: DataProto, columns: Mapping[str, Tensor]) -> TokenRows:
    """Concatenate prompts and responses to sequences. Without a mask, every response token counts as sampled."""
    lengths = batch.lengths("responses").astype(np.int64)
    prompts, responses = (
        torch.split(batch.values(name), batch.lengths(name).tolist()) for name in ("prompts", "responses")
    )
    return TokenRows(
        torch.cat([part for row in zip(prompts, responses, strict=True) for part in row]),
        batch.lengths("prompts") + lengths,
        lengths,
        {"response_mask": response_mask(batch), **_sampling_mask(batch), **columns},
        routes=batch.values("routes") if "routes" in batch.columns() else None,
    )


def _sampling_mask(batch: DataProto) -> dict[str, Tensor]:
    """Return the column of sampling masks, if there is one. Each response token must be in its mask."""
    if MASK not in batch.columns():
        return {}
    mask_TM, tokens_T = batch.values(MASK), batch.values("responses")
    if len(outside := (mask_TM != tokens_T.unsqueeze(1)).all(1).nonzero()):
        at = int(outside[0])
        raise BatchError(f"response token {at} of the batch, {int(tokens_T[at])}, is not in its sampling mask")
    return {MASK: mask_TM}


def last_tokens(batch: DataProto) -> TokenRows:
    """Return rows in which only the last token is scored, at its own place."""
    rows = token_rows(batch, {})
    return replace(rows, response_lengths=np.ones_like(rows.response_lengths), columns={}, before=False)


def rows_of(batch: TokenRows | LossInput, device: torch.device | None = None) -> Rows:
    """Return the rows' ranges in a column of response tokens."""
    return Rows.of(torch.from_numpy(batch.response_lengths), device)


def response_mask(batch: DataProto) -> Tensor:
    if "response_mask" in batch.columns():
        return batch.values("response_mask").bool()
    return torch.ones(int(batch.lengths("responses").sum()), dtype=torch.bool)


def response_column(batch: DataProto, name: str, values_T: Tensor | None) -> DataProto | None:
    """Return values of all response tokens as a column of the batch; None on ranks without values."""
    if values_T is None:
        return None
    column = jagged(values_T.float().cpu(), batch.lengths("responses"))
    return DataProto.from_dict(tensors={name: column}, row_ids=batch.row_ids)


def score_column(batch: DataProto, name: str, scores: Scores | None) -> DataProto | None:
    """Return the head's output at each response's last token as a column; None on ranks without output."""
    if scores is None:
        return None
    assert scores.values_T is not None, "a score head returns values"
    return DataProto.from_dict({name: scores.values_T.float().cpu()}, row_ids=batch.row_ids)


def optional_values(batch: DataProto, *names: str) -> dict[str, Tensor]:
    present = batch.columns()
    return {name: batch.values(name) for name in names if name in present}
