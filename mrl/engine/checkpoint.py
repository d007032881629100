"""Training state on disk, saved by one layout and loaded by any.

Weights and Adam's moments are stored under the names and in the coordinates of Hugging Face's tensors: the family's
table maps each range of Megatron's flat optimizer shards to boxes of these tensors, so a checkpoint does not depend on
its layout. Every rank writes what it owns, once, into its own safetensors file, and reads what it owns; nothing is
gathered. The model's parameters are not saved: Megatron computes them from the optimizer's float32 weights after every
step. A buffer of the table, which is not trained, is saved as its value. Of a model with adapters, only the adapters
are saved, under PEFT's names, with a digest of the frozen weights that they belong to.

A save begins with a copy on the host. A thread hashes and writes it while training continues. Then the ranks meet
again, and one rename publishes the files, which are next to the checkpoint's final place.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mrl import files
from mrl.engine.checkpoint_files import (
    FORMAT,
    MANIFEST,
    RANDOM,
    SavedFiles,
    entry,
    file_name,
    flat_shard_regions,
    write_safetensors,
)
from mrl.engine.groups import ParallelGroups
from mrl.engine.offload import DeviceMemory
from mrl.engine.steps import OwnedState
from mrl.errors import EngineError, MrlError
from mrl.models.regions import Region, Shape, is_exact_cover
from mrl.models.table import Shard

_TRACKED = "tensor-parallel/"


class SavedOptimizer(Protocol):
    """The state of an optimizer, by the parameters that it updates."""

    num_skipped: int
    num_skipped_in_a_row: int

    @property
    def num_steps(self) -> int: ...

    def begin_at(self, num_steps: int) -> None: ...

    def weights_from_owned(self) -> None: ...


class TrainingState(Protocol):
    """The state of an engine as a checkpoint has it: parts of Hugging Face's tensors."""

    @property
    def layout(self) -> dict[str, Any]:
        """Everything that random states depend on."""

    @property
    def lora(self) -> dict[str, Any] | None:
        """Settings of the adapters; None if all weights are trained."""

    @property
    def optimizer(self) -> SavedOptimizer: ...

    def shapes(self) -> dict[str, Shape]:
        """Return the tensors of a checkpoint of this engine."""

    def shards(self) -> Iterator[tuple[Shard, Tensor]]:
        """Yield the parts of these tensors that this rank holds."""

    def owned(self, shard: Shard, tensor: Tensor) -> OwnedState | None:
        """Return the part of a trained shard that this rank updates."""

    def set_owned(self, shard: Shard, tensor: Tensor, state: dict[str, Tensor]) -> None:
        """Restore a state returned by `owned`."""

    def writes(self, shard: Shard) -> bool:
        """Return whether this rank writes the shard: one of several copies is written."""

    def random_trackers(self) -> dict[str, Tensor]:
        """Return the states of random generators other than torch's own."""

    def set_random_trackers(self, states: dict[str, Tensor]) -> None: ...


class SavedEngine(Protocol):
    """The parts of an engine that a checkpoint needs."""

    groups: ParallelGroups
    memory: DeviceMemory
    source: str

    @property
    def training_state(self) -> TrainingState: ...

    def base_digest(self) -> str: ...


@dataclass(frozen=True)
class _Written:
    """Report of one rank about its file."""

    file: str
    num_bytes: int
    sha256: str
    boxes: list[tuple[str, Region]]


def save(engine: SavedEngine, directory: str | Path, extra: Mapping[str, Any]) -> None:
    """Write the training state and the caller's `extra` (JSON values) to a new directory. Call this on all ranks.

    All machines must see the directory. It is published atomically, when it is complete and on disk.
    """
    PendingSave(engine, directory, extra).finish()


