"""A causal language model of transformers as one module that turns packed rows into scores, sharded over the ranks.

The root's forward calls the model and then mrl's head, because torch holds the embedding and the output matrix whole
only during that forward. The model stays in evaluation mode: mrl trains without dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from mrl.engine.packed_rows import MicroBatch
from mrl.engine.scores import ScoreRequest, score
from mrl.errors import ModelError
from mrl.fsdp import attention
from mrl.fsdp.attention import PackedRows
from mrl.fsdp.parallel import ShardGroups
from mrl.models.mla import set_latent_epsilon
from mrl.models.table import Head

OTHER = "use another model, or strategy=megatron if the family has a table"


@dataclass(frozen=True)
class Build:
    """A model to build from the `config.json` of its directory."""

    path: Path
    head: Head
    compute: torch.dtype
    """Dtype of activations and gathered weights."""
    stored: torch.dtype
    """Dtype of the model's shards: float32 if they are trained."""
    recompute: bool = False
    """Whether backward computes each layer again."""
    attach: Callable[[RowModel], None] | None = None
    """Adds parameters in float32 before the model is sharded, and freezes the others."""


@dataclass(frozen=True)
class OwnGroups:
    tp: dist.ProcessGroup
    cp: dist.ProcessGroup


class RowModel(torch.nn.Module):
    """Scores of a micro-batch, as tensors by name. `rows` is what all attention layers read."""

    def __init__(self, causal: Any, head: Head, groups: ShardGroups) -> None:
        super().__init__()
        self.causal, self.head, self.vocab = causal, head, int(causal.config.vocab_size)
        self.pg_collection = OwnGroups(groups.tp, groups.cp)
        self.rows = PackedRows(groups.cp)
        self.applies_adapters = True
        """Whether the adapters are added, if there are any."""
        self._scale = _logit_scale(causal.config)
        if head == "score":
            self.score_head = _ScoreHead(causal.config.hidden_size, 1, bias=False, device="meta")
        for module in causal.modules():
            module.packed_rows = self.rows

    @property
    def base(self) -> Any:
        return getattr(self.causal, self.causal.base_model_prefix, None) or self.causal.model

    def alone(self, tokens: Tensor) -> Tensor:
        """Return log-probs, or hidden states for a score head, as the model's own forward computes them for one row."""
        found: Tensor = self(tokens, None)["alone"]
        return found

    def forward(self, batch: MicroBatch | Tensor, request: ScoreRequest | None) -> dict[str, Tensor]:
        """Return the scores of a micro-batch; its hidden states without a request."""
        if isinstance(batch, Tensor):
            return {"alone": self._alone(batch)}
        self.rows.segments = batch.segments
        at = _positions(batch)
        hidden_1TH = self.base(input_ids=batch.tokens, position_ids=at[None], use_cache=False).last_hidden_state
        if request is None:
            return {"hidden": hidden_1TH}
        scores = score(self, batch, hidden_1TH, request)
        return {name: x for name in scores.__dataclass_fields__ if (x := getattr(scores, name)) is not None}

    def _alone(self, tokens: Tensor) -> Tensor:
        if self.head == "score":
            hidden: Tensor = self.base(input_ids=tokens, use_cache=False).last_hidden_state[0, :-1]
            return hidden
        logits = self.causal(input_ids=tokens, use_cache=False).logits[0, :-1].float()
        log_probs: Tensor = logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        return log_probs

    @property
    def score(self) -> Callable[[Tensor], Tensor]:
        return self.score_head

    def head_input(self, hidden_1TH: Tensor, places: Tensor) -> Tensor:
        hidden_SH = hidden_1TH[0, places]
        return hidden_SH if self._scale == 1 or self.head == "score" else hidden_SH * self._scale

    def vocabulary_weight(self) -> Tensor:
        weight: Tensor = self.causal.get_output_embeddings().weight
        return weight


