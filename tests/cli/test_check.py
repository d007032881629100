"""`mrl check`: its findings on good and bad configurations, data, rewards and machines."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mrl.cli.main import main
from mrl.config import step_calls
from mrl.config.resolved.load import load_any_config, load_config
from mrl.config.schema import Config
from mrl.config.step_calls import STEP, TEACHER_LOG_PROB, TEACHER_TOP_K
from mrl.errors import ConfigError
from mrl.plan.record_size import record_size
from mrl.plan.rehearsed import remember
from mrl.preflight import machine
from mrl.preflight.findings import CheckResult, check_adapters, check_record, column_problems, refuse
from mrl.preflight.machine import check_disk, check_nodes, check_slurm
from mrl.preflight.node_facts import node_facts
from tests.hub import make_hub_cache

ROOT = Path(__file__).parents[2]
LAPTOP = str(ROOT / "configs" / "laptop-ppo.yaml")
REWARD_MODEL = (
    "reward_model={path: some/model, max_tokens_per_device: 512}",
    "placement.roles.reward_model=laptop",
)
TEACHER = (
    "teacher={path: some/model, max_tokens_per_device: 512}",
    "placement.roles.teacher=laptop",
)
INTERPOLATED = (
    "algorithm.old_log_probs=interpolated",
    "placement={pools: {laptop: 2, engines: 2}, roles: {rollout: engines}}",
)
HEAVY = ("torch", "ray", "vllm", "megatron", "transformers", "tensordict", "pyarrow", "numpy")
OFFLINE = f"""
import sys
from mrl.cli.main import main
code = main(["check", sys.argv[1], "--offline"])
loaded = [name for name in {HEAVY!r} if sys.modules.get(name)]
sys.exit(f"loaded: {{loaded}}" if loaded else code)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from mrl.demo.model import make_model

    return make_model(tmp_path_factory.mktemp("check") / "model", seed=1)


@pytest.fixture
def check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Function that runs `mrl check` in an empty directory and returns exit code and output."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str]:
        code = main(["check", *arguments])
        return code, capsys.readouterr().out

    return run


def small(model: Path) -> list[str]:
    return [LAPTOP, f"model.path={model}", "rollout.max_prompt_tokens=32", "rollout.max_response_tokens=32"]


def config_of(*overrides: str) -> Config:
    return load_config(LAPTOP, overrides).config


# --- the configuration alone ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["laptop-ppo", "laptop-dapo", "ppo-llama3.1-70b-8n8g"])
def test_offline_answers_soon_and_loads_nothing_heavy(name: str) -> None:
    def is_soon() -> bool:
        begin = os.times()
        arguments = [sys.executable, "-c", OFFLINE, str(ROOT / "configs" / f"{name}.yaml")]
        ran = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert " 0 fail" in ran.stdout
        end = os.times()
        # CPU time: 0.4 s on a quiet machine, and more than twice as long on a core that other work shares.
        return end.children_user + end.children_system - begin.children_user - begin.children_system < 2.0

    assert any(is_soon() for _ in range(3))


def test_a_wrong_configuration_is_the_error_of_loading(check: Callable[..., tuple[int, str]]) -> None:
    assert check(LAPTOP, "actor.parallel.tp=3", "--offline")[0] == 2


