"""`mrl profile` refuses wrong arguments before anything starts."""

from __future__ import annotations

import pytest

from mrl.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["configs/laptop-ppo.yaml", "--steps", "0"], "--steps 0 is below 1"),
        (["configs/laptop-ppo.yaml", "training.profile.torch_ranks=[9]"], "no role has a rank 9"),
        (["configs"], "configs"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", *arguments]) == 2
    assert problem in capsys.readouterr().err
