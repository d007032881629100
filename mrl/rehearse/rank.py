"""Rehearses one rank of one role: builds its model, makes every call of a step, and measures the memory of each.

The worker is the one of a run, with its arguments, its loss and the user's settings. A process rehearses one rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from mrl.config import step_calls
from mrl.config.arithmetic import role_mesh, teaches_itself
from mrl.config.role_kinds import kind_of
from mrl.config.schema import Config
from mrl.config.sft import AnyConfig, RankedConfig
from mrl.controller import RankInfo
from mrl.engine import checkpoint, weights
from mrl.engine.engine import MegatronEngine
from mrl.errors import counted
from mrl.models.adapters import splits_experts
from mrl.models.families import read_spec
from mrl.models.spec import ModelSpec
from mrl.plan.assumptions import ASSUMPTIONS
from mrl.plan.memory import scoring_phase
from mrl.plan.plan_input import Planned
from mrl.registry import load_attribute
from mrl.rehearse import batches, model_files
from mrl.rehearse.batches import MicroBatches, RowLengths
from mrl.rehearse.fake_world import fake_world
from mrl.rehearse.lengths import fullest
from mrl.rehearse.sharded import num_held, sharded_answers, sharded_kernels
from mrl.rehearse.stand_ins import Replaced, Routing, StageMessages, answers, gpu_kernels, replaced
from mrl.rehearse.subject import HALF, Request, without_unknown_kernels
from mrl.rehearse.timeline import MemoryTimeline, PhaseMemory
from mrl.rehearse.transfer import route_of, without_engines
from mrl.trainer import supervised_tasks
from mrl.trainer.components import role_worker
from mrl.trainer.supervised_tasks import supervised_setup, task_of
from mrl.weight_sync.resharder import WeightSyncSpec
from mrl.workers import actor, model_worker
from mrl.workers.actor import ActorRolloutRefWorker
from mrl.workers.model_worker import ModelWorker


@dataclass(frozen=True)
class RankReport:
    """Memory of the phases of one rank."""

    phases: tuple[PhaseMemory, ...]
    num_parameters: int
    batch: str
    """The micro-batch of the measured calls."""
    tokens: int
    num_rows: int
    seconds: float


def rehearse_rank(request: Request) -> RankReport:
    """Rehearse one rank of a role with full micro-batches."""
    began, subject, role, rank = time.monotonic(), request.subject(), request.role, request.rank
    with TemporaryDirectory(prefix="mrl-rehearse-") as directory, ExitStack() as stack:
        config = without_unknown_kernels(_with_sizes_only(subject, request.model, Path(directory))).config
        mesh = role_mesh(config, role)
        timeline = MemoryTimeline()
        stack.enter_context(fake_world(rank, mesh.world_size, timeline.observe))
        stack.enter_context(timeline.follows_resizing())
        layout = config.model_roles()[role].parallel
        messages = StageMessages(layout.tp if layout.sequence_parallel else 1)
        is_sharded, spec = config.model_roles()[role].strategy == "fsdp", subject.specs[role]
        by_hand = (
            [*sharded_kernels(), *sharded_answers()] if is_sharded else _of_megatron(config, request, spec, messages)
        )
        stack.enter_context(replaced([*by_hand, *without_engines(), *_without_files_or_peers()]))
        place = RankInfo(role, rank, 0, mesh, cast(Any, None))
        with timeline.phase(f"build {role}"):
            worker = _worker(config, role, place)
            worker.init_model()
        if not is_sharded:
            messages.belongs_to(worker.engine)
        rows, batch = _rows(config, request, worker)
        for phase, call in _calls(config, request, worker, rows, Path(directory)):
            with timeline.phase(phase):
                call()
        tokens, seconds = batches.num_tokens(rows), time.monotonic() - began
        held = num_held(cast(Any, worker.engine)) if is_sharded else _held(worker.engine)
        return RankReport(tuple(timeline.phases), held, batch, tokens, len(rows), seconds)


def _of_megatron(config: AnyConfig, request: Request, spec: ModelSpec, messages: StageMessages) -> Replaced:
    """Return what is replaced for a `MegatronEngine`."""
    layout, trained = config.model_roles()[request.role].parallel, config.trained_roles().get(request.role)
    place = role_mesh(config, request.role).coordinates(request.rank)
    lora = trained.lora if trained is not None else None
    has_adapted_experts = lora is not None and splits_experts(spec, lora)
    kernels = gpu_kernels(adapted=lora is not None, adapted_experts=has_adapted_experts)
    return [*kernels, *answers(messages, _routing(place.ep, layout.ep, spec, request.routing))]


def _rows(config: AnyConfig, request: Request, worker: ModelWorker) -> tuple[list[RowLengths], str]:
    """Return the rows of a full micro-batch, and a description: of recorded samples, or of the greatest length."""
    if request.lengths is None:
        rows = batches.largest(config, request.role)
        return rows, f"{counted(len(rows), 'row')} with {batches.num_tokens(rows):,} tokens, of the greatest length"
    budget = config.model_roles()[request.role].max_tokens_per_device
    recorded = fullest(Path(request.lengths), worker.place.mesh.dp, budget, worker.engine.packing)
    return recorded.rows, str(recorded)


def _calls(
    config: AnyConfig, request: Request, worker: ModelWorker, rows: list[RowLengths], directory: Path
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the calls of a step with the names of their phases. The first update makes Adam's moments."""
    role, spec = request.role, worker.engine.request.spec
    layout = config.model_roles()[role].parallel
    fewest = layout.pp if layout.vpp > 1 else 1
    most = batches.num_micro_batches(config, role, worker.engine.groups.at.pp)
    updates, scores = _methods(config, role)

    def calls(method: Method, micro_batches: MicroBatches) -> Callable[[], Any]:
        sizes = [[len(part) for part in micro_batches]] * worker.place.mesh.dp
        batch = partial(batches.batch_of, micro_batches, method.columns, spec.vocab, _widths(config))
        return lambda: getattr(worker, method.name)(batch(), sizes)

    for method in updates:
        yield "first update", calls(method, [batches.smallest(rows)] * fewest)
    for method in scores:
        yield scoring_phase(role), calls(method, [rows] * fewest)
    for method in updates:
        yield f"train {role}", calls(method, [rows] * most)
        if request.headroom:
            yield HALF, calls(method, [batches.half(rows)] * most)
    if updates:
        yield "checkpoint", lambda: worker.begin_checkpoint(str(directory / "checkpoint"))
    if isinstance(config, Config) and role == "actor":
        yield "offload optimizer", lambda: worker.offload("gradients", "optimizer")
        yield "send weights", partial(_send, cast(ActorRolloutRefWorker, worker), route_of(config, spec))
    yield "offload", lambda: worker.offload("gradients", "optimizer", "parameters")
    yield "onload", lambda: worker.onload("parameters", "gradients", "optimizer")


