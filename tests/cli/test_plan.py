"""`mrl plan`: its output, its exit codes, and its fast answer without torch."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mrl.cli.main import main
from mrl.errors import ModelError, TooFewDevices
from mrl.plan.known_models import model_spec
from tests.models.published import QWEN3_8B

ROOT = Path(__file__).parents[2]
PRESET = "configs/grpo-qwen3-32b-4n8g.yaml"
Plan = Callable[..., tuple[int, str, str]]


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.chdir(ROOT)

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["plan", *arguments])
        return code, *capsys.readouterr()

    return run


def test_a_plan_says_what_it_assumes(plan: Plan) -> None:
    code, text, _ = plan(PRESET)
    assert code == 0
    assert text.startswith(f"{PRESET} on h100-80gb, 79.1 GiB per device (--hardware to change)\n")
    assert "  pool  phase        actor  rollout  total  left\n" in text
    assert "means of 512 prompt and 3,584 response tokens (--mean-prompt, --mean-response):" in text
    assert "It fits. The peak is " in text
    assert "4 engines with tp 8" in text


def test_an_engine_over_two_machines_says_what_its_ranks_share(plan: Plan) -> None:
    code, text, _ = plan("configs/grpo-llama3.1-405b-18n8g.yaml", "rollout.tp=16")
    assert code == 0
    assert "9 engines with tp 16" in text
    assert "Each spans 2 nodes: its ranks are assumed to add up at 280 GB/s over all network cards." in text


def test_data_parallel_ranks_over_two_machines_say_what_they_send(plan: Plan) -> None:
    words = "rollout.tp=1", "rollout.dp=16", "rollout.vllm.enable_expert_parallel=true"
    text = plan("configs/grpo-qwen3-30b-a3b-2n8g.yaml", *words)[1]
    assert "1 engine with tp 1 and dp 16" in text
    assert "Each spans 2 nodes: every rank sends the tokens of its samples to the experts of all nodes." in text


def test_every_number_has_an_origin(plan: Plan) -> None:
    text = plan(PRESET, "--verbose")[1]
    assert "train actor (all):" in text
    assert "assumed, by its groups and their peers" in text
    assert "gpu_memory_utilization 0.85 of the device, less the above" in text
    assert "16384 tokens of a micro-batch on a device" in text
    assert "matrix products" in text
    assert "Assumed (mrl/plan/assumptions.py): process_bytes 2.25444e+09, " in text
    assert "train_efficiency 0.42" in text
    assert "pipeline bubble" in text


def test_what_does_not_fit_is_an_error_with_a_way_out(plan: Plan) -> None:
    layout = ("actor.parallel={tp: 4, pp: 2, vpp: 1, sequence_parallel: true}", "rollout.tp=4")
    nothing = [f"actor.megatron.recompute_{key}=null" for key in ("granularity", "method", "num_layers")]
    code, text, _ = plan(PRESET, *layout, *nothing, "actor.max_tokens_per_device=32768")
    assert code == 2
    assert "`train actor` on pool `all` does not fit on the device: " in text
    assert "It fits with:\n" in text
    assert "  actor.megatron.recompute_granularity=full actor.megatron.recompute_method=uniform " in text
    assert "\n    peak " in text
    assert "Seconds per step" not in text


def test_the_search_lists_placements_with_overrides(plan: Plan) -> None:
    code, text, _ = plan(PRESET, "--search", "--nodes", "2")
    assert code == 0
    assert "colocated: " in text
    assert "split: " in text
    assert 'cluster.nodes=2 "placement.pools={all: 16}"' in text
    assert "combinations were tried" in text
    assert plan(PRESET, "--nodes", "2")[2].count("--nodes, --devices-per-node and --rehearse need --search") == 1


@pytest.mark.slow
@pytest.mark.on_demand
def test_the_fastest_layout_found_is_rehearsed(plan: Plan) -> None:
    code, text, _ = plan("configs/grpo-qwen2.5-0.5b-1n1g.yaml", "--search", "--rehearse")
    assert code == 0
    fastest = text[: text.index("\nRehearsing")].partition("colocated: ")[2].splitlines()[1].strip()
    assert f"Rehearsing the fastest: configs/grpo-qwen2.5-0.5b-1n1g.yaml {fastest}\n" in text
    assert "actor, rank 0 for the 1 rank of stage 0: 0.494 billion parameters" in text


def test_means_and_hardware_are_taken_from_the_command_line(plan: Plan) -> None:
    text = plan(PRESET, "--mean-prompt", "100", "--mean-response", "900", "--hardware", "h200")[1]
    assert "on h200-141gb, 139.8 GiB per device" in text
    assert "means of 100 prompt and 900 response tokens" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("configs/laptop-ppo.yaml", "--search"), "cluster.device: plans are for GPUs, not CPU slots (cluster"),
        ((PRESET, "model.path=acme/unheard-of"), "--model NAME (known: DeepSeek-R1-Distill-Qwen-1.5B, "),
        ((PRESET, "actor.parallel.pp=3"), "does not divide the 32 devices"),
        (
            ("configs/grpo-qwen3-235b-a22b-16n8g.yaml", "actor.parallel.pp=4"),
            "command line: actor.parallel.pp: 94 layers",
        ),
        (
            ("configs/grpo-qwen2.5-7b-1n8g.yaml", "actor.parallel={tp: 8, pp: 1, vpp: 1}"),
            "8 does not divide 28 attention heads",
        ),
    ],
)
def test_mistakes(plan: Plan, arguments: tuple[str, ...], message: str) -> None:
    code, text, error = plan(*arguments)
    assert (code, text) == (2, "")
    assert message in error


def test_sizes_come_from_a_directory_or_from_a_name(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    by_directory = plan(PRESET, "--model", str(tmp_path))[1]
    assert by_directory == plan(PRESET, "--model", "Qwen3-8B")[1]
    assert by_directory != plan(PRESET)[1]
    assert model_spec("meta-llama/Meta-Llama-3.1-70B-Instruct") == model_spec("Llama-3.1-70B")
    with pytest.raises(ModelError, match="not a directory"):
        model_spec("Qwen/Qwen3-8B-FP8")


def test_numbers_of_parameters_are_those_that_are_published() -> None:
    billions = {
        "Qwen2.5-0.5B": 0.494, "Qwen2.5-1.5B": 1.544, "Qwen2.5-3B": 3.086, "Qwen2.5-7B": 7.616, "Qwen2.5-14B": 14.770,
        "Qwen2.5-32B": 32.764, "Qwen2.5-72B": 72.706, "DeepSeek-R1-Distill-Qwen-1.5B": 1.777, "Llama-3.1-8B": 8.030,
        "Llama-3.1-70B": 70.554, "Llama-3.1-405B": 405.853, "Llama-3.2-1B": 1.236, "Llama-3.2-3B": 3.213,
        "Llama-2-7b": 6.738, "Llama-2-13b": 13.016, "Llama-2-70b": 68.977, "SmolLM2-135M": 0.1345,
        "SmolLM2-360M": 0.3618, "SmolLM2-1.7B": 1.711, "Mistral-7B-v0.3": 7.248, "Qwen3-0.6B": 0.596,
        "Qwen3-1.7B": 1.721, "Qwen3-4B": 4.022, "Qwen3-8B": 8.191, "Qwen3-14B": 14.768, "Qwen3-32B": 32.762,
        "Qwen3-30B-A3B": 30.532, "Qwen3-235B-A22B": 235.094, "Mixtral-8x7B": 46.703, "Mixtral-8x22B": 140.621,
    }  # fmt: skip
    for name, count in billions.items():
        assert model_spec(name).num_parameters / 1e9 == pytest.approx(count, rel=0.0005), name


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("Qwen/Qwen2.5-14B-Instruct", "Qwen2.5-14B"),
        ("Qwen/Qwen2.5-Coder-32B-Instruct", "Qwen2.5-32B"),
        ("Qwen/Qwen3-4B-Instruct-2507", "Qwen3-4B"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "Qwen2.5-7B"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-70B", "Llama-3.1-70B"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "Llama-3.1-8B"),
        ("meta-llama/Llama-3.3-70B-Instruct", "Llama-3.1-70B"),
    ],
)
def test_models_of_the_same_sizes_are_known_by_their_own_names(name: str, same: str) -> None:
    assert model_spec(name) == model_spec(same)


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen2.5-VL-7B",
        "Qwen/Qwen2-57B-A14B",
        "mistralai/Mistral-7B-v0.1",
        "Llama-3-80B",
    ],
)
def test_another_model_is_not_taken_for_one_whose_name_it_continues(name: str) -> None:
    with pytest.raises(ModelError, match="with known sizes"):
        model_spec(name)


@pytest.mark.parametrize("arguments", [("--verbose",), ("--search",)], ids=" ".join)
def test_it_answers_at_once_and_without_anything_heavy(arguments: tuple[str, ...]) -> None:
    heavy = ("torch", "numpy", "ray", "vllm", "megatron", "transformers", "tensordict", "pyarrow")
    program = (
        "import sys\nfrom mrl.cli.main import main\n"
        f"code = main(['plan', {PRESET!r}, *{arguments!r}])\n"
        f"loaded = [name for name in {heavy!r} if name in sys.modules]\n"
        "sys.exit(f'loaded: {loaded}' if loaded else code)"
    )

    def is_soon() -> bool:
        began = time.perf_counter()
        finished = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert finished.returncode == 0, finished.stderr
        return time.perf_counter() - began < 5

    assert any(is_soon() for _ in range(3))


def test_a_run_with_too_few_nodes_says_what_fits_on_those_that_are_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    num_nodes = 6

    def start(resolved: object, lost: object, quiet: bool) -> int:
        raise TooFewDevices(f"{num_nodes} of 8 nodes have joined", num_nodes, fix="add the others")

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("mrl.cli.train._train", start)
    assert main(["train", "configs/grpo-llama3.1-70b-8n8g.yaml"]) == 1
    output = capsys.readouterr().err
    assert "6 of 8 nodes have joined\n  fix: add the others\nOn 4 nodes of h100-80gb this fits (predicted):\n" in output
    (change,) = [line for line in output.splitlines() if "cluster.nodes=4" in line]
    assert "placement.pools={all: 32}" in change
    assert main(["train", "configs/laptop-ppo.yaml"]) == 1
    assert "cluster.nodes=6 has 24 CPU slots for placement.pools; the search supports" in capsys.readouterr().err
    assert main(["train", "configs/grpo-llama3.1-70b-8n8g.yaml", "model.path=unknown/model"]) == 1
    assert "It is unknown what fits on 6 nodes: " in capsys.readouterr().err
    num_nodes = 2
    assert main(["train", "configs/grpo-llama3.1-70b-8n8g.yaml"]) == 1
    assert "No layout of these models fits on 2 or fewer nodes of h100-80gb." in capsys.readouterr().err


def test_turns_say_what_reading_them_again_would_cost(plan: Plan) -> None:
    """After 1,024 tokens, three turns share 7,168: they start at 1,024 plus none, a third and two thirds of these."""
    turns = ["agent.environments.calc={max_turns: 3, tools: {calc: {name: calculator}}}"]
    text = plan(PRESET, *turns)[1]
    assert "reads each of the 8,192 tokens of the longest conversation once; without it, 3 turns read 10,240." in text
    text = plan(PRESET, *turns, "rollout.vllm.enable_prefix_caching=false")[1]
    assert (
        "without a prefix cache, the longest conversation reads 10,240 tokens in 3 turns; with a prefix cache" in text
    )
    assert "Turns:" not in plan(PRESET)[1]


def test_asynchrony_is_planned_where_engines_are_apart(plan: Plan) -> None:
    apart = (
        "placement.pools={all: null, train: 16, engines: 16}",
        "placement.roles={actor: train, rollout: engines}",
        "algorithm.correction={level: token}",
        "actor.max_tokens_per_device=12288",
    )
    assert "Asynchrony" not in plan(PRESET, *apart)[1], "nothing is ahead"
    code, text, _ = plan(PRESET, *apart, "asynchrony.ahead=2", "asynchrony.weights=in_flight")
    assert code == 0
    rows = {line[:32].strip(): line[32:].split() for line in text.splitlines() if line.endswith("100%")}
    shared, waits, ahead = (
        float(rows[name][0]) for name in ("synchronous, on shared devices", "synchronous", "2 ahead, in flight")
    )
    assert shared < ahead < waits
    assert "Shared devices are faster, although they wait" in text
    assert ": training is the bottleneck." in text
    assert "None of the other divisions of these devices that were tried is faster." in text
    skewed = ("placement.pools={all: null, train: 8, engines: 24}", *apart[1:], "asynchrony.ahead=1")
    recomputed = [f"actor.megatron.recompute_{key}" for key in ("granularity=full", "method=uniform", "num_layers=1")]
    layout = (
        "actor.parallel={tp: 8, pp: 1, vpp: 1, sequence_parallel: true}",
        "rollout.tp=4",
        "actor.megatron.recompute_modules=null",
        *recomputed,
    )
    text = plan(PRESET, *skewed, *layout)[1]
    assert "Another division of these devices takes " in text
    assert '  "placement.pools={train: 16, engines: 16}"\n' in text


def test_routes_of_replayed_experts_are_counted(plan: Plan) -> None:
    """94 layers, each with 8 of 128 experts per token."""
    name = "configs/grpo-qwen3-235b-a22b-16n8g.yaml"
    text = plan(name)[1]
    assert "Router replay: 752 bytes per token, up to 11.8 GiB per step over the memory of all machines." in text
    assert "Router replay" not in plan(name, "algorithm.router_replay=none")[1]


def test_sampling_masks_are_counted(plan: Plan) -> None:
    """Room for 20 tokens and 8 ties, 4 bytes each."""
    masked = ("algorithm.keep_sampling_mask=true", "rollout.top_k=20")
    text = plan("configs/grpo-qwen2.5-7b-1n8g.yaml", *masked)[1]
    assert "Sampling masks: 112 bytes per response token, up to 0.8 GiB per step through the driver." in text
