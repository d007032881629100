"""A plain transformers model as a rollout engine: slow and simple, the reference for vLLM.

It draws noise like vLLM's sampler, so that equal seeds give equal tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from mrl.config.arithmetic import mask_width
from mrl.errors import RolloutError
from mrl.models.families import FAMILIES
from mrl.models.hf_config import HfConfig
from mrl.models.mla import set_latent_epsilon
from mrl.models.stored import as_in_files
from mrl.rollout.engine import EngineSettings, FreeMemory, Part, RolloutEngine
from mrl.rollout.requests import Generated, GenerationRequest, Sampling
from mrl.rollout.sampling_mask import mask_of
from mrl.weight_sync.digest import Digests
from mrl.weight_sync.ipc import IpcReceiver, socket_path


@dataclass
class RowState:
    request: GenerationRequest
    sampling: Sampling
    noise: torch.Generator
    cache: DynamicCache
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    likeliest: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Log-probs and ids of the tokens that may be in the mask, for each token."""


class TransformersEngine(RolloutEngine):
    """Computes each row separately."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self.full_tensor_reason = "a transformers model has no fused tensors"
        if "quantization_config" in HfConfig.read(settings.model):
            fix = "rollout.engine=vllm, or use the full-precision model"
            raise RolloutError("this engine does not load quantized models", where=str(settings.model), fix=fix)
        dtype = getattr(torch, settings.dtype)
        self.model: Any = AutoModelForCausalLM.from_pretrained(settings.model, dtype=dtype).to(settings.device)
        set_latent_epsilon(self.model)
        self._tokenizer: Any = None
        if settings.reads_text:
            self._tokenizer = AutoTokenizer.from_pretrained(settings.model, local_files_only=True)
        self._ipc = IpcReceiver(socket_path(settings.sockets, settings.replica, 0))
        self._rows: dict[str, RowState] = {}

    def close(self) -> None:
        self._ipc.close()

    def _start(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> None:
        for request in requests:
            noise = torch.Generator(self.settings.device).manual_seed(request.seed)
            self._rows[request.key] = RowState(request, sampling, noise, self._new_cache())

    @torch.inference_mode()
    def _step(self) -> list[Generated]:
        finished = []
        for row in list(self._rows.values()):
            self._extend(row)
            stopped = row.token_ids[-1] in row.sampling.stop_token_ids or self._has_stop(row)
            if stopped or len(row.token_ids) == row.request.max_tokens:
                del self._rows[row.request.key]
                finished.append(self._generated(row, stopped))
        return finished

    def _has_stop(self, row: RowState) -> bool:
        stops = (*row.sampling.stop, *row.request.stop)
        if not stops:
            return False
        text = self._tokenizer.decode(row.token_ids)
        return any(stop in text for stop in stops)

    def _extend(self, row: RowState) -> None:
        all_ids = [*row.request.prompt_ids.tolist(), *row.token_ids]
        new = all_ids[row.cache.get_seq_length() :]  # after a change of weights, possibly all of them
        output = self.model(torch.tensor([new], device=self.settings.device), past_key_values=row.cache)
        log_probs = sampled_log_probs(output.logits[0, -1], row.sampling)
        noise = torch.empty_like(log_probs).exponential_(generator=row.noise)
        token = int((log_probs.exp() / noise).argmax())
        row.token_ids.append(token)
        row.log_probs.append(float(log_probs[token]))
        if row.sampling.keeps_mask:
            row.likeliest.append(log_probs.topk(mask_width(row.sampling.top_k, self.settings.vocab)))

    def _generated(self, row: RowState, stopped: bool) -> Generated:
        token_ids, log_probs = np.asarray(row.token_ids, np.int32), np.asarray(row.log_probs, np.float32)
        _, version = self.unfinished[row.request.key][0]
        key, mask = row.request.key, None
        if row.likeliest:
            log_probs_TM, ids_TM = (torch.stack(parts).cpu().numpy() for parts in zip(*row.likeliest, strict=True))
            mask = mask_of(key, token_ids, ids_TM, log_probs_TM, self.settings.vocab)
        return Generated(key, token_ids, log_probs, "stop" if stopped else "length", version, sampling_mask=mask)

    def _abort(self, keys: Iterable[str]) -> None:
        for key in keys:
            del self._rows[key]

    def _receive_weights(self, version: int, *, keeps_cache: bool) -> None:
        try:
            self._ipc.reply(self._load(version))
            if not keeps_cache:
                self._drop_cache()
        except RolloutError as error:
            self._ipc.reject(str(error))
            raise

    def _load(self, version: int) -> dict[str, str]:
        tensors: dict[str, Tensor] = {}
        digests = Digests()
        for bucket in self._ipc.buckets():
            if bucket.version != version:
                raise RolloutError(f"the trainer sends version {bucket.version} instead of version {version}")
            for name, tensor in bucket.tensors.items():
                tensors[name] = tensor.clone()
                digests.add(name, tensors[name])
        stored = FAMILIES[self.model.config.model_type].stored
        tensors = as_in_files(tensors, stored, getattr(self.model.config, "num_experts", 0))
        model, report = type(self.model).from_pretrained(
            None, state_dict=tensors, config=self.model.config, dtype=self.model.dtype, output_loading_info=True
        )
        for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if report[key]:
                raise RolloutError(f"{key.replace('_', ' ')} among the tensors: {sorted(report[key])[:5]}")
        set_latent_epsilon(model)
        self.model = model.to(self.settings.device)
        return digests.read()

    def _num_written(self) -> Mapping[str, int]:
        return {key: len(row.token_ids) for key, row in self._rows.items()}

    def _new_cache(self) -> DynamicCache:
        """Return an empty cache. Linear attention needs the kinds of the layers to keep its states."""
        kinds = getattr(self.model.config.get_text_config(), "layer_types", None) or ()
        return DynamicCache(config=self.model.config) if "linear_attention" in kinds else DynamicCache()

    def _drop_cache(self) -> None:
        for row in self._rows.values():
            row.cache = self._new_cache()

    def _sleep(self) -> None:
        self._drop_cache()

    def _wake(self, part: Part) -> list[FreeMemory]:
        return []


def sampled_log_probs(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return log-probs of the sampling distribution: at this temperature, over the tokens left by top-k and top-p."""
    scaled = logits.float() / sampling.temperature
    ordered, order = scaled.sort(descending=True)
    if sampling.top_k:
        ordered[sampling.top_k :] = -torch.inf
    probs = ordered.softmax(-1)
    # A token stays if the tokens before it sum up to less than top_p; the likeliest token always stays.
    ordered[probs.cumsum(-1) - probs >= sampling.top_p] = -torch.inf
    return torch.full_like(scaled, -torch.inf).scatter(0, order, ordered).log_softmax(-1)
