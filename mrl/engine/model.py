"""Megatron models of a family: GPTModel chunks that return hidden states, with a vocabulary or score head.

The model never computes logits: `vocab_head` turns hidden states into log-probs in chunks.
"""

from __future__ import annotations

import mrl.engine.with_megatron  # noqa: F401

# isort: split
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from mrl.config.lora import LoraConfig
from mrl.dtypes import torch_dtype
from mrl.engine.expert_biases import activation, separate_outputs
from mrl.engine.latent_attention import set_frequencies
from mrl.engine.layer_spec import block_spec, has_transformer_engine
from mrl.engine.packed_params import packed_params
from mrl.engine.packed_rows import MicroBatch
from mrl.engine.parallel import ParallelGroups
from mrl.engine.separate_norms import separate_norms
from mrl.errors import EngineError
from mrl.models.megatron_arguments import fused_kernels, gpt_model_arguments, transformer_arguments
from mrl.models.parameters import padded_vocab
from mrl.models.spec import ModelSpec
from mrl.models.table import Head


@dataclass(frozen=True)
class ModelRequest:
    """Model to build, with its head, its dtype and the user's Megatron settings."""

    spec: ModelSpec
    head: Head
    dtype: str
    megatron: dict[str, Any]
    lora: LoraConfig | None = None
    """Adapters that linear layers will get. They read the output of the norm in front of the layer."""


def transformer_config(request: ModelRequest, groups: ParallelGroups) -> TransformerConfig:
    """Return Megatron's configuration of the model in this layout, with the user's settings.

    The user's settings never replace those of the model's file or of the layout: `config` refuses such keys.
    """
    parallel, dtype = groups.parallel, torch_dtype(request.dtype)
    if has_transformer_engine() and parallel.cp > 1 and request.spec.sliding_window:
        feature = f"a sliding window of {request.spec.sliding_window} tokens with cp={parallel.cp}"
        raise EngineError(f"Transformer Engine's fused attention does not support {feature}", fix="set parallel.cp=1")
    if request.spec.sinks and groups.device.type == "cuda" and not has_transformer_engine():
        what = f"{request.spec.family} has sinks in its softmax, which torch's attention on GPUs has not"
        raise EngineError(what, fix="install Transformer Engine: make install-cuda")
    settings = transformer_arguments(request.spec) | activation(request.spec)
    settings |= {
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "virtual_pipeline_model_parallel_size": parallel.vpp if parallel.vpp > 1 else None,
        "num_layers_in_first_pipeline_stage": parallel.first_stage_layers,
        "num_layers_in_last_pipeline_stage": parallel.last_stage_layers,
        "context_parallel_size": parallel.cp,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.etp,
        "sequence_parallel": parallel.sequence_parallel,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "use_cpu_initialization": groups.device.type == "cpu",
        "perform_initialization": False,
        # The cache serves 8-bit weights only. Without it, fused gradients of the first micro-batch are added, too.
        "disable_parameter_transpose_cache": True,
        # Micro-batches differ in length, so stages exchange shapes.
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        # With two stages both neighbors are the same rank. Only unbatched messages keep their order then.
        "batch_p2p_comm": False,
        "overlap_p2p_comm": parallel.vpp > 1,
        # The loss is a share of the global batch already: Megatron must not divide it by the number of
        # micro-batches or multiply it by the context parallel size, or average gradients over ranks.
        "calculate_per_token_loss": True,
    }
    fused = (
        fused_kernels(request.spec, request.lora)
        if has_transformer_engine()
        else {"gradient_accumulation_fusion": False}
    )
    for name, value in request.megatron.items():
        if name in settings and value != settings[name]:
            raise EngineError(
                f"megatron.{name}={value} contradicts {settings[name]}, set by the model's config.json or by mrl",
                fix="remove this key",
            )
    kind = MLATransformerConfig if request.spec.mla else TransformerConfig
    return kind(**settings | fused | request.megatron)