class PendingSave:
    """A save under way, of the state at its start. Create it on all ranks."""

    def __init__(self, engine: SavedEngine, directory: str | Path, extra: Mapping[str, Any]) -> None:
        target = Path(directory).absolute()
        self._target, self._staged = target, target.with_name(f".{target.name}.saving")
        self._is_first = engine.groups.at.rank == 0
        self._facts = _facts(engine, extra)
        with raise_on_all_ranks("saving"):
            if self._is_first:
                _prepare(self._target, self._staged)
        tensors, boxes = _copy_rank(engine)
        writer = ThreadPoolExecutor(1, "checkpoint")
        path = self._staged / file_name(engine.groups.at.rank)
        self._written = writer.submit(_write_rank, path, tensors, boxes)
        writer.shutdown(wait=False)

    @property
    def is_written(self) -> bool:
        """Return whether this rank's file is written or failed, so that `finish` does not wait for it."""
        return self._written.done()

    def finish(self) -> None:
        """Publish what all ranks have written, or raise an error on all ranks. Call this on every rank."""
        try:
            with raise_on_all_ranks("saving"):
                written = self._written.result()
            reports: list[Any] | None = [None] * dist.get_world_size() if self._is_first else None
            dist.gather_object(written, reports)
            with raise_on_all_ranks("saving"):
                if reports is not None:
                    _publish(self._target, self._staged, _manifest(self._facts, reports))
        except (MrlError, OSError):
            if self._is_first:
                shutil.rmtree(self._staged, ignore_errors=True)
            raise

    def discard(self) -> None:
        """Wait for the write to end, and ignore its result."""
        wait([self._written])


def load(engine: SavedEngine, directory: str | Path) -> dict[str, Any]:
    """Restore the training state on all ranks of any layout. Return the caller's `extra`.

    Sizes and hashes of the files are compared with the manifest, each file on one rank.
    """
    optimizer, state_of = _optimizer(engine), engine.training_state
    digest = engine.base_digest()
    with raise_on_all_ranks("loading"):
        saved = SavedFiles(Path(directory))
        if dist.get_rank() == 0:
            saved.check_manifest()
        saved.check_lora(engine.training_state.lora)
        saved.check_model(engine.training_state.shapes())
        saved.check_base(digest, engine.source)
        saved.check_files(dist.get_rank(), dist.get_world_size())
    with raise_on_all_ranks("loading"), torch.no_grad():
        optimizer.begin_at(saved.manifest["num_steps"])
        for shard, parameter in state_of.shards():
            if shard.trained and (owned := state_of.owned(shard, parameter)) is not None:
                state = {name: torch.zeros_like(tensor, device="cpu") for name, tensor in owned.state.items()}
                for name, box, views in flat_shard_regions(shard, owned.start, state):
                    saved.read(name, box, views)
                state_of.set_owned(shard, parameter, state)
            elif not shard.trained:
                state = {"param": torch.empty(parameter.numel(), dtype=parameter.dtype)}
                for name, box, views in flat_shard_regions(shard, 0, state):
                    saved.read(name, box, views)
                parameter.copy_(state["param"].view(parameter.shape))
        if saved.manifest["layout"] == engine.training_state.layout:
            set_random_states(engine.training_state, saved.random_states(engine.groups.at.rank))
        else:
            warnings.warn("the checkpoint has another layout: random states are not restored", stacklevel=2)
    optimizer.weights_from_owned()
    optimizer.num_skipped, optimizer.num_skipped_in_a_row = saved.manifest["num_skipped"]
    engine.memory.changed()
    extra: dict[str, Any] = saved.manifest["extra"]
    return extra


def _optimizer(engine: SavedEngine) -> SavedOptimizer:
    engine.memory.need("parameters", "optimizer")
    return engine.training_state.optimizer


def _prepare(target: Path, staged: Path) -> None:
    if target.exists():
        raise EngineError("already exists", where=str(target), fix="choose a new directory, or remove this one")
    if staged.exists():
        warnings.warn(f"{staged} was left by an interrupted save: it is removed", stacklevel=2)
        shutil.rmtree(staged)
    staged.mkdir(parents=True)