class _ScoreHead(torch.nn.Linear):
    """Multiplies in float32 for any dtype of the weights: bfloat16 would round scores to ties."""

    def forward(self, hidden_SH: Tensor) -> Tensor:
        return torch.nn.functional.linear(hidden_SH.float(), self.weight.float())[:, 0]


def _positions(batch: MicroBatch) -> Tensor:
    """Return the position in its row of each token of this context rank."""
    ends = batch.ends.cpu().long()
    places = torch.from_numpy(batch.places)
    row = torch.searchsorted(ends, places, right=True) - 1
    return (places - ends[row]).to(batch.tokens.device)


def _logit_scale(config: Any) -> float:
    """Return the factor that a model multiplies its logits by."""
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        return 1 / float(divisor)
    return float(getattr(config, "logit_scale", None) or 1.0)


def build(request: Build, groups: ShardGroups) -> RowModel:
    """Build the model on this rank's device, sharded and without weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(request.path, local_files_only=True, trust_remote_code=False)
    config = config.get_text_config()
    _refuse(config)
    try:
        with _parameters_on_meta():
            causal = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME, dtype=torch.float32)
    except (KeyError, ValueError) as error:  # an attention that cannot be replaced
        what = f"transformers cannot build {config.model_type} with mrl's attention: {error}"
        raise ModelError(what, where=str(request.path), fix=OTHER) from error
    set_latent_epsilon(causal)
    if request.head == "score":
        causal.set_output_embeddings(None)
    model = RowModel(causal, request.head, groups)
    for module in causal.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None  # torch would drop the gradient of a token that is also an end token
    for parameter in model.parameters():
        parameter.data = parameter.data.to(request.stored)
    _refuse_parameters(model)
    if request.attach is not None:
        request.attach(model)
    layers = list(_layers(causal))
    if request.recompute:
        for layer in layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    _shard(model, layers, request, groups)
    model.to_empty(device=groups.device)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    return model.eval()


def _refuse(config: Any) -> None:
    """Refuse models whose logits the head of mrl does not compute."""
    for name in ("final_logit_softcapping", "logits_soft_cap"):
        if getattr(config, name, None) is not None:
            what = f"{config.model_type} caps its logits ({name}={getattr(config, name)}), which mrl's head does not"
            raise ModelError(what, fix=OTHER)


def _refuse_parameters(model: RowModel) -> None:
    """Refuse weights that cannot be sharded or are not to be trained, and an output matrix with a bias."""
    kind = model.causal.config.model_type
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            raise ModelError(f"{name} of {kind} is a single number, which torch does not shard", fix=OTHER)
        if not parameter.requires_grad:
            raise ModelError(f"{name} of {kind} is a weight that is not trained: not supported yet", fix=OTHER)
    head = model.causal.get_output_embeddings()
    if head is not None and getattr(head, "bias", None) is not None:
        raise ModelError(f"the output matrix of {kind} has a bias, which mrl's head does not add", fix=OTHER)


def _layers(causal: Any) -> Iterator[torch.nn.Module]:
    """Yield the layers, by the names that the class of the model gives."""
    names = set(causal._no_split_modules or ())
    found = [module for module in causal.modules() if type(module).__name__ in names]
    if not found:
        raise ModelError(f"{type(causal).__name__} does not name its layers (_no_split_modules)")
    yield from found


def _shard(model: torch.nn.Module, layers: list[torch.nn.Module], request: Build, groups: ShardGroups) -> None:
    is_mixed = request.compute != request.stored or (request.attach is not None and request.compute != torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=request.compute if is_mixed else None, reduce_dtype=torch.float32)
    for module in (*layers, model):
        fully_shard(module, mesh=groups.shards, mp_policy=policy)
        sharded = cast(FSDPModule, module)
        # The loss is a share of the global batch, so gradients are sums over the ranks, never means.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Create parameters without memory, and buffers with their values, which no file has."""
    register = torch.nn.Module.register_parameter

    def on_meta(self: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = torch.nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    torch.nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]
