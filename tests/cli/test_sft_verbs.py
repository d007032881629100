"""The verbs that read a configuration also accept one of `mrl sft`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mrl.cli.main import main
from mrl.config.resolved.load import load_config, load_config_of
from mrl.demo.model import make_model
from mrl.plan.machine_memory import machine_plan_input, plan_machine
from mrl.plan.memory import role_stages, update_phase
from mrl.plan.plan_input import make_plan_input
from mrl.preflight.data import check_data, check_models

ROOT = Path(__file__).parents[2]
SFT, PPO = str(ROOT / "configs" / "laptop-sft.yaml"), str(ROOT / "configs" / "laptop-ppo.yaml")
DPO = str(ROOT / "configs" / "laptop-dpo.yaml")
GPUS = ["cluster={devices_per_node: 8, device: gpu}", "placement.pools.laptop=8", "actor.dtype=bfloat16"]
LARGE = ["--model", "meta-llama/Llama-3.1-8B"]

pytestmark = pytest.mark.needs


def test_explain_and_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", SFT]) == 0
    explained = capsys.readouterr().out
    assert "longest row      max_prompt_tokens 256 + max_response_tokens 64  320 tokens" in explained
    assert "samples per update and data-parallel rank  rows_per_update 64 / dp 2" in explained
    assert "rollout" not in explained
    assert main(["check", SFT, "--offline"]) == 0
    assert "ok    batch: 64 rows per update\n" in capsys.readouterr().out


@pytest.mark.parametrize("where", ["slurm", "ray"])
def test_launch_runs_mrl_sft(
    where: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    site = ["--cluster", "launch/cluster-example.yaml"] if where == "slurm" else ["--address", "http://nowhere"]
    overrides = [f"run.dir={tmp_path}", "cluster.allow_insecure_ray=true"]
    assert main(["launch", where, *site, "--dry-run", SFT, *overrides]) == 0
    printed = capsys.readouterr().out
    assert ("--verb sft " if where == "slurm" else "-- mrl sft config.yaml ") in printed
    assert main(["launch", where, *site, "--dry-run", "--verb", "check", SFT, *overrides]) == 0
    assert ("--verb check " if where == "slurm" else "-- mrl check ") in capsys.readouterr().out


def test_the_plan_is_that_of_the_actor_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """The plan equals PPO's plan of the same actor, alone on its devices."""
    preset = str(ROOT / "configs" / "ppo-llama3.1-70b-8n8g.yaml")
    rl = make_plan_input(load_config(preset), None)
    actor, tokens = rl.config.actor, rl.config.rollout.max_prompt_tokens + rl.config.rollout.max_response_tokens
    rows = rl.config.batch.samples_per_update
    overrides = [
        f"cluster={{nodes: {rl.config.cluster.nodes}, devices_per_node: 8, device: gpu, ray_address: auto}}",
        f"placement.pools.laptop={sum(rl.config.placement.pools.values())}",
        f"batch={{rows_per_update: {rows}, max_prompt_tokens: {tokens - 64}, max_response_tokens: 64}}",
        f"model.path={rl.config.model.path}",
        f"actor={{dtype: {actor.dtype}, max_tokens_per_device: {actor.max_tokens_per_device}}}",
        *(f"actor.parallel.{axis}={getattr(actor.parallel, axis)}" for axis in ("tp", "pp", "cp")),
        f"actor.parallel.sequence_parallel={str(actor.parallel.sequence_parallel).lower()}",
    ]
    sft = load_config_of("sft", SFT, overrides)
    settings = {"megatron": actor.megatron, "optimizer": actor.optimizer, "ddp": actor.ddp}
    same = replace(sft.config, actor=replace(sft.config.actor, **settings, parallel=actor.parallel))
    update = update_phase(make_plan_input(replace(sft, config=same), None))
    assert update.num_bytes == max(role.alone_bytes for role in role_stages(rl, "actor"))
    assert main(["plan", SFT, *GPUS, *LARGE]) == 0
    assert "It fits: free " in capsys.readouterr().out
    assert main(["plan", SFT, *GPUS, *LARGE, "actor.max_tokens_per_device=65536"]) == 2
    assert "actor.max_tokens_per_device" in capsys.readouterr().out
    assert main(["plan", SFT, *GPUS, *LARGE, "--search"]) == 2
    assert "are for configurations of `mrl train`" in capsys.readouterr().err


