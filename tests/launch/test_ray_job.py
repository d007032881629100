"""Files that are sent with a job of a Ray cluster: the user's code, and no secrets next to it."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from mrl.launch.ray_job import RUNTIME_ENVIRONMENT, RayJob, write_job_directory


def test_secrets_beside_the_code_stay_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "mine"
    code = {"mine/__init__.py", "mine/rewards.py", "mine/deeper/more.py", "mine/data/words.txt"}
    secrets = (".env", ".git/config", "deeper/.netrc", "server.pem", "deeper/tls.key", "id_rsa", "__pycache__/x.pyc")
    for name in (*(each.removeprefix("mine/") for each in code), *secrets):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("x")
    (tmp_path / "elsewhere.txt").write_text("secret")
    (package / "link.txt").symlink_to(tmp_path / "elsewhere.txt")
    job = RayJob("run: {}\n", (Path("mine"),), {"MODEL": "m"}, ())
    out = tmp_path / "out"
    out.mkdir()
    write_job_directory(job, out)
    shipped = {str(path.relative_to(out / "job")) for path in (out / "job").rglob("*") if path.is_file()}
    assert shipped == {"config.yaml"} | code
    assert stat.S_IMODE((out / RUNTIME_ENVIRONMENT).stat().st_mode) == 0o600