def _send(worker: ActorRolloutRefWorker, route: WeightSyncSpec) -> None:
    """Plan the transfer to all engines, which checks the pieces of every tensor, and fill this rank's buckets."""
    worker.prepare_sending(route)
    worker.send_weights(1, list(range(len(route.sockets))))


@dataclass(frozen=True)
class Method:
    """A method of a worker, and the columns that it reads."""

    name: str
    columns: tuple[str, ...]


def _methods(config: AnyConfig, role: str) -> tuple[list[Method], list[Method]]:
    """Return the methods that update, and the methods that only score. Advantages are computed on the host."""
    if not isinstance(config, Config):
        update = task_of(config).update
        ranked = ("rank", "label") if isinstance(config, RankedConfig) else ()
        return [Method(update, ranked)], []
    kinds = {kind_of(role), *(["teacher"] if role == "actor" and teaches_itself(config) else [])}
    made = [call for call in step_calls.step_calls(config) if call.role in kinds]
    methods = [Method(call.method, _columns(call, config)) for call in made]
    scores = [method for method in methods if not method.name.startswith(("update", "compute_advantages"))]
    return [method for method in methods if method.name.startswith("update")], scores


def _columns(call: step_calls.StepCall, config: Config) -> tuple[str, ...]:
    """Return the columns that a call may read. The teacher's exist only if the configuration needs them."""
    of_some = (*step_calls.TEACHER_COLUMNS, step_calls.TEACHER_SPANS, "sampling_mask", "routes")
    return (*call.reads, *(name for name in call.optional if name not in of_some), *call.needs(config))


def _widths(config: AnyConfig) -> dict[str, int]:
    """Return the numbers per token of the teacher's columns."""
    if not isinstance(config, Config) or (distillation := config.algorithm.distillation) is None:
        return {}
    teacher = next(iter(config.teaching_models()), "actor")
    top_k, hidden = distillation.top_k, read_spec(config.model_of(teacher)[1]).hidden
    return {"teacher_top_ids": top_k, "teacher_top_log_probs": top_k + 1, "teacher_hidden": hidden}


def _worker(config: AnyConfig, role: str, place: RankInfo) -> ModelWorker:
    if isinstance(config, Config):
        made = role_worker(role, config)
        worker_class, arguments = made.worker_class, made.args
    else:
        task = task_of(config)
        worker_class, arguments = config.actor.worker or task.worker, (supervised_setup(config), *task.arguments)
    worker: ModelWorker = load_attribute(worker_class)(place, *arguments)
    return worker


def _with_sizes_only(subject: Planned[Any], model: str | None, directory: Path) -> Planned[Any]:
    """Return the subject with models of which only the config.json exists. `model` replaces each, as in the plan."""
    models: dict[str, Any] = {}
    for role in subject.config.model_roles():
        key, own = subject.config.model_of(role)
        models[key] = str(model_files.write_config(model or own, directory / key))
    if isinstance(subject.config, Config):
        models["algorithm.keep_sampling_mask"] = False  # random tokens are in no engine's masks
        models["algorithm.router_replay"] = "none"  # routes are small, and a rehearsal has no engine to choose them
    return subject.with_changes_unchecked(models)


def _routing(ep_rank: int, ep: int, spec: ModelSpec, skew: float | None) -> Routing:
    """Return a routing in which this rank is as busy as given, or as the plan assumes for the busiest."""
    if spec.moe is None or ep == 1:
        return Routing(range(0), 1.0)
    num_local = spec.moe.num_experts // ep
    return Routing(
        range(ep_rank * num_local, (ep_rank + 1) * num_local), ASSUMPTIONS.expert_imbalance if skew is None else skew
    )


def _without_files_or_peers() -> Replaced:
    """Replace what reads a model's weights, and what meets other processes."""
    return [
        *((module, "HfReader", model_files.TableReader) for module in (model_worker, actor, supervised_tasks)),
        (weights, "load_shard", model_files.load_shard),
        (checkpoint, "_write_rank", lambda *_: None),
        (model_worker, "take_device", lambda _: "fake"),
        (supervised_tasks, "padding_token", lambda _: 0),
        (ModelWorker, "init_process_group", lambda *_: None),
    ]


def _held(engine: MegatronEngine) -> int:
    return sum(parameter.numel() for model in engine.models for parameter in model.parameters())
