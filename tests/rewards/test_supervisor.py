"""The supervisor's clocks and queue, and the environment of its workers, read from inside the workers."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from mrl.config.reward import RewardConfig, RewardFunctionConfig
from mrl.errors import RewardError
from mrl.rewards import pool
from mrl.rewards.manager import RewardManager
from mrl.rewards.messages import config_from_json, config_to_json, to_json
from mrl.rewards.outcome import Failure, Outcome, Score
from mrl.rewards.pool import worker_environment
from tests.rewards.conftest import Bench, make_sample

WITNESS = "tests.rewards.witness:score"


def parts_of(outcomes: list[Outcome], name: str) -> list[float]:
    """Return one part of every outcome, all of which must be scores."""
    assert all(isinstance(outcome, Score) for outcome in outcomes), outcomes
    return [outcome.parts[f"f0/{name}"] for outcome in outcomes if isinstance(outcome, Score)]


def test_the_clock_starts_anew_between_an_answer_and_the_word_that_follows_it(bench: Bench) -> None:
    """Both come at once, but where an answer fills the read: then the worker's clock runs while its word is on the way.

    The clock must not be that of the sample, or the worker would end for having taken more than a second.
    """
    smile = "\N{GRINNING FACE}"  # twelve bytes of JSON
    numbers = {"f0": 1.0, "f0/pid": 12345.0, "f0/begin": 1234.567890123, "f0/end": 1235.767890123}
    num_bytes = len(to_json({"scores": [{"value": 1.0, "parts": numbers}], "seconds": 1.201234567890123}))
    one = len(to_json({f"f0/00{smile * 90}": 1.0})) - 1  # with its comma and without braces
    num_names, left = divmod((1 << 16) - 20 - num_bytes, one)
    assert 100 < left < 1000, "one more name fills the rest"
    smiles, letters = divmod(left - len(',"f0/":1.0'), 12)
    names = [f"{number:02}{smile * 90}" for number in range(num_names)] + [smile * smiles + "y" * letters]
    manager = bench.manager("tests.rewards.witness:at_length", num_workers=1, limit_s=5)
    outcomes = manager.score([make_sample(s=1.1, names=names), make_sample(names=[])])
    assert len(set(parts_of(outcomes, "pid"))) == 1


def test_a_worker_may_wait_for_its_next_sample_longer_than_any_limit(bench: Bench) -> None:
    manager = bench.manager(WITNESS, num_workers=1, limit_s=0.4, start_limit_s=0.9)
    first = manager.score([make_sample()])
    time.sleep(1.3)
    assert parts_of(manager.score([make_sample()]), "pid") == parts_of(first, "pid")


def test_samples_are_begun_in_their_order_and_many_at_a_time(bench: Bench) -> None:
    alone = parts_of(bench.manager(WITNESS, num_workers=1).score([make_sample(s=0.02) for _ in range(8)]), "begin")
    assert alone == sorted(alone)
    outcomes = bench.manager(WITNESS, num_workers=3, limit_s=5).score([make_sample(s=0.6) for _ in range(3)])
    assert len(set(parts_of(outcomes, "pid"))) == 3
    assert max(parts_of(outcomes, "begin")) < min(parts_of(outcomes, "end")), "all three at the same time"


def test_only_what_broke_its_process_costs_a_worker(bench: Bench) -> None:
    labels = {"f0": RewardFunctionConfig(name=WITNESS), "f1": RewardFunctionConfig(name="tests.rewards.hostile:score")}
    manager = bench.manager(functions=labels, num_workers=1)

    def pid() -> float:
        return parts_of(manager.score([make_sample()]), "pid")[0]

    first = pid()
    manager.score([make_sample("ValueError"), make_sample("nan"), make_sample("SystemExit")])
    assert pid() == first
    for do in ("memory", "os._exit 3", "endless"):
        before = pid()
        manager.score([make_sample(do)])
        assert pid() != before, f"a fresh process after {do}"


def flaky(bench: Bench, tmp_path: Path, attempts: str, import_s: float = 0.0, **settings: Any) -> RewardManager:
    """Return a manager whose workers need `import_s` to start, and end during the start in these attempts."""
    (tmp_path / "tries").write_text("")
    environment = {"MRL_TRIES": str(tmp_path / "tries"), "MRL_FLAKY": attempts, "MRL_IMPORT_S": str(import_s)}
    functions = {"f0": RewardFunctionConfig(name="tests.rewards.flaky_import:score")}
    return bench.manager(functions=functions, num_workers=1, environment=environment, **settings)


def test_an_import_has_a_clock_of_its_own(bench: Bench, tmp_path: Path) -> None:
    manager = flaky(bench, tmp_path, "", import_s=0.6, limit_s=0.3, start_limit_s=20)
    left, good = manager.score([make_sample("leave"), make_sample()])
    assert isinstance(left, Failure)
    assert isinstance(good, Score), "the second worker had the time to start as well"
    with pytest.raises(RewardError, match=r"3 in a row failed: it was not ready within 0\.2 s"):
        flaky(bench, tmp_path, "", import_s=0.6, limit_s=30, start_limit_s=0.2)


def test_what_a_function_imports_late_is_not_charged_to_its_first_sample(bench: Bench) -> None:
    functions = {"f0": RewardFunctionConfig(name="tests.rewards.warms_up:score")}
    manager = bench.manager(functions=functions, limit_s=0.3, start_limit_s=20)
    (outcome,) = manager.score([make_sample()])
    assert isinstance(outcome, Score), outcome
    with pytest.raises(RewardError, match=r"tests\.rewards\.warms_up:score cannot be loaded: OSError: no library"):
        bench.manager(functions=functions, environment={"MRL_BROKEN": "1"})


def test_starts_that_fail_count_in_a_row_only(bench: Bench, tmp_path: Path) -> None:
    manager = flaky(bench, tmp_path, "1,2,4,5")
    (left,) = manager.score([make_sample("leave")])
    assert isinstance(left, Failure)
    assert left.detail == "its process exited with status 3"
    (good,) = manager.score([make_sample()])
    assert isinstance(good, Score)
    assert len((tmp_path / "tries").read_text()) == 6, (
        "two failed starts, a worker that left, two failed starts, a worker that runs"
    )


def test_three_starts_in_a_row_that_fail_end_the_run(bench: Bench, tmp_path: Path) -> None:
    with pytest.raises(RewardError) as caught:
        flaky(bench, tmp_path, "1,2,3")
    assert str(caught.value) == ("no reward worker can start; 3 in a row failed: its process exited with status 9")
    assert len((tmp_path / "tries").read_text()) == 3
    manager = flaky(bench, tmp_path, "2,3,4")
    with pytest.raises(RewardError, match="no reward worker can start; 3 in a row failed"):
        manager.score([make_sample("leave"), make_sample()])


def test_a_pause_earns_no_samples_above_the_rate(bench: Bench) -> None:
    manager = bench.manager(WITNESS, num_workers=4, max_samples_per_s=20.0)
    manager.score([make_sample()])
    time.sleep(0.5)
    begins = sorted(parts_of(manager.score([make_sample() for _ in range(7)]), "begin"))
    assert begins[-1] - begins[0] >= 3 / 20.0  # a busy machine may delay the first; earned samples begin at once
    assert begins[-1] - begins[0] < 3, "and it is the rate that was given"


def test_a_worker_is_held_within_its_limits(bench: Bench) -> None:
    cores = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (cores[1], cores[1]))  # what this process may, a worker may not
    try:
        manager = bench.manager("tests.rewards.witness:limits", memory_bytes=(1 << 28) + 4096, limit_s=5)
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, cores)
    (outcome,) = manager.score([make_sample()])
    assert isinstance(outcome, Score), outcome
    assert {name.removeprefix("f0/"): value for name, value in outcome.parts.items()} == {
        "f0": 1.0,
        "memory_bytes": (1 << 28) + 4096,
        "memory_bytes_at_most": (1 << 28) + 4096,
        "file_bytes": 256 << 20,
        "core_bytes": 0,
        "leads_a_session": 1,
        "ends_with_the_supervisor": 1,
        "adopts_orphans": 1,
        "standard_is_null": 1,
        "others_open": 1,  # its channel
        "goes_first": 1000,
        "threads": 1,
        "has_path": 1,
        "num_variables": 0,
    }


def test_the_environment_is_a_short_list_and_what_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    inherited = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH")
    for name in inherited:
        monkeypatch.setenv(name, f"the {name}")
    monkeypatch.setenv("MRL_OTHER_TOKEN", "canary")
    monkeypatch.setenv("PYTHONPATH", "not passed on unchanged")
    variables = worker_environment({"GIVEN": "yes", "OMP_NUM_THREADS": "3", "TZ": "UTC"})
    modules = variables.pop("PYTHONPATH").split(os.pathsep)
    assert str(Path(__file__).parents[2]) in modules
    assert all(os.path.isabs(path) for path in modules)
    given = {"GIVEN": "yes", "OMP_NUM_THREADS": "3", "TZ": "UTC", "MALLOC_ARENA_MAX": "2"}
    assert variables == {name: f"the {name}" for name in inherited} | given
    monkeypatch.delenv("TMPDIR")
    assert "TMPDIR" not in worker_environment({})
    assert worker_environment({})["OMP_NUM_THREADS"] == "1"


def test_the_supervisor_is_heard_while_all_are_busy(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_SILENCE_S", 1.8)
    manager = bench.manager(WITNESS, num_workers=1, limit_s=10)
    assert len(manager.score([make_sample(s=2.2)])) == 1, "its word of every second keeps the run waiting"


def test_a_supervisor_that_is_stopped_is_not_waited_for(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = bench.manager(limit_s=30)
    supervisor = min(bench.processes())
    monkeypatch.setattr(pool, "_SILENCE_S", 0.4)
    monkeypatch.setattr(pool, "_END_S", 0.4)
    os.kill(supervisor, signal.SIGSTOP)
    woken = threading.Timer(15, os.kill, [supervisor, signal.SIGCONT])  # a manager that still waits then fails here
    woken.start()
    with pytest.raises(RewardError) as caught:
        manager.score([make_sample()])
    woken.cancel()
    assert str(caught.value) == (
        f"reward: the supervisor of the reward workers (pid {supervisor}) has been silent for 0.4 s\n"
        "  fix: check whether it was stopped, or the machine is out of memory"
    )
    begin = time.monotonic()
    manager.close()
    assert time.monotonic() - begin < 15, "a supervisor that does not exit is killed"
    assert bench.settle(0) == set()


def test_every_setting_reaches_the_supervisor() -> None:
    functions = {
        "first": RewardFunctionConfig(name="gsm8k", weight=0.25, options={"last_number": True}),
        "second": RewardFunctionConfig(name="tests.rewards.witness:as_told", weight=-2.0, options={"factor": 3}),
    }
    config = RewardConfig(
        functions=functions, num_workers=7, limit_s=1.5, start_limit_s=2.5, memory_bytes=1 << 29, max_samples_per_s=8.0
    )
    assert config_from_json(config_to_json(config)) == config
    unsendable = RewardFunctionConfig(name="gsm8k", options={"pattern": {1, 2}})
    with pytest.raises(RewardError, match=r"^reward.functions: an option is not plain data: Object of type set"):
        config_to_json(RewardConfig(functions={"f": unsendable}))