def test_a_configuration_that_was_never_rehearsed_is_named(
    check: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    large = str(ROOT / "configs/ppo-llama3.1-70b-8n8g.yaml")
    assert "skip  rehearsal: this configuration was never rehearsed" in check(large, "--offline")[1]
    remember(load_config(large, ["training.steps=3"]).config)
    assert "ok    rehearsal: the code of every kind of rank ran at full size on 20" in check(large, "--offline")[1]
    assert "never rehearsed" in check(large, "--offline", "actor.parallel.pp=4", "critic.parallel.pp=4")[1]


def test_a_pipeline_that_cannot_be_filled_is_warned_of(check: Callable[..., tuple[int, str]]) -> None:
    code, output = check(
        LAPTOP, "actor.parallel={tp: 1, pp: 4}", "batch.samples_per_update=2", "critic.parallel.tp=2", "--offline"
    )
    assert code == 0
    assert "warn  batch of the actor: 2 samples cannot fill a pipeline of 4 stages" in output


@pytest.mark.parametrize(
    ("override", "warned"),
    [
        ("run.name=two-updates", True),
        ("batch.samples_per_update=2048", False),
        ("algorithm.correction={}", False),
        ("algorithm.loss.policy=gspo", False),
    ],
)
def test_experts_trained_by_token_ratios_in_several_updates_are_warned_of(
    override: str, warned: bool, check: Callable[..., tuple[int, str]]
) -> None:
    preset = str(ROOT / "configs" / "grpo-qwen3-30b-a3b-2n8g.yaml")
    two_updates = ("batch.samples_per_update=1024", "algorithm.correction=null")
    _, output = check(preset, *two_updates, override, "--offline")
    assert ("warn  experts: 2 updates per step with ratios of single tokens" in output) == warned


@pytest.mark.parametrize(
    ("preset", "rate", "usual"),
    [
        ("grpo-qwen2.5-7b-lora-1n1g", "3e-6", "1e-05"),
        ("grpo-qwen2.5-7b-lora-1n1g", "4e-6", None),
        ("dpo-llama3.3-70b-lora-1n8g", "1e-6", "5e-06"),
        ("dpo-llama3.3-70b-lora-1n8g", "2e-6", None),
        ("grpo-qwen2.5-7b-1n8g", "1e-6", None),
    ],
)
def test_adapters_with_a_rate_for_all_weights_are_warned_of(preset: str, rate: str, usual: str | None) -> None:
    overrides = [f"actor.optimizer.lr={rate}"]
    config = load_any_config(str(ROOT / "configs" / f"{preset}.yaml"), overrides).config
    found = [finding.fix for finding in check_adapters(config)]
    expected = [] if usual is None else [f"actor.optimizer.lr={usual}, unless you have tried this one"]
    assert found == expected


@pytest.mark.parametrize(
    ("overrides", "verdict", "part"),
    [
        ((), "", ""),
        (("training.record.steps=[1, 2]",), "ok", "a recorded step has at most "),
        (("training.record.every=1",), "warn", ": more than training.record.max_bytes=10000000000"),
        (("training.record_when={actor/grad_norm: {max: 9}}",), "ok", "and the limit allows "),
        (("training.record={steps: [1], max_bytes: 1000}",), "warn", "1 steps "),
    ],
)
def test_the_size_of_records_is_shown_before(overrides: tuple[str, ...], verdict: str, part: str) -> None:
    config = load_any_config(str(ROOT / "configs" / "grpo-qwen2.5-7b-1n8g.yaml"), list(overrides)).config
    found = list(check_record(config))
    assert [finding.verdict for finding in found] == [verdict] * bool(verdict)
    assert all(part in finding.what for finding in found)


def test_gradients_and_activations_make_a_record_larger() -> None:
    preset = str(ROOT / "configs" / "grpo-qwen2.5-7b-1n8g.yaml")
    choices = ("{}", "{gradients: true}", "{gradients: true, activations: true}")
    sizes = [record_size(load_config(preset, [f"training.record={choice}"]).config) for choice in choices]
    assert sizes[0] < sizes[1] < sizes[2]


def test_memory_that_does_not_suffice_comes_with_what_would(check: Callable[..., tuple[int, str]]) -> None:
    preset = str(ROOT / "configs" / "ppo-llama3.1-70b-8n8g.yaml")
    code, output = check(preset, "--offline")
    assert code == 0
    assert "ok    memory: " in output
    tight = (preset, "rollout.vllm.gpu_memory_utilization=0.95", "--offline")
    code, output = check(*tight, "cluster.overfull=warn")
    assert code == 0
    assert "warn  memory: " in output
    code, output = check(*tight)
    assert code == 2
    assert "fail  memory: " in output
    fix = output.partition("fail  memory: ")[2].partition("fix: ")[2].partition("\n")[0]
    assert check(preset, "rollout.vllm.gpu_memory_utilization=0.95", *fix.split(), "--offline")[0] == 0
    code, output = check(preset, "model.path=some/model", "--offline")
    assert code == 0
    assert 'skip  memory: "some/model" is not a directory' in output


# --- columns ----------------------------------------------------------------------------------------------------


def test_workers_register_the_calls_of_the_table() -> None:
    from mrl.controller.worker import registered_methods
    from mrl.workers.actor import ActorRolloutRefWorker
    from mrl.workers.critic import CriticWorker
    from mrl.workers.frozen import ReferenceWorker, RewardModelWorker, TeacherWorker

    workers = {"actor": ActorRolloutRefWorker, "critic": CriticWorker}
    workers |= {"reference": ReferenceWorker, "reward_model": RewardModelWorker, "teacher": TeacherWorker}
    for role, worker in workers.items():
        registered = {name: spec for name, spec in registered_methods(worker).items() if spec.reads}
        registered.pop("probe")  # before the first step, for a model that has just been loaded
        registered.pop("compute_own_log_prob", None)  # instead of the call's method, for another tokenizer
        own = (TEACHER_LOG_PROB, TEACHER_TOP_K) if role == "actor" else ()  # the policy may be its own teacher
        made = [call for call in STEP if call.role == role or call in own]
        calls = {call.method: (call.reads, call.writes, call.optional) for call in made}
        assert {name: (spec.reads, spec.writes, spec.optional) for name, spec in registered.items()} == calls


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("algorithm.kl.where=loss", "batch.samples_per_update=32"),
        ("algorithm.correction={}", "batch.samples_per_update=32"),
        ("algorithm.advantage=remax", "critic=null", "placement.roles.critic=null"),
        (*REWARD_MODEL, "reward.functions.answer=null"),
        ("algorithm.old_log_probs=engine", "algorithm.kl.where=loss"),
        (*INTERPOLATED, "algorithm.kl.where=loss", "asynchrony.ahead=1", "algorithm.correction={}"),
        *((*TEACHER, f"algorithm.distillation.form={form}") for form in ("advantage", "top_k", "full")),
        ("algorithm.distillation={form: top_k, context: 'Answer {prompt}'}",),
        (
            *TEACHER,
            "algorithm.distillation.form=sampled",
            "batch.samples_per_update=32",
            "reward.functions.answer=null",
        ),
    ],
)
def test_configurations_that_load_have_all_columns(overrides: tuple[str, ...]) -> None:
    assert column_problems(config_of(*overrides)) == []


