"""`mrl explain`: its arithmetic and rank tables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mrl.cli.main import main

ROOT = Path(__file__).parents[2]


@pytest.fixture
def explain(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.chdir(ROOT)

    def run(*arguments: str) -> str:
        capsys.readouterr()
        assert main(["explain", *arguments]) == 0
        return capsys.readouterr().out

    return run


@pytest.mark.needs
def test_golden(explain: Callable[..., str]) -> None:
    assert (
        explain("configs/laptop-grpo.yaml", "batch.epochs_per_step=3")
        == """\
configs/laptop-grpo.yaml

Batch:
  samples per step          prompts_per_step 4 x samples_per_prompt 8        32
  updates per epoch         samples per step 32 / samples_per_update 16      2
  optimizer steps per step  updates per epoch 2 x epochs_per_step 3          6
  longest sample            max_prompt_tokens 256 + max_response_tokens 256  512 tokens

Algorithm:
  advantage: grpo  [GRPO, 2402.03300]
    A_i = (s_i - mean) / (std + floor) over i's group, with the unbiased std.
  policy loss: ppo  [PPO, 1707.06347]
    l_t = max(-A r_t, -A clip(r_t)); with dual clip, where A < 0, min(l_t, -A c).
    clip_high 0.2, clip_low 0.2, dual_clip 3.0

Devices: 1 x 4 = 4 CPU slots, 4 of them in pools
  laptop  4  actor, rollout, reference (kl.where: loss) take turns

actor: 4 ranks = tp 2 x cp 1 x dp 2 x pp 1
  The reference model is a frozen copy of this role: same processes, same layout.
  samples per update and data-parallel rank  samples_per_update 16 / dp 2                      8
  room of a micro-batch                      max_tokens_per_device 1024 x cp 1                 1024 tokens
  micro-batches per update, at most          8 / floor(1024 / longest sample 512), rounded up  4
  rank  node  device  tp  cp  dp  pp
  0     0     0       0   0   0   0
  1     0     1       1   0   0   0
  2     0     2       0   0   1   0
  3     0     3       1   0   1   0

rollout: 4 engines with tp 1 on the actor's 4 devices
  rank  node  device  engine  tp
  0     0     0       0       0
  1     0     1       1       0
  2     0     2       2       0
  3     0     3       3       0

Not checked:
  - layers, heads and experts against the layouts: the files of "Qwen/Qwen2.5-0.5B-Instruct" are not on this machine