def _copy_rank(engine: SavedEngine) -> tuple[dict[str, Tensor], list[tuple[str, Region]]]:
    """Return host copies of the tensors that this rank writes, and their boxes."""
    _optimizer(engine)
    tensors = {RANDOM + name: state for name, state in random_states(engine.training_state).items()}
    boxes = []
    for shard, parameter in engine.training_state.shards():
        owned = engine.training_state.owned(shard, parameter) if shard.trained else _frozen(parameter, engine.groups)
        if owned is not None and engine.training_state.writes(shard):
            for name, box, views in flat_shard_regions(shard, owned.start, owned.state):
                boxes.append((name, box))
                tensors |= {entry(kind, name, box): view for kind, view in views.items()}
    # Always copy: memory that numpy has seen can never leave the device again.
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}, boxes


def _frozen(buffer: Tensor, groups: ParallelGroups) -> OwnedState | None:
    """Return the value of a buffer, which the first of the ranks with the same data owns."""
    return OwnedState(0, {"param": buffer.flatten()}) if groups.at.dp == groups.at.cp == 0 else None


def _write_rank(path: Path, tensors: dict[str, Tensor], boxes: list[tuple[str, Region]]) -> _Written:
    sha256 = write_safetensors(path, tensors)
    return _Written(path.name, path.stat().st_size, sha256, boxes)


def _facts(engine: SavedEngine, extra: Mapping[str, Any]) -> dict[str, Any]:
    optimizer = _optimizer(engine)
    facts = {
        "format": FORMAT,
        "layout": engine.training_state.layout,
        "num_steps": optimizer.num_steps,
        "num_skipped": [optimizer.num_skipped, optimizer.num_skipped_in_a_row],
        "extra": dict(extra),
        "tensors": {name: {"shape": shape} for name, shape in engine.training_state.shapes().items()},
    }
    if engine.training_state.lora is None:
        return facts
    return facts | {"lora": engine.training_state.lora, "base": {"path": engine.source, "digest": engine.base_digest()}}


def _manifest(facts: dict[str, Any], reports: Sequence[_Written]) -> dict[str, Any]:
    boxes: dict[str, list[tuple[int, Region]]] = defaultdict(list)
    for rank, report in enumerate(reports):
        for name, box in report.boxes:
            boxes[name].append((rank, box))
    tensors = {name: tensor | {"boxes": boxes[name]} for name, tensor in facts["tensors"].items()}
    for name, tensor in tensors.items():
        if not is_exact_cover(tensor["shape"], [box for _, box in boxes[name]]):
            raise EngineError(f"the ranks' parts of {name} {list(tensor['shape'])} have gaps or overlaps")
    written_files = {report.file: {"bytes": report.num_bytes, "sha256": report.sha256} for report in reports}
    return facts | {"files": written_files, "tensors": tensors}


def _publish(target: Path, staged: Path, manifest: Mapping[str, Any]) -> None:
    try:
        text = json.dumps(manifest)
    except (TypeError, ValueError) as error:
        raise EngineError(f"`extra` cannot be saved as JSON: {error}") from error
    files.write_text(staged / MANIFEST, text)
    files.publish_directory(staged, target)


@contextmanager
def raise_on_all_ranks(action: str) -> Iterator[None]:
    """Make the block succeed on all ranks or raise on all ranks. The ranks must not communicate inside it."""
    error: MrlError | OSError | None = None
    try:
        yield
    except (MrlError, OSError) as raised:
        error = raised
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, None if error is None else str(error))
    if error is not None:
        raise error
    if failed := [f"rank {rank}: {message}" for rank, message in enumerate(messages) if message is not None]:
        raise EngineError(f"{action} failed on {len(failed)} of {len(messages)} ranks; {failed[0]}")


def random_states(state: TrainingState) -> dict[str, Tensor]:
    """Return copies of the states of all random generators: torch's on CPU and GPU, and the engine's."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["gpu"] = torch.cuda.get_rng_state()
    return states | {_TRACKED + name: tracked.clone() for name, tracked in state.random_trackers().items()}


def set_random_states(state: TrainingState, states: Mapping[str, Tensor]) -> None:
    """Restore the random states returned by `random_states`."""
    torch.set_rng_state(states["cpu"])
    if "gpu" in states:
        torch.cuda.set_rng_state(states["gpu"])
    tracked = {name.removeprefix(_TRACKED): x for name, x in states.items() if name.startswith(_TRACKED)}
    state.set_random_trackers(tracked)
