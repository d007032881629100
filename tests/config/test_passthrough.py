"""Passed-on keys: checked names if the libraries are installed, otherwise a visible warning."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mrl.config.libraries import installed
from mrl.config.resolved.load import load_config
from mrl.errors import ConfigError

OVERRIDES = ["actor.megatron.recompute_num_layers=1", "rollout.vllm={enforce_eager: true, max_num_seqs: 8}"]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    installed._installed_sources.cache_clear()
    yield
    installed._installed_sources.cache_clear()


def test_without_the_libraries_nothing_is_silent(
    valid: str, write: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert load_config(write(valid), OVERRIDES).warnings[:3] == (
        "the 1 keys of actor.megatron: TransformerConfig of megatron is not found on this machine",
        "the 1 keys of actor.optimizer: OptimizerConfig of megatron is not found on this machine",
        "the 2 keys of rollout.vllm: AsyncEngineArgs of vllm is not found on this machine",
    )


def test_what_mrl_sets_is_refused_without_the_libraries(
    valid: str, write: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"rollout\.vllm\.trust_remote_code: set by mrl"):
        load_config(write(valid), ["rollout.vllm.trust_remote_code=true"])


@pytest.mark.parametrize(
    "source", ["class Other: pass\n", "class TransformerConfig(Moved):\n    x: int = 1\n"], ids=["class", "base"]
)
def test_a_class_that_has_moved_is_a_warning(
    source: str, tmp_path: Path, valid: str, write: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in installed.TRANSFORMER.files:
        write(source, f"megatron/{file}")
    monkeypatch.setattr(installed, "_installed_file", lambda package, file: tmp_path / package / file)
    resolved = load_config(
        write(valid.replace("  optimizer: {lr: 1e-6}\n", "")), ["actor.megatron.recompute_num_layers=1"]
    )
    assert (
        "the 1 keys of actor.megatron: TransformerConfig of megatron is not found on this machine" in resolved.warnings
    )


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("actor.ddp.nccl_ub=true", "True is refused: memory that is moved off the device between phases returns at"),
        ("actor.ddp.use_distributed_optimizer=false", "False is refused: it must be True"),
        ("actor.ddp.use_megatron_fsdp=true", "True is refused: it is for Megatron's FSDP"),
        ("actor.optimizer.optimizer=muon", "muon is refused: it must be adam: Megatron's other optimizers need whole"),
        ("actor.optimizer.optimizer_cpu_offload=true", "True is refused: Megatron copies through CUDA streams"),
        ("actor.megatron.cuda_graph_impl=local", "local is refused: memory that is moved off the device"),
        ("actor.megatron.moe_router_bias_update_rate=0.001", "set by actor.router_bias_update_rate"),
        ("actor.megatron.hidden_dropout=0.1", "0.1 is refused: log-probs would not be those of the policy"),
        ("actor.megatron.calculate_per_token_loss=false", "set by mrl, to true"),
        ("actor.megatron.layernorm_epsilon=0.01", "set by the model's config.json (remove this key)"),
        ("actor.megatron.fp8=hybrid", "hybrid is refused: training in 8 or 4 bits has not been tested"),
        ("actor.megatron.moe_token_dispatcher_type=flex", "set by mrl, to alltoall"),
        (
            "actor.megatron.recompute_modules=[mlp, layernorm]",
            "['mlp', 'layernorm'] is refused: it must be core_attn or",
        ),
        ("rollout.vllm.logprobs_mode=raw_logprobs", "set by mrl, to processed_logprobs: ratios need"),
        ("rollout.vllm.load_format=auto", "set by mrl: the trainer sends weights"),
        ("rollout.vllm.enable_return_routed_experts=true", "True is refused: use algorithm.router_replay=R3"),
        ("rollout.vllm.kv_transfer_config={kv_role: kv_both}", "{'kv_role': 'kv_both'} is refused: cached data"),
    ],
)
def test_what_would_break_a_promise_is_refused_with_its_reason(
    override: str, reason: str, valid: str, write: Callable[..., str]
) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(write(valid), [override])
    assert f"{override.partition('=')[0]}: {reason}" in str(error.value)


@pytest.mark.parametrize(
    "override",
    [
        "actor.ddp={overlap_grad_reduce: true, use_distributed_optimizer: true, nccl_ub: false}",
        "actor.megatron={moe_aux_loss_coeff: 0.0, cuda_graph_impl: none, hidden_dropout: 0.0}",
        "actor.optimizer={lr: 1e-6, optimizer: adam, fp16: false, loss_scale: null}",
    ],
)
def test_what_is_refused_may_be_switched_off(override: str, valid: str, write: Callable[..., str]) -> None:
    load_config(write(valid), [override])


TARGETS = {
    "megatron": {
        # The class for multi-latent attention has the fields of the other one, too.
        "megatron.core.transformer.transformer_config": replace(
            installed.TRANSFORMER, class_name="MLATransformerConfig"
        ),
        "megatron.core.distributed": installed.DDP,
        "megatron.core.optimizer": installed.OPTIMIZER,
    },
    "vllm": {"vllm.engine.arg_utils": installed.ENGINE},
}


@pytest.mark.slow
@pytest.mark.parametrize("package", TARGETS)
def test_names_read_from_the_source_are_those_of_the_class(package: str) -> None:
    program = "import dataclasses, importlib\n" + "".join(
        f"cls = importlib.import_module({module!r}).{target.class_name}\n"
        "print('fields', *[field.name for field in dataclasses.fields(cls)])\n"
        for module, target in TARGETS[package].items()
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    real = [set(line.split()[1:]) for line in printed.stdout.splitlines() if line.startswith("fields ")]
    for target, names in zip(TARGETS[package].values(), real, strict=True):
        assert set(installed.field_types(target) or ()) == names
        assert set(target.owned) <= names, "what mrl says it sets is there to be set"