class TokenModel(GPTModel):  # type: ignore[misc]  # Megatron's class has no type information here
    """A chunk of the model. Its last stage returns hidden states [1, tokens, hidden] instead of logits."""

    def __init__(self, request: ModelRequest, config: TransformerConfig, groups: ParallelGroups, chunk: int) -> None:
        vpp, spec = groups.parallel.vpp, request.spec
        is_first, is_last = groups.is_first_stage and chunk == 0, groups.is_last_stage and chunk == vpp - 1
        arguments = gpt_model_arguments(spec)
        if request.head == "score":
            arguments["share_embeddings_and_output_weights"] = False
        number = chunk if vpp > 1 else None
        fused = config.gradient_accumulation_fusion
        # Transformer Engine's layers need no Apex. Megatron's output layer would need it, but is never used here.
        if has_transformer_engine():
            config.gradient_accumulation_fusion = False
        layers = block_spec(config, number)
        if request.lora is not None and has_transformer_engine():
            separate_norms(layers)
        super().__init__(
            config=config,
            transformer_layer_spec=layers,
            vocab_size=padded_vocab(spec.vocab, groups.parallel.tp),
            pre_process=is_first,
            post_process=is_last,
            parallel_output=True,
            vp_stage=number,
            **arguments,
        )
        config.gradient_accumulation_fusion = fused
        for layer in self.decoder.modules():
            if hasattr(layer, "fuse_wgrad_accumulation"):  # layers of Transformer Engine
                layer.fuse_wgrad_accumulation = fused
            if hasattr(layer, "token_dispatcher"):
                _forget_routing(layer.token_dispatcher)
        separate_outputs(self.decoder)
        frequencies = spec.rope.inverse_frequencies().to(groups.device)
        if spec.mla:
            set_frequencies(self.decoder, frequencies)
        else:
            self.rotary_pos_emb.inv_freq = frequencies
        # Megatron makes a router's weights on the CPU and moves them in its first forward pass: too late for loading.
        self.to(groups.device)
        self.head, self.vocab = request.head, spec.vocab
        self.sequence_parallel = config.sequence_parallel
        if is_last and request.head == "lm":
            self.output_layer.forward = _pass_through
        elif is_last:
            self.output_layer: Any = _PassThrough()
            self.add_score_head(groups.device)

    def add_score_head(self, device: torch.device) -> None:
        config = self.config
        self.score = _ScoreHead(config.hidden_size, 1, bias=False, dtype=config.params_dtype, device=device)

    def run(self, batch: MicroBatch) -> Tensor:
        """Return the hidden states of the micro-batch; on the last stage for all its tokens [1, tokens, hidden]."""
        hidden: Tensor = self(batch.tokens, None, None, packed_seq_params=packed_params(batch))
        return hidden

    def head_input(self, hidden_1TH: Tensor, places: Tensor) -> Tensor:
        """Return the hidden states at these places [places, hidden], as input of the head.

        With a vocabulary head split over tensor ranks, each rank has a part of the gradient, which is summed here. A
        score head and its gradient are identical on all tensor ranks.
        """
        split_head = self.head == "lm"
        if self.sequence_parallel:
            hidden_1TH = gather_from_sequence_parallel_region(
                hidden_1TH.transpose(0, 1), tensor_parallel_output_grad=split_head
            ).transpose(0, 1)
        elif split_head:
            hidden_1TH = copy_to_tensor_model_parallel_region(hidden_1TH)
        return hidden_1TH[0, places]

    def vocabulary_weight(self) -> Tensor:
        """Return this tensor rank's rows of the output matrix, which may be the embedding."""
        if self.share_embeddings_and_output_weights:
            weight: Tensor = self.shared_embedding_or_output_weight()
            return weight
        weight = self.output_layer.weight
        return weight


class _ScoreHead(torch.nn.Linear):
    """Multiplies in float32 for any dtype of the weights: bfloat16 would round scores to ties."""

    def forward(self, hidden_SH: Tensor) -> Tensor:
        return torch.nn.functional.linear(hidden_SH.float(), self.weight.float())[:, 0]


def _forget_routing(dispatcher: Any) -> None:
    """Make a dispatcher of Megatron drop the probabilities of experts once it has combined their outputs.

    They would hold the graph of their layer, with its input and gradients, until the layer runs again: 2.2 GiB for the
    47 layers of a stage of a 235B mixture with recomputation.
    """
    combine = dispatcher.combine_postprocess

    def combine_and_forget(tokens: Tensor) -> Tensor:
        dispatcher.probs = None
        combined: Tensor = combine(tokens)
        return combined

    dispatcher.combine_postprocess = combine_and_forget


def _pass_through(hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    return hidden, None


class _PassThrough(torch.nn.Module):
    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return hidden, None


def build_chunks(request: ModelRequest, config: TransformerConfig, groups: ParallelGroups) -> list[TokenModel]:
    """Build this rank's chunks. Their weights are loaded later."""
    return [TokenModel(request, config, groups, chunk) for chunk in range(groups.parallel.vpp)]
