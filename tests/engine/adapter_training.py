"""Adapters of a tiny model in any layout and in peft, on the same eight rows."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file

from mrl.config.lora import LoraConfig
from mrl.config.schema import ParallelConfig, TrainedModelConfig
from mrl.engine.adapter_files import write_peft
from mrl.engine.checkpoint_files import flat_shard_regions
from mrl.engine.engine import EngineRequest, MegatronEngine
from mrl.engine.parallel import ParallelGroups, model_parallel
from mrl.engine.scores import ScoreRequest
from mrl.models.adapters import adapter_names, adapter_tensors
from mrl.models.families import read_spec
from mrl.models.hf_reader import HfReader
from mrl.models.regions import Region, slices
from mrl.models.table import Head, hf_tensors
from tests.engine.tiny_training import LENGTHS, VOCAB, negative_score, share

Floats = npt.NDArray[np.float32]
"""Tensors cross to another process as arrays: torch would share their memory, which ends with the process."""


@dataclass(frozen=True)
class Case:
    """Adapters in one layout."""

    model: str
    adapters: str
    """A directory of PEFT."""
    layout: ParallelConfig
    lora: dict[str, Any]
    megatron: dict[str, Any] = field(default_factory=dict)
    dtype: Literal["bfloat16", "float32"] = "float32"
    ddp: dict[str, Any] = field(default_factory=dict)
    head: Head = "lm"


@dataclass(frozen=True)
class Found:
    """Results of one rank: log-probs of its rows by number, boxes of gradients, and the update's loss and norm."""

    on: dict[int, Floats]
    off: dict[int, Floats]
    gradients: list[tuple[str, Region, Floats]]
    loss: float
    grad_norm: float
    num_buffered: int
    """Elements of the gradient buffers."""


def measure(cases: list[Case]) -> list[Found]:
    return [_measure(case) for case in cases]


def settings_of(case: Case) -> TrainedModelConfig:
    return TrainedModelConfig(
        parallel=case.layout,
        dtype=case.dtype,
        max_tokens_per_device=64,
        megatron=case.megatron,
        ddp=case.ddp,
        lora=LoraConfig(**case.lora),
        optimizer={"lr": 1e-2, "weight_decay": 0.01, "clip_grad": 0.0},
    )


def engine_of(case: Case, groups: ParallelGroups, **optimizer: Any) -> MegatronEngine:
    """Return an engine with the model's weights and with the adapters of the case."""
    settings = settings_of(case)
    settings = replace(settings, optimizer=settings.optimizer | optimizer)
    engine = MegatronEngine(EngineRequest(read_spec(case.model), "lm", settings), groups)
    engine.load(HfReader(case.model))
    values = load_file(f"{case.adapters}/adapter_model.safetensors")
    assert engine.adapters is not None
    assert engine.optimizer is not None
    engine.adapters.fill(lambda name, box: values[name][slices(box)])
    engine.optimizer.optimizer.reload_model_params()
    return engine


def _measure(case: Case) -> Found:
    with model_parallel(case.layout, seed=1) as groups:
        engine = engine_of(case, groups)
        assert engine.adapters is not None
        assert engine.optimizer is not None
        on = log_probs_by_row(engine)
        with engine.adapters.off():
            off = log_probs_by_row(engine)
        engine.optimizer.zero_grad()
        reports = engine.forward_backward(*share(engine), negative_score, ScoreRequest())
        gradients = gradient_boxes(engine)
        norm = engine.optimizer.step().grad_norm
        loss = reports["loss"] if groups.mesh.is_output_rank(groups.at.rank) else 0.0
        return Found(on, off, gradients, loss, norm, sum(b.grad_data.numel() for b in engine.optimizer.buffers))


def log_probs_by_row(engine: MegatronEngine) -> dict[int, Floats]:
    rows, micro_batches = share(engine)
    scores = engine.forward(rows, micro_batches, ScoreRequest())
    scores_T = None if scores is None else scores.values_T if scores.log_probs_T is None else scores.log_probs_T
    if scores_T is None:
        return {}
    mine = range(engine.groups.at.dp, len(LENGTHS), engine.groups.mesh.dp)
    parts = scores_T.split(rows.response_lengths.tolist())
    return {number: part.float().numpy() for number, part in zip(mine, parts, strict=True)}


def gradient_boxes(engine: MegatronEngine) -> list[tuple[str, Region, Floats]]:
    """Return the parts of the adapters' gradients that this rank owns, by PEFT's names."""
    assert engine.adapters is not None
    assert engine.optimizer is not None
    boxes = []
    for shard, parameter in engine.adapters.held():
        owned: Any = engine.optimizer.owned(parameter)
        gradient: Any = parameter
        if owned is not None:
            flat = gradient.main_grad.flatten()[owned.start : owned.start + len(owned.state["param"])]
            regions = flat_shard_regions(shard, owned.start, {"grad": flat})
            boxes += [(name, box, x["grad"].numpy().copy()) for name, box, x in regions]
    return boxes


# --- peft -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Oracle:
    """The same figures from peft on transformers."""

    on: list[Floats]
    off: list[Floats]
    loss: float
    gradients: dict[str, Floats]