"""
    )


def test_many_ranks_share_a_line_per_node(explain: Callable[..., str]) -> None:
    text = explain("configs/ppo-llama3.1-70b-8n8g.yaml")
    assert "Devices: 8 x 8 = 64 GPUs, 64 of them in pools\n" in text
    assert "actor: 64 ranks = tp 4 x cp 1 x dp 2 x pp 8 (2 model chunks each), sequence parallel\n" in text
    assert "  16-23  2     0-7     0-3  0   0-1  2\n" in text
    assert "  16-23  2     0-7     2       0-7\n" in text, "one engine per machine"
    assert (
        "micro-batches per update, at most          128 / floor(16384 / longest sample 6144), rounded up  64\n" in text
    )


def test_an_engine_over_two_machines_has_a_line_for_each(explain: Callable[..., str]) -> None:
    text = explain("configs/ppo-llama3.1-70b-8n8g.yaml", "rollout.tp=16")
    assert "rollout: 4 engines with tp 16 on the actor's 64 devices, each on 2 nodes\n" in text
    assert "  8-15   1     0-7     0       8-15\n" in text


def test_stages_of_an_engine_are_listed(explain: Callable[..., str]) -> None:
    text = explain("configs/ppo-llama3.1-70b-8n8g.yaml", "rollout.tp=8", "rollout.pp=2")
    assert "rollout: 4 engines with tp 8 and pp 2 on the actor's 64 devices, each on 2 nodes\n" in text
    assert "  8-15   1     0-7     0       0-7  1\n" in text


def test_all_ranks(explain: Callable[..., str]) -> None:
    text = explain("configs/ppo-llama3.1-70b-8n8g.yaml", "--all-ranks")
    assert "  63    7     7       3   0   1   7\n" in text
    assert text.count("\n") > 3 * 64


def test_expert_axes_are_shown_where_there_are_any(explain: Callable[..., str]) -> None:
    assert "edp" not in explain("configs/laptop-ppo.yaml")
    text = explain("configs/laptop-ppo.yaml", "actor.parallel={tp: 2, ep: 2, sequence_parallel: true}")
    assert (
        "actor: 4 ranks = tp 2 x cp 1 x dp 2 x pp 1, sequence parallel; expert layers etp 1 x ep 2 x edp 2 x pp 1"
        in text
    )
    assert "  rank  node  device  tp  cp  dp  pp  etp  ep  edp\n" in text
    assert "  3     0     3       1   0   1   0   0    1   1\n" in text


def test_context_parallel_room_and_model_chunks(explain: Callable[..., str]) -> None:
    overrides = ["actor.parallel={tp: 1, cp: 2, pp: 2, vpp: 3}", "actor.max_tokens_per_device=300"]
    text = explain("configs/laptop-ppo.yaml", *overrides)
    assert "actor: 4 ranks = tp 1 x cp 2 x dp 1 x pp 2 (3 model chunks each)\n" in text
    assert "max_tokens_per_device 300 x cp 2 " in text
    assert " 600 tokens\n" in text
    assert "16 / floor(600 / longest sample 512), rounded up  16\n" in text


def test_no_reference_without_divergence(explain: Callable[..., str]) -> None:
    text = explain("configs/laptop-ppo.yaml", "algorithm.kl.where=none")
    assert "reference" not in text
    assert "  laptop  4  actor, rollout, critic take turns\n" in text


def test_a_reward_model_works_on_whole_steps(explain: Callable[..., str]) -> None:
    section = "reward_model={path: some/model, max_tokens_per_device: 1024, parallel: {tp: 2, pp: 2}}"
    text = explain("configs/laptop-ppo.yaml", section, "placement.roles.reward_model=laptop")
    assert "rollout, reference (kl.where: reward), critic, reward_model take turns\n" in text
    assert "reward_model: 4 ranks = tp 2 x cp 1 x dp 1 x pp 2\n  It is frozen, and scores whole steps.\n" in text
    assert "samples per step and data-parallel rank  samples per step 32 / dp 1 " in text


def test_a_judge_has_engines_and_devices_of_its_own(explain: Callable[..., str]) -> None:
    asking = "reward.functions.judged={name: judge, options: {service: {max_tokens: 9}, template: '{response}'}}"
    pool = ("cluster.devices_per_node=8", "placement.pools.judge=4", "placement.roles.judge=judge")
    text = explain("configs/laptop-ppo.yaml", "judge={path: some/judge, tp: 2}", asking, *pool)
    assert "judge: 2 engines with tp 2 on its own 4 devices\n" in text
    assert "  judge   4  judge\n" in text


def test_mistakes_and_secrets(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("MRL_TEST_TOKEN", "canary-5up3r-hidden")
    assert main(["explain", "configs/laptop-ppo.yaml", "configs/laptop-grpo.yaml"]) == 2
    assert "name a configuration file; 2 given" in capsys.readouterr().err
    assert main(["explain", "configs/laptop-ppo.yaml", "model.path=org/${oc.env:MRL_TEST_TOKEN}"]) == 0
    shown = capsys.readouterr()
    assert 'layouts: the files of "<redacted>" are not' in shown.out
    assert "canary" not in shown.out + shown.err


def test_an_environment_says_how_many_full_turns_fit_and_who_scores(explain: Callable[..., str]) -> None:
    limits = "max_turns: 4, max_turn_tokens: 50, max_observation_tokens: 60"
    shop = "agent.environments.shop={name: 'shop:Shop', weight: 0.5, sources: [toy, 'shop/*'], " + limits + "}"
    output = explain("configs/laptop-grpo.yaml", shop, "agent.environments.rest.tools.calc.name=calculator")
    assert (
        """
environment shop: shop:Shop, in which the model writes hermes
  data sources           toy, shop/*
  turns, at most         max_turns 4, including the answer
  longest turn           max_turn_tokens 50
  longest answer to one  max_observation_tokens 60
  full turns that fit    floor((max_response_tokens 256 + 60) / (50 + 60)) = 2: less than the 4 that are allowed
  score                  its own score x 0.5 + answer x 1

environment rest: tools, in which the model writes hermes
  data sources           all that no earlier environment handles
  turns, at most         max_turns 4, including the answer
  longest turn           no separate limit: all share max_response_tokens 256
  longest answer to one  no separate limit: all share max_response_tokens 256
  score                  answer x 1
"""
        in output
    )
    enough = explain("configs/laptop-grpo.yaml", shop, "rollout.max_response_tokens=380")
    assert "floor((max_response_tokens 380 + 60) / (50 + 60)) = 4\n" in enough


def test_asynchrony_says_how_much_is_under_way_and_in_a_checkpoint(explain: Callable[..., str]) -> None:
    apart = (
        "cluster.devices_per_node=6",
        "placement.pools={laptop: 4, engines: 2}",
        "placement.roles={actor: laptop, rollout: engines}",
        "algorithm.correction={level: token}",
    )
    assert "asynchrony:" not in explain("configs/laptop-grpo.yaml", *apart)
    between = explain("configs/laptop-grpo.yaml", *apart, "asynchrony.ahead=1")
    assert "asynchrony: ahead 1, weights between" in between
    assert "samples per step 32; each batch is finished before the next begins" in between
    text = explain("configs/laptop-grpo.yaml", *apart, "asynchrony.ahead=2", "asynchrony.weights=in_flight")
    (section,) = (part for part in text.split("\n\n") if part.startswith("asynchrony:"))
    assert [line.split()[-1] for line in section.splitlines()[1:4]] == ["2", "96", "64"]
    kib = 64 * (4 * 256 + 12 * 256) / 2**10
    assert section.splitlines()[4].endswith(f"{kib / 2**10:.1f} MiB")