def test_a_column_that_nobody_writes_is_named() -> None:
    config = config_of("algorithm.kl.where=both")
    without_critic = dataclasses.replace(config, critic=None)
    (problem,) = column_problems(without_critic)
    assert problem.startswith(
        "compute_advantages needs `values`, but no earlier call writes it; columns available: old_log_probs"
    )


def test_a_column_that_is_not_declared_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    update = dataclasses.replace(step_calls.UPDATE_ACTOR, optional=())
    monkeypatch.setattr(step_calls, "STEP", (*step_calls.STEP[:-1], update))
    config = config_of("algorithm.advantage=grpo", "critic=null", "placement.roles.critic=null")
    assert column_problems(config) == ["update_actor needs `old_log_probs`, but does not declare it as read"]


# --- data and rewards -------------------------------------------------------------------------------------------


def test_everything_is_well(check: Callable[..., tuple[int, str]], model: Path, tmp_path: Path) -> None:
    code, output = check(*small(model))
    assert code == 0, output
    assert f"ok    model of the actor: {model}: qwen3, 1 files of 0.0 GiB" in output
    assert f"ok    model of the critic: {model}" in output
    assert "ok    tokenizer: 262 tokens" in output
    assert "ok    data.train.sums: 8100 rows, 262 checked: prompts of 9 to 9 tokens" in output
    assert "ok    rewards of data.train.sums: the correct answers, written as '20', score 1, 1, 1, 1" in output
    assert "ok    disk: " in output
    assert "ok    run directory: runs is visible" in output
    assert "memory: " in output
    assert " GiB of a machine's " in output
    assert "skip  Slurm" in output
    assert list(tmp_path.iterdir()) == [], "a check leaves nothing behind"