def with_peft(model: str, directory: Path, lora: LoraConfig) -> Oracle:
    """Save random adapters to `directory`, and return what peft computes with them."""
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    settings = PeftConfig(
        r=lora.rank,
        lora_alpha=int(lora.alpha),
        target_modules=sorted(lora.modules),
        use_rslora=lora.rslora,
        task_type="CAUSAL_LM",
    )
    adapted: Any = get_peft_model(base, settings)
    random = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.15 * torch.randn(parameter.shape, generator=random))
    adapted.save_pretrained(directory)
    on = peft_log_probs(adapted)
    loss = -torch.cat(on).sum() / 100
    loss.backward()
    gradients = {
        name.replace(".default.", "."): parameter.grad.numpy()
        for name, parameter in adapted.named_parameters()
        if parameter.grad is not None
    }
    with adapted.disable_adapter(), torch.no_grad():
        off = peft_log_probs(adapted)
    return Oracle([x.detach().numpy() for x in on], [x.numpy() for x in off], float(loss.detach()), gradients)


def with_formula(model: str, directory: Path, lora: LoraConfig) -> Oracle:
    """Save random adapters to `directory`, and return what transformers computes with W + scale * B A, with the
    gradients of A and B by the chain rule. peft reads no adapters of single experts next to those of other layers."""
    from transformers import AutoModelForCausalLM

    base: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    random, spec = torch.Generator().manual_seed(11), read_spec(model)
    shapes = adapter_tensors(spec, lora)
    values = {name: 0.15 * torch.randn(shape, generator=random) for name, shape in shapes.items()}
    write_peft(directory, values, lora, model)
    with torch.no_grad():
        off = [x.numpy() for x in peft_log_probs(base)]
    pairs = [(hf, *adapter_names(hf)) for hf in hf_tensors(spec, "lm") if adapter_names(hf)[0] in shapes]
    with torch.no_grad():
        for hf, a, b in pairs:
            part_of(base, hf).add_(lora.scale * values[b] @ values[a])
    on = peft_log_probs(base)
    loss = -torch.cat(on).sum() / 100
    loss.backward()
    gradients = {}
    for hf, a, b in pairs:
        whole = part_of(base, hf, gradient=True)
        gradients |= {a: (lora.scale * values[b].T @ whole).numpy(), b: (lora.scale * whole @ values[a].T).numpy()}
    return Oracle([x.detach().numpy() for x in on], off, float(loss.detach()), gradients)


def part_of(model: Any, hf: str, *, gradient: bool = False) -> torch.Tensor:
    """Return a tensor of the files in a model of transformers, which stacks experts, and their gates above their
    ups."""
    parameters = dict(model.named_parameters())
    expert = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", hf)
    if expert is None:
        return parameters[hf].grad if gradient else parameters[hf]
    prefix, number, kind = expert.groups()
    stacked = parameters[f"{prefix}.{'down' if kind == 'down' else 'gate_up'}_proj"]
    matrix = (stacked.grad if gradient else stacked)[int(number)]
    return matrix if kind == "down" else matrix.chunk(2)[kind == "up"]


def with_peft_experts(model: str, directory: Path, lora: LoraConfig) -> Oracle:
    """Save random adapters to `directory`, and return what peft computes with these files. It stacks the experts, and
    fuses gate and up: its A has the rows of both, and its B has two blocks."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    random, spec = torch.Generator().manual_seed(11), read_spec(model)
    values = {name: 0.15 * torch.randn(shape, generator=random) for name, shape in adapter_tensors(spec, lora).items()}
    write_peft(directory, values, lora, model)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted: Any = PeftModel.from_pretrained(base, directory, is_trainable=True)
    on = peft_log_probs(adapted)
    loss = -torch.cat(on).sum() / 100
    loss.backward()
    whole = {name.replace(".default.", "."): x.grad for name, x in adapted.named_parameters() if x.grad is not None}
    assert spec.moe is not None
    gradients = {name: _expert_part(whole, name, lora.rank, spec.moe.num_experts).numpy() for name in values}
    with adapted.disable_adapter(), torch.no_grad():
        off = peft_log_probs(adapted)
    return Oracle([x.detach().numpy() for x in on], [x.numpy() for x in off], float(loss.detach()), gradients)


def _expert_part(whole: dict[str, torch.Tensor], name: str, rank: int, num_experts: int) -> torch.Tensor:
    expert = re.fullmatch(r"(.*)\.block_sparse_moe\.experts\.(\d+)\.(w[123])\.(lora_[AB])\.weight", name)
    if expert is None:
        return whole[name]
    prefix, number, kind, side = expert[1], int(expert[2]), expert[3], expert[4]
    stacked = whole[f"{prefix}.mlp.experts.{'' if kind == 'w2' else 'base_layer.'}{side}.weight"]
    if side == "lora_A":
        return stacked.unflatten(0, (num_experts, -1))[number].split(rank)[kind == "w3"]
    rows = stacked.unflatten(1, (-1, num_experts))[..., number]
    return rows if kind == "w2" else rows.chunk(2)[kind == "w3"].split(rank, 1)[kind == "w3"]


def peft_log_probs(model: Any) -> list[torch.Tensor]:
    """Return the log-probs of the rows of `share`, computed one by one."""
    tokens = torch.randint(0, VOCAB, (int(LENGTHS.sum()),), generator=torch.Generator().manual_seed(7))
    found = []
    for row in tokens.split(LENGTHS.tolist()):
        log_probs = model(row[None]).logits[0, 1:-1].log_softmax(-1)
        found.append(log_probs.gather(1, row[2:, None])[:, 0])
    return found
