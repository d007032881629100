"""Commands of slime and OpenRLHF, and files of NeMo-RL, become configurations: every key is reported, none executed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mrl.cli.main import main
from mrl.config.nemo_rl import NEMO_RL
from mrl.config.nemo_rl_files import read_nemo_rl
from mrl.config.openrlhf import OPENRLHF, read_openrlhf
from mrl.config.peer_import import Imported, import_keys
from mrl.config.slime import SLIME, read_slime
from mrl.config.values import KeyPath, dotted
from mrl.config.verl_import import import_verl
from mrl.config.verl_script import read_verl
from mrl.errors import ConfigError

SLIME_SCRIPT = """\
source "${HERE}/models/shape.sh"
CKPT=(
   --hf-checkpoint $BASE/model   # --hf-checkpoint other
   --ref-load ${BASE}/model_dist
)
ROLLOUT=( --prompt-data /d/train.jsonl --input-key prompt --label-key label --rm-type math
   --num-rollout 300 --rollout-batch-size 128 --n-samples-per-prompt 8 --rollout-max-response-len 4096
   --num-steps-per-rollout 4 --sglang-cuda-graph-bs 1 2 $(seq 16 8 256)
   --eval-prompt-data aime /d/aime.jsonl amc /d/amc.jsonl
)
PERF=(
   --tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2
   --max-tokens-per-gpu 2048 --frobnicate 3
)
GRPO=(
   --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.01 --kl-loss-type low_var_kl
   --eps-clip 0.2 --eps-clip-high 0.28 --use-tis --min-lr 1e-7 --lr 1e-6
)
ray start --head --num-gpus 8
ray job submit -- python3 train_async.py \\
   --actor-num-nodes 2 --actor-num-gpus-per-node 8 --rollout-num-gpus 8 --rollout-max-prompt-len=1024 \\
   ${CKPT[@]} "${ROLLOUT[@]}" ${PERF[@]} ${GRPO[@]} | tee log.txt
"""
ACTOR = "actor_rollout_ref.actor"
OPENRLHF_COMMAND = (
    "python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path org/model --rollout.batch_size 512 "
    "--rollout.n_samples_per_prompt 16 --train.batch_size 1024 --train.max_epochs 2 --data.max_len 9216 "
    "--rollout.max_new_tokens 8192 --train.max_tokens_per_gpu 4096 --ds.ring_attn_size 2 --algo.kl.use_loss "
    "--algo.kl.init_coef 1e-4 --algo.kl.estimator k2 --algo.advantage.estimator reinforce_baseline "
    "--actor.eps_clip_low_high 0.2 0.27 --train.colocate_all --actor.num_gpus_per_node 8 --ds.zero_stage 3 "
    "--critic.adam.lr 9e-6 --algo.advantage.is_correction_enable --algo.advantage.is_correction_type icepop"
)
PARENT = """\
grpo: {num_prompts_per_step: 64, num_generations_per_prompt: 32, max_num_steps: 90, normalize_rewards: true,
       use_leave_one_out_baseline: true, val_period: 10, async_grpo: {enabled: false, max_trajectory_age_steps: 1}}
loss_fn: {reference_policy_kl_penalty: 0.01, reference_policy_kl_type: k3, ratio_clip_min: 0.2, ratio_clip_max: 0.2,
          ratio_clip_c: null, token_level_loss: true}
policy: {model_name: org/model, train_global_batch_size: 512, train_micro_batch_size: 2, precision: bfloat16,
         max_total_sequence_length: 4096, max_grad_norm: 1.0, dtensor_cfg: {enabled: true, tensor_parallel_size: 1},
         megatron_cfg: {enabled: false, tensor_model_parallel_size: 4, optimizer: {lr: 3.0e-7}},
         sequence_packing: {train_mb_tokens: "${mul:${policy.max_total_sequence_length}, 2}"},
         optimizer: {name: AdamW, kwargs: {lr: 5.0e-6, betas: [0.9, 0.98]}},
         generation: {backend: vllm, top_k: null, max_new_tokens: "${policy.max_total_sequence_length}"}}