def test_the_form_that_a_reward_wants_is_found(check: Callable[..., tuple[int, str]], model: Path) -> None:
    _, output = check(*small(model), "reward.functions.answer.options.last_number=false")
    assert "written as '#### 20', score 1, 1, 1, 1" in output


def test_end_tokens_are_said_with_who_names_them(
    check: Callable[..., tuple[int, str]], model: Path, tmp_path: Path
) -> None:
    """The model's file and the tokenizer disagree on one end token and agree on the other."""
    other = tmp_path / "model"
    shutil.copytree(model, other)
    (other / "generation_config.json").write_text('{"eos_token_id": [65, 256]}')
    _, output = check(*small(other))
    assert "ok    end tokens: 65 'b' (only generation_config.json), 256 '<|end|>'" in output
    _, output = check(*small(other), "rollout.ignore_eos=true")
    assert "warn  end tokens: a response ends only at its maximum length" in output


def test_validation_is_checked_with_the_functions_that_score_it(
    check: Callable[..., tuple[int, str]], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "strict_rewards.py").write_text("def broken(sample):\n    raise KeyError(sample.data_source)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    sources = 'data.validation.held={dataset: "toy:addition", options: {part: validation}}'
    code, output = check(*small(model), sources, "validation.reward_functions.it.name=strict_rewards:broken")
    assert code == 2
    assert "fail  rewards of data.validation.held: 16 of 16 samples have no score: raised" in output
    assert "ok    rewards of data.train.sums" in output


def test_that_no_function_scores_is_said_once(check: Callable[..., tuple[int, str]], model: Path) -> None:
    sources = 'data.validation.held={dataset: "toy:addition", options: {part: validation}}'
    agent = "agent.environments.world={name: tools, tools: {calc: {name: calculator}}}"
    _, output = check(*small(model), sources, agent, "reward.functions.answer=null")
    assert output.count("there is no reward function") == 1


def test_what_asks_engines_of_the_run_is_left_out_and_the_rest_is_scored(
    check: Callable[..., tuple[int, str]], model: Path
) -> None:
    asking = "name: judge, options: {service: {max_tokens: 9}, template: '{response}'}"
    pool = ("cluster.devices_per_node=6", "placement.pools.judge=2", "placement.roles.judge=judge")
    given = (*small(model), f"judge.path={model}", *pool)
    _, output = check(*given, f"reward.functions.judged={{{asking}}}")
    assert "skip  rewards: judged: the judge's engines start with the run" in output
    assert "score 1, 1, 1, 1" in output
    assert f"ok    model of the judge: {model}" in output
    _, output = check(*given, "reward.functions.answer=null", f"reward.functions.judged={{{asking}}}")
    assert "rewards of data.train.sums" not in output, "nothing else scores it"
    assert "model of the judge: no/judge" in check(*given, "judge.path=no/judge", f"reward.functions.j={{{asking}}}")[1]


def test_the_users_own_manager_scores_here_too(
    check: Callable[..., tuple[int, str]], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_manager.py").write_text(
        "from mrl.rewards.manager import RewardManager\nfrom mrl.rewards.outcome import Score\n\n"
        "class Generous(RewardManager):\n"
        "    def score(self, samples):\n        return [Score(7.0, {}, 0.0)] * len(samples)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    _, output = check(*small(model), "reward.manager=own_manager:Generous")
    assert "score 7, 7, 7, 7" in output


def test_rewards_that_never_reward_are_warned_of_and_those_that_raise_fail(
    check: Callable[..., tuple[int, str]], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_rewards.py").write_text(
        "def never(sample, last_number):\n    return 0.0\n\n"
        "def broken(sample, last_number):\n    raise KeyError(sample.data_source)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    code, output = check(*small(model), "reward.functions.answer.name=own_rewards:never")
    assert code == 0
    assert "score 0, 0, 0, 0: none of them is rewarded" in output
    code, output = check(*small(model), "reward.functions.answer.name=own_rewards:broken")
    assert code == 2
    assert "fail  rewards of data.train.sums: 16 of 16 samples have no score: raised" in output
    assert check(*small(model), "reward.functions.answer.name=own_rewards:absent")[0] == 2


def test_a_data_source_that_nothing_scores_fails(check: Callable[..., tuple[int, str]], model: Path) -> None:
    code, output = check(*small(model), "reward.functions.answer.sources=[gsm8k]")
    assert code == 2
    assert 'data.train.sums: no function with a weight scores the data source "toy:addition"' in output
    code, output = check(*small(model), 'reward.functions.answer.sources=["toy:*", gsm8k]')
    assert code == 0
    assert 'warn  rewards: reward.functions.answer.sources: "gsm8k" matches no data source' in output
    assert "written as" in output


def test_bad_rows_long_prompts_and_ids_that_occur_twice(
    check: Callable[..., tuple[int, str]], model: Path, tmp_path: Path
) -> None:
    def row(number: int, question: str) -> dict[str, Any]:
        return {"prompt": question, "answer": str(number), "id": min(number, 8)}

    rows = [row(number, "1+1=") for number in range(10)]
    rows += [row(10, "1+" * 50), {"prompt": 5, "answer": "1", "id": 99}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(record) + "\n" for record in rows))
    columns = "{data_source: null, ability: null, extra_info: null, ground_truth: answer, id: id}"
    source = [f"data.train.sums={{dataset: rows.jsonl, columns: {columns}}}", "data.overlong=drop"]
    code, output = check(*small(model), *source)
    assert code == 2
    assert "warn  data.train.sums: 1 of 12 prompts are too long and will be dropped" in output
    assert "fail  data.train.sums: rows.jsonl:12: column `prompt` must be" in output
    assert "occurs twice" not in output
    assert check(*small(model), *source, "data.max_bad_rows=1", "--all-rows")[0] == 2
    code, output = check(*small(model), *source, "data.max_bad_rows=2", "--all-rows")
    assert code == 0, "as many bad rows as are allowed"
    assert 'warn  data.train.sums: rows.jsonl:10: the id "8" occurs twice, first at rows.jsonl:9' in output


def test_no_tokenizer_and_too_few_prompts(check: Callable[..., tuple[int, str]], model: Path, tmp_path: Path) -> None:
    code, output = check(*small(model), "batch={prompts_per_step: 16384, samples_per_prompt: 1}")
    assert code == 2
    assert "fail  data.train: 8100 prompts, but a step needs 16384" in output
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(model / "config.json", bare)
    code, output = check(*small(bare))
    assert code == 2
    assert "fail  tokenizer: " in output
    assert "skip  data: prompts and rewards need the tokenizer" in output


# --- models -----------------------------------------------------------------------------------------------------


def test_a_model_of_the_hub_is_looked_at_where_the_cache_has_it(
    check: Callable[..., tuple[int, str]], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    snapshot = make_hub_cache(tmp_path / "cache", "Qwen/Qwen3-8B", model)
    hub_name = [*small(model), "model.path=Qwen/Qwen3-8B"]
    code, output = check(*hub_name)
    assert code == 0, output
    assert f"ok    model of the actor: {snapshot}: qwen3" in output
    assert "ok    tokenizer: 262 tokens" in output
    (snapshot / "model.safetensors").resolve().write_bytes((model / "model.safetensors").read_bytes()[:-9])
    code, output = check(*hub_name)
    assert code == 2
    assert f"fail  model of the actor: {snapshot}/model.safetensors: cannot be read" in output
    shutil.rmtree(tmp_path / "cache")
    code, output = check(*hub_name)
    assert code == 2
    assert "does not have it, and HF_HUB_OFFLINE forbids the download\n      fix: hf download Qwen/Qwen3-8B" in output
    assert "skip  data: prompts and rewards need the models' tokenizers: Qwen/Qwen3-8B" in output
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    _, output = check(*hub_name)  # checkpoints of eight billion parameters may need more space than this disk has
    assert "fail  model" not in output
    assert "warn  model of the actor: Qwen/Qwen3-8B: " in output
    assert "does not have it; `mrl train` downloads it, about 15.3 GiB" in output


# --- machines ---------------------------------------------------------------------------------------------------


def facts(**changes: Any) -> dict[str, Any]:
    return {
        "node": "n1",
        "versions": {"mrl": "1"},
        "sees_canary": True,
        "has_sockets": True,
        "shm_free_bytes": 1 << 36,
        "usable_memory_bytes": 1 << 40,
        "taken_memory_bytes": 0,
        "max_files": 1 << 20,
        "max_processes": -1,
        "num_ports": 28232,
        "missing_interfaces": {},
        "gpus": None,
        "transformer_engine": "",
    } | changes


def test_this_machine_tells_what_the_checks_read(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    canary.touch()
    here = node_facts(str(canary), with_gpus=True)
    assert here.keys() == facts().keys()
    assert here["node"] == socket.gethostname()
    assert here["sees_canary"]
    assert here["has_sockets"]
    assert not node_facts(str(tmp_path / "other"), with_gpus=False)["sees_canary"]
    assert [path.name for path in tmp_path.iterdir()] == ["canary"]


def test_an_interface_that_is_not_there_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "nothere0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert node_facts(str(tmp_path / "x"), with_gpus=False)["missing_interfaces"] == {"NCCL_SOCKET_IFNAME": "nothere0"}


@pytest.mark.parametrize(
    ("changes", "verdict", "message"),
    [
        ({"sees_canary": False}, "fail", "n2: runs is not the directory that the driver sees"),
        ({"has_sockets": False}, "fail", "n2: cannot create a Unix socket in runs"),
        ({"versions": {"mrl": "2"}}, "fail", "n2: mrl 2; the driver has mrl 1"),
        ({"versions": {}}, "fail", "n2: mrl is on the path, but it is not installed"),
        ({"shm_free_bytes": 1 << 18}, "fail", "n2: /dev/shm has 0 GiB free"),
        ({"usable_memory_bytes": 1 << 34}, "fail", "n2: a run takes "),
        ({"taken_memory_bytes": 1 << 40}, "warn", "n2: a run takes "),
        ({"max_files": 1024}, "warn", "n2: at most 1024 open files"),
        ({"num_ports": 100}, "warn", "n2: at most 100 ports"),
        ({"missing_interfaces": {"NCCL_SOCKET_IFNAME": "ib9"}}, "fail", "n2: NCCL_SOCKET_IFNAME=ib9"),
    ],
)
def test_the_node_that_is_unlike_the_others_is_named(changes: dict[str, Any], verdict: str, message: str) -> None:
    config = config_of()
    assert all(finding.verdict == "ok" for finding in check_nodes(config, [facts()], {"mrl": "1"}))
    findings = list(check_nodes(config, [facts(), facts(node="n2", **changes)], {"mrl": "1"}))
    bad = [finding for finding in findings if finding.verdict != "ok"]
    assert [finding.verdict for finding in bad] == [verdict]
    assert bad[0].what.startswith(message)


def test_each_of_thousands_of_ranks_is_an_open_file_of_the_first() -> None:
    sizes = ("cluster.nodes=2048", "placement.pools.all=16384", "batch.prompts_per_step=16384")
    large = load_config(str(ROOT / "configs" / "grpo-deepseek-v3-128n8g.yaml"), sizes).config
    findings = check_nodes(large, [facts(max_files=20000)], {"mrl": "1"})
    (low,) = [finding for finding in findings if finding.about == "limits"]
    assert low.what == "n1: at most 20000 open files; a full node needs 32768"
    assert low.fix.startswith("ulimit -Hn 32768")


def test_gpus_are_counted_where_they_are_wanted() -> None:
    config = load_config(str(ROOT / "configs" / "ppo-llama3.1-70b-8n8g.yaml"), ()).config
    gpus = [["H100", "580.1"]] * 8
    versions = {"mrl": "1", "nvidia-nccl-cu13": "2.28"}
    (good,) = [
        finding
        for finding in check_nodes(config, [facts(gpus=gpus, versions=versions)], versions)
        if finding.about == "GPUs"
    ]
    assert (good.verdict, good.what) == ("ok", "8 GPUs (H100, driver 580.1); NCCL 2.28")
    (few,) = [
        finding for finding in check_nodes(config, [facts(gpus=gpus[:6])], {"mrl": "1"}) if finding.about == "GPUs"
    ]
    assert (few.verdict, few.fix) == ("fail", "cluster.devices_per_node=6")


def test_a_broken_transformer_engine_fails_where_gpus_would_use_it() -> None:
    preset = load_config(str(ROOT / "configs" / "ppo-llama3.1-70b-8n8g.yaml"), ()).config
    broken = facts(gpus=[["H100", "580.1"]] * 8, transformer_engine="Transformer Engine is installed, but")
    (failure,) = [finding for finding in check_nodes(preset, [broken], {"mrl": "1"}) if finding.verdict == "fail"]
    assert (failure.about, failure.what) == ("Transformer Engine", "n1: Transformer Engine is installed, but")
    assert "make install-cuda" in failure.fix
    assert all(finding.verdict == "ok" for finding in check_nodes(config_of(), [broken], {"mrl": "1"}))


def test_a_full_disk_fails(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(*small(model)[1:], f"run.dir={tmp_path}", "training.keep=2")
    (room,) = check_disk(config)
    assert room.verdict == "ok"
    assert "; 4 more checkpoints of 0.01 GiB" in room.what
    (tmp_path / "laptop-ppo" / "checkpoints" / "step-000007").mkdir(parents=True)
    assert "; 3 more checkpoints" in next(check_disk(config)).what, "existing checkpoints need no more space"
    usage = shutil.disk_usage(os.curdir)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    (full,) = check_disk(config)
    assert full.verdict == "fail"
    assert "a smaller training.keep" in full.fix


def test_train_refuses_what_fails_and_keeps_the_warnings() -> None:
    warning, bad = CheckResult("warn", "limits", "few"), CheckResult("fail", "disk", "full", "free some")
    assert refuse("config.yaml", [CheckResult("ok", "batch", "fine"), warning]) == [warning]
    with pytest.raises(ConfigError, match=r"config.yaml: disk: full \(free some\)"):
        refuse("config.yaml", [warning, bad])


@pytest.mark.parametrize(
    ("nodes", "lines", "verdict", "message"),
    [
        (8, ["gpu*|up|4/12/0/16|gpu:h100:8(S:0-1)|96|1-00:00:00"], "ok", "gpu (16 such nodes, at most 1-00:00:00)"),
        (8, ["gpu*|up|0/4/12/16|gpu:h100:8|96|infinite"], "fail", "gpu has 4"),
        (
            8,
            ["gpu|down|0/16/0/16|gpu:8|96|infinite", "cpu|up|0/99/0/99|(null)|96|1:00"],
            "fail",
            "no running partition",
        ),
        (8, ["a|up|0/4/0/4|gpu:a100:8|96|1:00", "a|up|0/4/0/4|gpu:h100:8|96|1:00"], "ok", "a (8 such nodes"),
    ],
)
def test_slurm_partitions(
    nodes: int, lines: list[str], verdict: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sinfo = tmp_path / "sinfo"
    sinfo.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    sinfo.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    config = load_config(str(ROOT / "configs" / "ppo-llama3.1-70b-8n8g.yaml"), ()).config
    (finding,) = check_slurm(dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, nodes=nodes)))
    assert finding.verdict == verdict
    assert message in finding.what


def test_gpu_nodes_need_shared_memory_beside_the_columns() -> None:
    """NCCL and vLLM also use shared memory."""
    config = config_of()
    on_gpus = dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, device="gpu"))
    enough = 2 * machine._SHM_FLOOR_BYTES
    verdicts = [machine._shared_memory(of, free).verdict for of in (config, on_gpus) for free in (enough, enough // 4)]
    assert verdicts == ["ok", "ok", "ok", "fail"]


def test_the_hard_limit_of_open_files_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("mrl.preflight.node_facts.resource.getrlimit", lambda which: (1024, 65536))
    assert node_facts(str(tmp_path / "canary"), False)["max_files"] == 65536