def test_a_machine_holds_the_ranks_their_work_and_a_checkpoint() -> None:
    model = "Qwen/Qwen2.5-0.5B-Instruct"
    config = load_config_of("sft", SFT).config
    plan = plan_machine(machine_plan_input(config, 0, model))
    ranks, checkpoint, _ = plan.processes
    assert (ranks.count, ranks.name) == (2, "actor")
    assert plan.min_bytes > 2 * ranks.held
    num_parameters = 494_032_768
    assert ranks.held > 16 * num_parameters // 2, "weights and gradients whole, the optimizer shared by two"
    assert checkpoint.most == pytest.approx(12 * num_parameters, rel=0.35)
    shorter = load_config_of("sft", SFT, ["actor.max_tokens_per_device=512"]).config
    assert plan_machine(machine_plan_input(shorter, 0, model)).max_bytes < plan.max_bytes


@pytest.mark.parametrize("reference", ["in_place", "once"])
def test_a_reference_in_place_takes_memory(reference: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It takes memory for its weights, and for the policy's weights while it replaces them."""
    model, once = "Qwen/Qwen2.5-0.5B-Instruct", reference == "once"
    config = load_config_of("dpo", DPO, [f"preference.reference={reference}"]).config
    without = load_config_of("dpo", DPO, ["preference={loss: simpo, sft_weight: 0}"]).config
    more = (
        plan_machine(machine_plan_input(config, 0, model)).processes[0].held
        - plan_machine(machine_plan_input(without, 0, model)).processes[0].held
    )
    num_bytes = 4 * 494_032_768
    assert more == (0 if once else pytest.approx(2 * num_bytes, rel=0.01))
    assert main(["explain", DPO, f"preference.reference={reference}"]) == 0
    explained = capsys.readouterr().out
    assert ("actor, reference (preference.reference: in_place) take turns" in explained) is not once
    assert ("The reference has no separate weights (preference.reference: once)" in explained) is once
    assert main(["plan", DPO, *GPUS, "--model", model, f"preference.reference={reference}"]) == 0
    host = f"{8 * num_bytes / 2**30:.1f} GiB on each machine: the reference's weights, and space for the policy's"
    assert ("Host: no reference weights." if once else f"Host: {host}") in capsys.readouterr().out


def test_the_rows_and_the_model_are_checked(tmp_path: Path) -> None:
    talk = [("user", "1+1?"), ("assistant", "2"), ("user", "2+2?"), ("assistant", "4")]
    rows = [{"talk": [{"role": role, "content": text} for role, text in talk]}] * 3
    rows.append({"talk": rows[0]["talk"][:3]})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = f"{{dataset: {tmp_path}/rows.jsonl, columns: {{data_source: null, ability: null, extra_info: null}}}}"
    overrides = [
        f"model.path={make_model(tmp_path / 'model', seed=1)}",
        f"data={{train: {{sums: null, talks: {source}}}, max_bad_rows: 1}}",
        "batch={rows_per_update: 4, messages: talk, loss_on: all}",
    ]
    config = load_config_of("sft", SFT, overrides).config
    (model,) = check_models(config)
    assert (model.verdict, model.about) == ("ok", "model of the actor")
    findings = list(check_data(config, all_rows=True))
    assert [(finding.verdict, finding.about) for finding in findings] == [
        ("ok", "tokenizer"),
        ("ok", "data.train.talks"),
        ("warn", "data.train.talks"),
        ("ok", "data.train"),
    ]
    assert "must end with a message of role assistant, not user" in findings[2].what
    short = load_config_of("sft", SFT, [*overrides, "batch.max_response_tokens=4"]).config
    (failed, *_) = [finding for finding in check_data(short, all_rows=False) if "max_response_tokens" in finding.what]
    assert failed.verdict == "fail"


@pytest.mark.slow
def test_the_layout_is_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model(tmp_path / "model", seed=1)
    assert main(["verify", "layout", SFT, f"model.path={model}", "actor.parallel.pp=2"]) == 0
    assert capsys.readouterr().out.startswith("actor: right on 2 ranks")


def test_a_run_that_cannot_fit_does_not_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    large = [*GPUS, "cluster.hardware=h100-80gb", f"run.dir={tmp_path}", "model.path=meta-llama/Llama-3.1-8B"]
    assert main(["sft", SFT, *large, "actor.max_tokens_per_device=65536"]) == 2
    refused = capsys.readouterr().err
    assert "an update takes " in refused
    assert "or set cluster.overfull=warn to start anyway" in refused
    assert not list(tmp_path.iterdir())