cluster: {gpus_per_node: 8, num_nodes: 1}
frobnicate: 3
"""
CHILD = """\
defaults: parent.yaml
policy: {dtensor_cfg: {enabled: false}, megatron_cfg: {enabled: true, sequence_parallel: true}}
data: {max_input_seq_length: 1024, train: {dataset_name: Math}}
"""


def nemo(directory: Path, child: str = CHILD) -> dict[KeyPath, Any]:
    (directory / "parent.yaml").write_text(PARENT)
    return read_nemo_rl(child, str(directory / "child.yaml"))


def remarks(made: Imported) -> dict[str, str]:
    return {report.key: report.remark for part in (made.left_out, made.changed) for report in part}


def test_a_script_of_slime_becomes_a_configuration() -> None:
    made = import_keys(SLIME, read_slime(SLIME_SCRIPT, "run.sh"))
    values = made.values
    assert values["batch"] == {"samples_per_prompt": 8, "prompts_per_step": 128, "samples_per_update": 256}
    assert values["model"] == {"path": "${oc.env:BASE}/model"}
    assert values["data"]["validation"] == {"aime": {"dataset": "/d/aime.jsonl"}, "amc": {"dataset": "/d/amc.jsonl"}}
    assert values["data"]["shuffle"] is False, "their default"
    assert values["algorithm"]["kl"] == {"where": "loss", "coef": 0.01, "in_loss": "k3"}
    loss = {"clip_low": 0.2, "clip_high": 0.28, "aggregation": "seq-mean-token-mean", "dual_clip": None}
    assert values["algorithm"]["loss"] == loss
    assert values["actor"]["parallel"] == {"tp": 2, "sequence_parallel": True, "cp": 2}
    assert values["actor"]["max_tokens_per_device"] == (1024 + 4096) // 2, "the longest sample on two ranks"
    assert values["actor"]["schedule"] == {"min_lr_ratio": 0.1}
    assert values["placement"]["pools"] == {"trainers": 16, "engines": 8}
    assert (values["cluster"]["nodes"], values["asynchrony"]) == (3, {"ahead": 1})
    assert [report.key for report in made.unknown] == ["frobnicate"]
    assert "SGLang" in remarks(made)["sglang_cuda_graph_bs"]


def test_a_command_of_openrlhf_becomes_a_configuration() -> None:
    made = import_keys(OPENRLHF, read_openrlhf(OPENRLHF_COMMAND, "the command"))
    values = made.values
    sizes = {"prompts_per_step": 512, "samples_per_prompt": 16, "samples_per_update": 1024, "epochs_per_step": 2}
    assert values["batch"] == sizes
    assert values["rollout"] == {"max_response_tokens": 8192, "max_prompt_tokens": 1024}
    assert values["actor"]["strategy"] == "fsdp"
    assert values["actor"]["max_tokens_per_device"] == 9216 // 2
    assert values["algorithm"]["kl"] == {"where": "loss", "coef": 1e-4, "in_loss": "k2"}
    assert (values["algorithm"]["loss"]["clip_low"], values["algorithm"]["loss"]["clip_high"]) == (0.2, 0.27)
    assert values["algorithm"]["correction"] == {"level": "token", "beyond": "mask", "upper": 5.0}
    assert values["placement"] == {"pools": {"all": 8}, "roles": {"actor": "all"}}
    assert remarks(made)["critic.adam.lr"] == "only the estimator gae has a critic"
    assert made.unknown == []
    assert values["data"]["raw_text"] is True


def test_old_flags_of_openrlhf_mean_the_same() -> None:
    old = "openrlhf.cli.train_ppo_ray --pretrain org/model --rollout_batch_size 64 --n_samples_per_prompt 4"
    made = import_keys(OPENRLHF, read_openrlhf(f"{old} --train_batch_size 128 --init_kl_coef 0", "the command"))
    assert made.values["batch"] == {"prompts_per_step": 64, "samples_per_prompt": 4, "samples_per_update": 128}
    assert made.values["algorithm"]["kl"] == {"where": "none"}


def test_a_file_of_nemo_rl_is_read_with_the_file_that_it_extends(tmp_path: Path) -> None:
    leaves = nemo(tmp_path)
    assert leaves["policy", "sequence_packing", "train_mb_tokens"] == 8192
    made = import_keys(NEMO_RL, leaves)
    values = made.values
    assert values["batch"] == {"prompts_per_step": 64, "samples_per_prompt": 32, "samples_per_update": 512}
    assert values["actor"]["optimizer"] == {"clip_grad": 1.0, "lr": 3e-7}, "Megatron's, which is on"
    assert values["actor"]["parallel"] == {"tp": 4, "sequence_parallel": True}
    assert values["rollout"] == {"engine": "vllm", "max_prompt_tokens": 1024, "max_response_tokens": 3072, "top_k": 0}
    assert values["algorithm"]["advantage"] == "grpo"
    assert "leave out the sample itself" in remarks(made)["grpo.adv_estimator.name"]
    assert remarks(made)["policy.optimizer.kwargs.lr"] == "Megatron's optimizer is in policy.megatron_cfg"
    assert "asynchrony" not in values
    assert [report.key for report in made.unknown] == ["frobnicate"]


def test_torch_sharding_of_nemo_rl_is_fsdp_without_tensor_parallelism(tmp_path: Path) -> None:
    made = import_keys(NEMO_RL, nemo(tmp_path, "defaults: parent.yaml\n"))
    assert made.values["actor"]["strategy"] == "fsdp"
    assert made.values["actor"]["optimizer"] == {"clip_grad": 1.0, "lr": 5e-6, "adam_beta1": 0.9, "adam_beta2": 0.98}
    split = "defaults: parent.yaml\npolicy: {dtensor_cfg: {tensor_parallel_size: 2}}\n"
    made = import_keys(NEMO_RL, nemo(tmp_path, split))
    assert made.values["actor"]["parallel"] == {"tp": 2}
    assert "no tensor parallelism" in remarks(made)["policy.dtensor_cfg.tensor_parallel_size"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [("defaults: gone.yaml\n", "gone.yaml is missing"), ("ppo: {seed: 1}\n", "PPO runs of NeMo-RL are not read yet")],
)
def test_a_file_of_nemo_rl_that_cannot_be_read_whole_is_refused(text: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=problem):
        read_nemo_rl(text, str(tmp_path / "run.yaml"))


def test_every_key_is_in_the_report(tmp_path: Path) -> None:
    cases = [
        (SLIME, read_slime(SLIME_SCRIPT, "run.sh")),
        (OPENRLHF, read_openrlhf(OPENRLHF_COMMAND, "run.sh")),
        (NEMO_RL, nemo(tmp_path)),
    ]
    for peer, leaves in cases:
        made = import_keys(peer, leaves)
        reports = [*made.taken, *made.changed, *made.left_out, *made.unknown]
        reported = " ".join(report.key for report in reports)
        assert [key for path in leaves if (key := dotted(path)) not in reported] == []


def test_batch_sizes_by_the_other_systems_rules(tmp_path: Path) -> None:
    """Worked out by hand: prompts, samples, samples per optimizer step, optimizer steps, epochs."""
    verl = "python3 -m x data.train_batch_size=1024 actor_rollout_ref.rollout.n=5 actor_rollout_ref.actor.ppo_epochs=2"
    made = [
        import_keys(SLIME, read_slime(SLIME_SCRIPT, "run.sh")),
        import_keys(OPENRLHF, read_openrlhf(OPENRLHF_COMMAND, "run.sh")),
        import_keys(NEMO_RL, nemo(tmp_path)),
        import_verl(read_verl(f"{verl} actor_rollout_ref.actor.ppo_mini_batch_size=256", "run.sh")),
    ]
    assert [tuple(one.batch.values()) for one in made] == [
        (128, 1024, 256, 4, 1),
        (512, 8192, 1024, 16, 2),
        (64, 2048, 512, 4, 1),
        (1024, 5120, 1280, 8, 2),
    ]


@pytest.mark.parametrize(
    ("words", "strategy", "why"),
    [
        (
            "actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.model.enable_gradient_checkpointing=True",
            "fsdp",
            "",
        ),
        (f"{ACTOR}.ulysses_sequence_parallel_size=2", "fsdp", ""),
        (f"{ACTOR}.strategy=fsdp actor_rollout_ref.model.lora_rank=8", "fsdp", ""),
        (f"{ACTOR}.strategy=fsdp {ACTOR}.router_replay.mode=R2", None, "has no router replay"),
        (f"{ACTOR}.megatron.tensor_model_parallel_size=2", None, None),
        (f"{ACTOR}.strategy=megatron", None, None),
    ],
)
def test_verl_trains_by_fsdp_where_mrl_can(words: str, strategy: str | None, why: str | None) -> None:
    made = import_verl(read_verl(f"python3 -m x actor_rollout_ref.actor.optim.lr=1e-6 {words}", "run.sh"))
    actor = made.values["actor"]
    assert actor.get("strategy") == strategy
    assert ("megatron" in actor) <= (strategy is None), "recomputation is actor.fsdp.recompute"
    assert actor.get("fsdp") == ({"recompute": True} if "checkpointing" in words else None)
    if why:
        assert why in remarks(made)["actor_rollout_ref.actor.strategy"]


def test_the_command_prints_the_batch_of_both_sides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["training.steps=9", "actor.schedule.decay_steps=9", "data.train.main.dataset=toy:addition"]
    more += ["reward.functions.main.name=math", "batch.samples_per_update=512", "model.path=Qwen/Qwen3-4B"]
    assert main(["import", "openrlhf", OPENRLHF_COMMAND, *more, "-o", str(tmp_path / "made.yaml")]) == 0
    said = capsys.readouterr().out.splitlines()
    at = next(number for number, line in enumerate(said) if line.split()[:2] == ["batch", "OpenRLHF"])
    assert [line.split()[-2:] for line in said[at + 1 : at + 3]] == [["512", "512"], ["8192", "8192"]]
    assert said[at + 3].split()[-3:] == ["1024", "512", "DIFFERENT"]
