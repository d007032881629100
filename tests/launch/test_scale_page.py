"""The commands of docs/scale.md work as written. Blocks that need a cluster are marked and not run."""

from __future__ import annotations

import re
import subprocess

import pytest

from mrl.errors import EXIT_STOPPED
from tests.launch.conftest import ROOT, Place

PAGE = (ROOT / "docs" / "scale.md").read_text()
BLOCKS = re.findall(r"^```(.*)\n((?:.*\n)*?)```$", PAGE, re.MULTILINE)


def test_every_block_is_run_or_says_that_it_needs_a_cluster() -> None:
    assert {kind for kind, _ in BLOCKS} == {"bash test", "bash cluster"}


@pytest.mark.slow
def test_the_commands_of_the_page(place: Place) -> None:
    for name in ("configs", "launch"):
        (place.directory / name).symlink_to(ROOT / name)
    mrl = place.directory / "bin" / "mrl"  # what an installed mrl has there; the tests may run without installing it
    mrl.write_text('#!/bin/sh\nexec python -c "import sys; from mrl.cli.main import main; sys.exit(main())" "$@"\n')
    mrl.chmod(0o755)
    for kind, commands in BLOCKS:
        if kind == "bash test":
            ran = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", commands],
                capture_output=True,
                text=True,
                timeout=120,
                cwd=place.directory,
                env=place.environment,
            )
            assert ran.returncode == 0, f"{commands}\n{ran.stdout}\n{ran.stderr}"
    assert "shipped: config.yaml, my_rewards.py" in ran.stdout, "the last block's"
    assert len(list((place.directory / "slurm").glob("job-*"))) == 2
    assert (place.directory / "runs" / "ppo-llama3.1-70b.launch" / "job.sbatch").exists()


def test_the_exit_code_is_one() -> None:
    assert f"exit code {EXIT_STOPPED}" in " ".join(PAGE.split())
