"""Loading: layers, origins, interpolation, strict types, and values that must be accepted."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from mrl.config.resolved.load import VERBS, Resolved, load_any_config, load_config, load_config_of
from mrl.config.resolved.sources import read_yaml
from mrl.config.rules.model_shape import ModelShape, read_model_shape
from mrl.config.schema import DeadlinesConfig, ParallelConfig
from mrl.errors import ConfigError

PRESETS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
Write = Callable[..., str]


def origin(resolved: Resolved, key: str) -> str:
    return resolved.origin(tuple(key.split(".")))


def test_values_arrive_typed(valid: str, write: Write) -> None:
    config = load_config(write(valid)).config
    assert config.run.name == "demo"
    assert config.placement.pools == {"train": 4}
    assert config.actor.parallel == ParallelConfig(tp=2)
    assert config.actor.optimizer == {"lr": 1e-6}
    assert type(config.actor.optimizer["lr"]) is float, "plain YAML loaders read 1e-6 as text"
    assert config.deadlines == DeadlinesConfig(resources_s=120, start_s=300, call_s=1800, heartbeat_s=5, release_s=2)
    assert load_config("run.yaml", ["deadlines.call_s=60"]).config.deadlines.call_s == 60.0


@pytest.mark.parametrize(
    "scalar",
    [
        *("1e-6", "+1E3", "1.5E+3", "1.e2", "1_0e3", "_1e3", "1e", "e5", ".e5", "1_000.5", "-.INF", ".nan", "0x1F"),
        *("0o17", "08", "yes", "n", "~", "", "2024-01-01", "'1e-6'", "!!float 1e3", "!!str 3", "[1e-6, [x]]"),
    ],
)
def test_values_are_those_that_omegaconf_reads(scalar: str) -> None:
    text = f"value: {scalar}\n"
    values, _ = read_yaml(text, str)
    assert repr(values) == repr(OmegaConf.to_container(OmegaConf.create(text), resolve=False))


def test_nothing_of_omegaconf_is_left(valid: str, write: Write) -> None:
    def walk(value: object) -> None:
        assert not type(value).__module__.startswith("omegaconf")
        if isinstance(value, dict):
            for inner in value.values():
                walk(inner)
        if isinstance(value, list):
            for inner in value:
                walk(inner)

    text = valid + "  vllm: {hf_overrides: {a: [1, {b: 2}], c: '${run.name}', d: '${actor.optimizer}'}}\n"
    config = load_config(write(text)).config
    assert config.rollout.vllm["hf_overrides"] == {"a": [1, {"b": 2}], "c": "demo", "d": {"lr": 1e-6}}
    walk(dataclasses.asdict(config))
    for section in (config.actor.optimizer, config.rollout.vllm, config.placement.pools):
        assert type(section) is dict


def test_origins_name_file_line_and_command_line(valid: str, write: Write) -> None:
    resolved = load_config(write(valid), ["batch.epochs_per_step=2", "rollout={tp: 2}"])
    assert origin(resolved, "cluster.device") == "run.yaml:5"
    assert origin(resolved, "actor.optimizer.lr") == "run.yaml:22"
    assert origin(resolved, "cluster.nodes") == "default"
    assert origin(resolved, "batch.epochs_per_step") == "command line"
    assert origin(resolved, "rollout.tp") == "command line"
    assert origin(resolved, "rollout.max_prompt_tokens") == "run.yaml:30"


def test_a_chain_of_files(valid: str, write: Write) -> None:
    write(valid, "base/ppo.yaml")
    write(
        "extends: ppo.yaml\nbatch: {prompts_per_step: 16}\nactor: {optimizer: {weight_decay: 0.1}}\n", "base/more.yaml"
    )
    path = write("extends: base/more.yaml\nbatch:\n  samples_per_prompt: 2\n")
    resolved = load_config(path, ["actor.optimizer.lr=0.5"])
    assert resolved.config.batch.prompts_per_step == 16
    assert resolved.config.batch.samples_per_prompt == 2
    assert resolved.config.actor.optimizer == {"lr": 0.5, "weight_decay": 0.1}, "sections merge"
    assert origin(resolved, "batch.prompts_per_step") == "base/more.yaml:2"
    assert origin(resolved, "batch.samples_per_prompt") == "run.yaml:3"
    assert origin(resolved, "batch.samples_per_update") == "base/ppo.yaml:18"


def test_a_mistake_in_a_parent_names_the_parent(valid: str, write: Write) -> None:
    write(valid.replace("device: cpu", "device: tpu"), "base.yaml")
    with pytest.raises(ConfigError, match=r"base\.yaml:5: cluster\.device"):
        load_config(write("extends: base.yaml\n"))


def test_lists_replace(valid: str, write: Write) -> None:
    write(valid + "  vllm: {hf_overrides: {a: [1, 2, 3]}}\n", "base.yaml")
    path = write("extends: base.yaml\nrollout: {vllm: {hf_overrides: {a: [4]}}}\n")
    assert load_config(path).config.rollout.vllm == {"hf_overrides": {"a": [4]}}


def test_null_takes_a_section_and_an_entry_out(valid: str, write: Write) -> None:
    write(valid, "base.yaml")
    path = write("extends: base.yaml\ncritic: null\nplacement: {roles: {critic: null}}\nalgorithm: {advantage: grpo}\n")
    resolved = load_config(path)
    assert resolved.config.critic is None
    assert resolved.config.placement.roles == {"actor": "train"}
    assert origin(resolved, "critic") == "run.yaml:2"


def test_a_section_after_null_starts_afresh(valid: str, write: Write) -> None:
    write(valid, "base.yaml")
    write("extends: base.yaml\ncritic: null\n", "without.yaml")
    path = write("extends: without.yaml\ncritic: {max_tokens_per_device: 2048}\n")
    resolved = load_config(path)
    assert resolved.config.critic is not None
    assert resolved.config.critic.parallel.tp == 1, "the grandparent's tp=2 went with its section"
    assert origin(resolved, "critic.parallel.tp") == "default"


def test_null_is_a_value_where_keys_are_handed_on(valid: str, write: Write) -> None:
    assert load_config(write(valid), ["rollout.vllm.quantization=null"]).config.rollout.vllm == {"quantization": None}


def test_interpolation(valid: str, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MRL_TEST_DIR", "from-environment")
    monkeypatch.setenv("MRL_TEST_PROMPTS", "16")
    text = valid.replace("name: demo", "name: demo\n  dir: ${oc.env:MRL_TEST_DIR}/${run.name}")
    text = text.replace("prompts_per_step: 8", "prompts_per_step: ${oc.decode:${oc.env:MRL_TEST_PROMPTS}}")
    config = load_config(write(text)).config
    assert config.run.dir == "from-environment/demo"
    assert config.batch.prompts_per_step == 16
    assert load_config("run.yaml", ["run.dir=${oc.env:MRL_TEST_UNSET,plan-b}"]).config.run.dir == "plan-b"


def test_interpolation_sees_the_merged_configuration(valid: str, write: Write) -> None:
    write(valid.replace("name: demo", "name: demo-${batch.prompts_per_step}"), "base.yaml")
    path = write("extends: base.yaml\nbatch: {prompts_per_step: 16}\n")
    assert load_config(path).config.run.name == "demo-16"
    assert load_config(path, ["batch.prompts_per_step=24"]).config.run.name == "demo-24"


def test_a_section_taken_over_by_interpolation(valid: str, write: Write) -> None:
    resolved = load_config(write(valid), ["critic=${actor}", "actor.parallel.tp=1"])
    assert resolved.config.critic == resolved.config.actor
    assert origin(resolved, "critic.parallel.tp") == "command line"
    assert origin(resolved, "critic.parallel.pp") == "default"


def test_override_values_may_hold_anything(valid: str, write: Write) -> None:
    assert load_config(write(valid), ["run.dir=a=b"]).config.run.dir == "a=b"
    assert load_config("run.yaml", ['run.dir="a: b"']).config.run.dir == "a: b"
    assert load_config("run.yaml", ["deadlines.call_s=1e-3"]).config.deadlines.call_s == 0.001
    assert load_config("run.yaml", ["actor.parallel={tp: 4}"]).config.actor.parallel.tp == 4
    assert load_config("run.yaml", ["cluster.ray_address="]).config.cluster.ray_address is None


def test_a_byte_order_mark_and_windows_lines(valid: str, write: Write) -> None:
    resolved = load_config(write(b"\xef\xbb\xbf" + valid.replace("\n", "\r\n").encode()))
    assert resolved.config.run.name == "demo"
    assert origin(resolved, "cluster.device") == "run.yaml:5"


def test_aliases_are_values(valid: str, write: Write) -> None:
    text = valid.replace("parallel: {tp: 2}", "parallel: &split {tp: 2}", 1).replace(
        "critic:\n  parallel: {tp: 2}", "critic:\n  parallel: *split"
    )
    assert load_config(write(text)).config.critic == dataclasses.replace(load_config(write(valid)).config.critic)


@pytest.mark.needs
def test_a_pipeline_of_uneven_stages(valid: str, write: Write) -> None:
    write('{"num_hidden_layers": 5, "num_attention_heads": 4}', "model/config.json")
    overrides = ["model.path=model", "actor.parallel={tp: 1, pp: 2}"]
    with pytest.raises(ConfigError, match="5 layers do not split into"):
        load_config(write(valid), overrides)
    assert load_config("run.yaml", [*overrides, "actor.parallel.first_stage_layers=3"]).warnings == ()
    wrong = {
        "actor.parallel.first_stage_layers=5": "5 layers minus 5 leave 0 for 1 equal stages",
        "actor.parallel={first_stage_layers: 3, last_stage_layers: 1}": "5 layers minus 3 and 1 leave 1 for 0 equal",
        "actor.parallel={first_stage_layers: 3, vpp: 2}": r"stages of \[3, 2\] layers do not split into vpp 2 chunks",
        "actor.parallel={pp: 1, first_stage_layers: 3}": "first_stage_layers: needs a pipeline, but pp is 1",
        "actor.megatron.num_layers_in_first_pipeline_stage=3": "set by actor.parallel.first_stage_layers",
    }
    for override, message in wrong.items():
        with pytest.raises(ConfigError, match=message):
            load_config("run.yaml", [*overrides, override])


@pytest.mark.needs
def test_a_model_config_that_says_little_is_said_so(valid: str, write: Write) -> None:
    write('{"hidden_size": 8}', "model/config.json")
    assert load_config(write(valid), ["model.path=model"]).warnings == (
        "layers against the layouts: the model's config.json does not give their number",
        "attention heads against the layouts: the model's config.json does not give their number",
    )


@pytest.mark.needs
def test_a_hub_name_is_not_checked_and_said_so(valid: str, write: Write) -> None:
    (warning,) = load_config(write(valid)).warnings
    assert warning == 'layers, heads and experts against the layouts: the files of "tiny/model" are not on this machine'


def test_an_advantage_of_ones_own_may_have_a_critic_or_none(valid: str, write: Write) -> None:
    overrides = ["algorithm.advantage=my_package.advantages:mine"]
    assert load_config(write(valid), overrides).config.critic is not None
    assert load_config("run.yaml", [*overrides, "critic=null", "placement.roles.critic=null"]).config.critic is None


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_presets_pass_and_stay_short(preset: Path) -> None:
    verb = next((verb for verb in ("sft", "rm", "dpo") if verb in preset.stem.split("-")), "train")
    assert VERBS[type(load_any_config(str(preset)).config)] == verb
    keys = [line for line in preset.read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    assert len(keys) <= 40
    assert preset.read_text().startswith("# ")


def test_an_unknown_key_of_an_override_is_the_command_lines_mistake(valid: str, write: Write) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(valid), ["actor.paralel.tp=2", "actor.parallel.tpp=2"])
    assert [(problem.where, problem.key) for problem in caught.value.problems] == [
        ("command line", "actor.paralel"),
        ("command line", "actor.parallel.tpp"),
    ]


@pytest.mark.needs
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.tp=2", "rollout: unknown key"),
        ("actor.parallel.tp=4", 'actor.parallel: tp x cp x pp = 4 does not divide the 2 devices of pool "laptop"'),
        ("training.steps=null", "training: steps and epochs are both null"),
        ("training={epochs: 1, steps: null}", "training.epochs: sources with weights have no common epoch"),
        ("validation.every=5", "validation.every: data.validation has no source"),
        ("validation.keep_best=true", "validation.keep_best: nothing is validated: validation.every is 0"),
    ],
)
def test_mistakes_in_an_sft_configuration(override: str, message: str) -> None:
    preset = Path(__file__).parents[2] / "configs" / "laptop-sft.yaml"
    with pytest.raises(ConfigError) as caught:
        load_config_of(
            "sft", str(preset), [override, *["data.train.sums.weight=1"] * override.startswith("training={")]
        )
    assert message in str(caught.value)


def test_sft_has_no_engines_that_could_not_apply_adapters(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_experts": 8, "kv_lora_rank": 64}))
    load_config_of("sft", "configs/laptop-sft.yaml", [f"model.path={tmp_path}", "actor.lora={rank: 8, alpha: 16}"])


def test_sft_says_which_files_are_not_here() -> None:
    missing = "data.train={sums: {dataset: nowhere/rows.parquet}}"
    warnings = load_config_of("sft", "configs/laptop-sft.yaml", [missing]).warnings
    assert 'data.train.sums: no file "nowhere/rows.parquet" on this machine' in warnings


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_every_name_of_the_number_of_experts_is_known(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({name: 8}))
    shape = read_model_shape("model.path", str(tmp_path))
    assert isinstance(shape, ModelShape)
    assert shape.experts == 8


QWEN = {"model_type": "qwen2", "num_hidden_layers": 4, "sliding_window": 64}


@pytest.mark.parametrize(
    ("sizes", "window"),
    [
        ({"model_type": "mistral", "sliding_window": 64}, 64),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "llama"}, None),
        (QWEN, None),
        (QWEN | {"use_sliding_window": False}, None),
        (QWEN | {"use_sliding_window": True, "max_window_layers": 0}, 64),
        (QWEN | {"use_sliding_window": True, "max_window_layers": 4}, None),
        (QWEN | {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 4}, 64),
        (QWEN | {"use_sliding_window": True, "layer_types": ["full_attention"] * 4}, None),
    ],
    ids=str,
)
def test_a_window_counts_where_layers_use_it(sizes: dict[str, object], window: int | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    shape = read_model_shape("model.path", str(tmp_path))
    assert isinstance(shape, ModelShape)
    assert shape.window == window


def test_a_family_without_a_class_for_scores_cannot_be_a_critic(valid: str, write: Write) -> None:
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 4, "model_type": "glm4_moe"}
    write(json.dumps(sizes), "tiny/model/config.json")
    with pytest.raises(
        ConfigError, match="has no Glm4MoeForSequenceClassification, so a model of family glm4_moe cann"
    ):
        load_config(write(valid))
    load_config(write(valid), ["critic=null", "placement={roles: {critic: null}}", "algorithm={advantage: grpo}"])


DELTA = {
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 4,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("actor.parallel={tp: 1, cp: 2}", "reads the tokens of a row in order, all on one rank"),
        ("actor.lora={rank: 4, alpha: 8}", "in vLLM, adapters of linear attention have not been compared"),
        ("actor.parallel={tp: 4}", "4 does not divide 2 key-value heads"),
        ("rollout.tp=8", "8 does not divide 4 key heads of linear attention"),
        ("rollout.vllm.dtype=float32", "vLLM computes linear attention only in bfloat16"),
        ("rollout.vllm.enable_prefix_caching=true", "vLLM caches no states of linear attention"),
    ],
)
def test_limits_of_linear_attention_are_named(valid: str, write: Write, change: str, message: str) -> None:
    """Also if the language model is a section of the file."""
    write(json.dumps({"model_type": "qwen3_5", "text_config": DELTA}), "tiny/model/config.json")
    right = ["rollout.engine=vllm", "rollout.vllm.dtype=bfloat16"]
    load_config(write(valid), right)
    with pytest.raises(ConfigError, match=message):
        load_config(write(valid), [*right, change])


def test_a_cpu_computes_windows_with_context_parallelism(valid: str, write: Write) -> None:
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 4, "model_type": "mistral", "sliding_window": 64}
    write(json.dumps(sizes), "tiny/model/config.json")
    load_config(write(valid), ["actor.parallel={tp: 1, cp: 2}"])


@pytest.mark.parametrize(
    ("more", "positions"),
    [({}, 300), ({"rope_scaling": {"factor": 4.0}}, None), ({"rope_parameters": {"factor": 4.0}}, None)],
)
def test_positions_that_are_scaled_are_no_limit(write: Write, more: dict[str, object], positions: int | None) -> None:
    write(json.dumps({"max_position_embeddings": 300, **more}), "scaled/config.json")
    shape = read_model_shape("model.path", "scaled")
    assert isinstance(shape, ModelShape)
    assert shape.positions == positions
