"""What supervised training takes: one model with its optimizer, which shares its devices with nobody."""

from __future__ import annotations

import dataclasses

from mrl.config.arithmetic import has_reference, role_batch, role_devices
from mrl.config.sft import SftConfig
from mrl.models.layout import check_layout
from mrl.models.spec import ModelSpec
from mrl.plan.assumptions import ASSUMPTIONS
from mrl.plan.known_models import model_spec
from mrl.plan.machine_memory import MachinePlan, Processes
from mrl.plan.memory import Phase, Role, role_at_stage

ROLE = "actor"


def sft_phase(config: SftConfig, model: str | None = None) -> Phase:
    """Return an update on the fullest GPU; `model` says whose sizes to take."""
    spec = _spec(config, model)
    fused = dataclasses.replace(config.actor, megatron=spec.fused_kernels() | config.actor.megatron)
    stages = _stages(dataclasses.replace(config, actor=fused), spec)
    phases = [Phase("train", config.placement.roles[ROLE], (*role.all_items(), *role.train)) for role in stages]
    return max(phases, key=lambda phase: phase.num_bytes)


def reference_host_bytes(config: SftConfig, model: str | None = None) -> int:
    """Return what a reference in place takes of a machine's own memory; none where its log-probs are computed once."""
    per_rank = max(_reference(config, role) for role in _stages(config, _spec(config, model)))
    return per_rank * min(config.cluster.devices_per_node, role_devices(config, ROLE))


def _reference(config: SftConfig, role: Role) -> int:
    """Return what a rank takes: the frozen weights, and room for the policy's while those are in their place."""
    return 2 * role.weights.parameters * has_reference(config)


def sft_machine(config: SftConfig, model: str | None = None) -> MachinePlan:
    """Return what the processes of a node of CPU slots take together."""
    share, settings = role_batch(config, ROLE), config.actor
    # Fewer tokens than that are never there at once, whatever a micro-batch might hold.
    held_tokens = share.samples_per_rank * share.longest_sample_tokens // settings.parallel.cp
    tokens = min(settings.max_tokens_per_device, held_tokens)
    settings = dataclasses.replace(settings, max_tokens_per_device=tokens)
    stages = _stages(dataclasses.replace(config, actor=settings), _spec(config, model))
    num_ranks = role_devices(config, ROLE)
    held = sum(role.weights.total + _reference(config, role) for role in stages) // len(stages)
    work = sum(item.num_bytes for role in stages for item in role.train) // len(stages)
    copies = sum(role.weights.checkpoint for role in stages) * num_ranks // len(stages)
    spare = int(work * ASSUMPTIONS.cpu_allocator_share)
    processes = (
        Processes(ROLE, num_ranks, ASSUMPTIONS.cpu_rank_bytes + held, work, spare),
        Processes("checkpoint", 1, 0, 0, copies),
        Processes("driver and Ray", 1, ASSUMPTIONS.cpu_run_bytes, 0, ASSUMPTIONS.cpu_run_bytes // 2),
    )
    used = min(config.cluster.nodes, -(-num_ranks // config.cluster.devices_per_node))
    least = sum(each.count * (each.held + each.work) for each in processes)
    most = sum(each.count * each.most for each in processes)
    return MachinePlan(processes, ROLE, least // used, most // used)


def _spec(config: SftConfig, model: str | None) -> ModelSpec:
    spec = model_spec(model or config.model.path)
    check_layout(config.actor.parallel, spec)
    return spec


def _stages(config: SftConfig, spec: ModelSpec) -> list[Role]:
    return [role_at_stage(config, spec, ROLE, stage) for stage in range(config.actor.parallel.pp)]
