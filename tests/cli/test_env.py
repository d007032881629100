"""`mrl env` reports the actual environment."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mrl.cli import env
from mrl.cli.main import main
from mrl.libraries import failure
from mrl.preflight import node_facts
from mrl.preflight.node_facts import memory_bytes


def test_a_probe_survives_a_crash_and_a_hang() -> None:
    assert failure("import os; os.abort()", timeout_s=30) == "exit status -6"
    assert failure("import time; time.sleep(60)", timeout_s=0.3) == "no answer within 0.3 s"


def test_devices_are_within_those_of_the_machine() -> None:
    assert 0 < node_facts.usable_cpus() <= (os.cpu_count() or 1)
    assert 2**28 < memory_bytes() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert node_facts.cpu_model()


def test_no_revision_outside_a_checkout(tmp_path: Path) -> None:
    assert node_facts.git_revision(tmp_path) is None


def test_the_report_as_json_and_as_text_without_secrets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HUB_TOKEN", "correct-horse-battery")
    monkeypatch.setattr(env, "_PROBES", {"Fine": "pass", "Broken": "raise SystemExit('token correct-horse-battery')"})
    assert main(["env", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["usable"] == {
        "Fine": {"usable": True, "why": ""},
        "Broken": {"usable": False, "why": "token <redacted:HUB_TOKEN>"},
    }
    assert set(report) == {"mrl", "versions", "devices", "usable"}
    assert main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  Fine    yes" in lines
    assert "  Broken  no: token <redacted:HUB_TOKEN>" in lines


def test_gpus_are_described_with_memory_and_driver() -> None:
    gpus = [{"name": "A", "memory_mib": 81559, "driver": "1.2"}, {"name": "B", "memory_mib": None, "driver": "1.2"}]
    report = {
        "mrl": {"version": "1", "revision": None},
        "versions": {"torch": None},
        "devices": {"cpu": "C", "usable_cpus": 1.5, "memory_bytes": 2**31, "gpus": gpus},
        "usable": {"X": {"usable": True, "why": ""}},
    }
    lines = list(env.describe(report))
    assert "  torch  not installed" in lines
    assert "  GPU 0      A, 79.6 GiB, driver 1.2" in lines
    assert "  GPU 1      B, memory of the host, driver 1.2" in lines
