"""`mrl verify algorithm`: right methods pass, and each mistake is found by the property that it breaks."""

from __future__ import annotations

import pytest

from mrl.cli.main import main
from mrl.config.algorithm import AlgorithmConfig, LossConfig
from mrl.verify.algorithm import verify_advantage, verify_policy_loss

OWN = "tests.verify.own_methods"
LAPTOP = "configs/laptop-grpo.yaml"


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("wrong_sign", "equal to its oracle"),
        ("wrong_gradient", "equal to its oracle"),
        ("reads_masked", "masked tokens have no influence"),
        ("learns_the_advantage", "only the new log-probs have a gradient"),
        ("reads_other_rows", "each row is independent of the others"),
        ("reports_nothing", "one loss and one value of each report per token"),
    ],
)
def test_a_mistake_in_a_loss_is_found(name: str, broken: str) -> None:
    findings = verify_policy_loss(LossConfig(policy=f"{OWN}:{name}"))
    assert [finding.name for finding in findings if finding.fault] == [broken]


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("centered_on_its_rank", "the same on one rank and on two"),
        ("compares_with_the_first", "the order of the rows has no influence"),
        ("on_masked_tokens", "one finite advantage per token, 0 on masked tokens"),
        ("uncentered", "equal to its oracle"),
    ],
)
def test_a_mistake_in_an_advantage_is_found(name: str, broken: str) -> None:
    findings = verify_advantage(AlgorithmConfig(advantage=f"{OWN}:{name}"))
    assert [finding.name for finding in findings if finding.fault] == [broken]


@pytest.mark.parametrize("name", ["ppo", "gspo", "gmpo", "clip_cov"])
def test_built_in_losses_pass(name: str) -> None:
    assert not any(finding.fault for finding in verify_policy_loss(LossConfig(policy=name)))


@pytest.mark.parametrize("name", ["gae", "gdpo", "grpo", "online_dpo", "optimal_token_baseline", "reinforce_plus_plus"])
def test_built_in_advantages_pass(name: str) -> None:
    assert not any(finding.fault for finding in verify_advantage(AlgorithmConfig(advantage=name)))


def test_the_command_names_what_holds_and_what_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [LAPTOP, f"algorithm.advantage={OWN}:centered", f"algorithm.loss.policy={OWN}:scaled"]
    assert main(["verify", "algorithm", *arguments, "algorithm.loss.options.scale=3"]) == 0
    assert capsys.readouterr().out.count("  ok     equal to its oracle\n") == 2
    assert main(["verify", "algorithm", LAPTOP, f"algorithm.loss.policy={OWN}:reads_masked"]) == 1
    shown = capsys.readouterr().out
    assert "  WRONG  masked tokens have no influence: random batch " in shown
    assert f"  --     not compared with its formula: define reads_masked_oracle in {OWN}\n" in shown
