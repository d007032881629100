"""Canaries: a secret in a configuration appears in no rendering, error, warning or run directory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from mrl.config.resolved.load import Resolved, load_config
from mrl.config.resolved.render import render, render_difference
from mrl.config.resolved.run_directory import open_run_directory
from mrl.config.schema import Config
from mrl.errors import ConfigError

CANARY = "canary-5up3r-hidden"
Write = Callable[..., str]


def everything_written(resolved: Resolved[Config], other: Resolved[Config]) -> str:
    with open_run_directory(resolved, may_go_on=True) as directory:
        pass
    files = [path for path in directory.rglob("*") if path.is_file()]
    written = "".join(path.read_text() for path in files) + "".join(str(path) for path in directory.rglob("*"))
    return written + render(resolved) + render_difference(other, resolved) + "".join(resolved.warnings)


@pytest.mark.parametrize(
    "overrides",
    [
        [f"rollout.vllm.hf_overrides.hf_token={CANARY}"],
        ["rollout.vllm.hf_overrides.hf_token=${oc.env:MRL_TEST_TOKEN}"],
        ["rollout.vllm.hf_overrides.tokenizer=${oc.env:MRL_TEST_TOKEN}"],
        ["rollout.vllm.hf_overrides.tokenizer=${oc.env:MRL_TEST_UNSET_TOKEN," + CANARY + "}"],
        [
            f"rollout.vllm.hf_overrides.hf_token={CANARY}",
            "rollout.vllm.hf_overrides.tokenizer=${rollout.vllm.hf_overrides.hf_token}",
        ],
        [f"rollout.vllm.hf_overrides={{api_key: {CANARY}, b: [{{password: {CANARY}}}]}}"],
        [f"rollout.vllm.hf_overrides={{credentials: {{user: me, value: {CANARY}}}}}"],
        [f"rollout.vllm.hf_overrides.tokenizer=https://me:{CANARY}@host/x"],
        [f"rollout.vllm.hf_overrides.tokenizer={CANARY}"],  # as written in the environment, without its name
        [f"model.path=org/{CANARY}"],  # hub names come back in a warning
        [f"rollout.vllm.hf_overrides={{{CANARY}: 1}}"],
    ],
    ids=repr,
)
def test_canary(overrides: list[str], valid: str, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MRL_TEST_TOKEN", CANARY)
    resolved = load_config(write(valid), overrides)
    assert CANARY in repr(resolved.config), "the run itself needs it"
    written = everything_written(resolved, load_config("run.yaml"))
    assert CANARY not in written
    assert "redacted" in written


def test_a_number_can_be_a_secret(valid: str, write: Write) -> None:
    resolved = load_config(write(valid), ["rollout.vllm.hf_overrides.api_key=8675309001"])
    assert "8675309001" not in everything_written(resolved, load_config("run.yaml"))


def test_a_short_secret_is_hidden_where_it_stands(valid: str, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MRL_TEST_TOKEN", "xq7")
    resolved = load_config(write(valid), ["rollout.vllm.hf_overrides.tokenizer=${oc.env:MRL_TEST_TOKEN}"])
    assert "xq7" not in everything_written(resolved, load_config("run.yaml"))


def test_two_different_secrets_differ(valid: str, write: Write) -> None:
    one, two = (
        load_config(write(valid), [f"rollout.vllm.hf_overrides.hf_token={value}-canary"])
        for value in ("first", "second")
    )
    assert "hf_token" in render_difference(one, two)
    assert render_difference(one, one) == ""


def test_what_is_no_secret_stays(valid: str, write: Write) -> None:
    resolved = load_config(
        write(valid), ["rollout.vllm.hf_overrides.hf_token=true", "rollout.vllm.max_num_batched_tokens=4096"]
    )
    text = render(resolved)
    assert "hf_token: true " in text
    assert "max_num_batched_tokens: 4096 " in text


@pytest.mark.needs
@pytest.mark.parametrize(
    ("content", "overrides"),
    [
        ("", ["hf_token=" + CANARY, "actor.hub_token=" + CANARY]),
        ("", ["batch.prompts_per_step=${oc.env:MRL_TEST_TOKEN}"]),
        ("", ["cluster.device=${oc.env:MRL_TEST_TOKEN}"]),
        ("", ["run.dir=" + CANARY]),
        ("", ["model.path=./" + CANARY]),
        ("", ["algorithm.advantage=${oc.env:MRL_TEST_TOKEN}"]),
        ("", ["rollout.vllm.hf_overrides.hf_token=" + CANARY, "batch.samples_per_update=5"]),
        ("", ["rollout.vllm.hf_tokn=" + CANARY]),
        ("", [CANARY]),
        ("", [CANARY + "=1"]),
        ("", ["actor.optimizer={password: [" + CANARY]),
        ("hf_token: *" + CANARY + "\n", []),
        ("hf_token: !!" + CANARY + " x\n", []),
        ("extends: " + CANARY + ".yaml\n", []),
        ("hf_token: ${oc.env:MRL_TEST_UNSET_TOKEN}${" + CANARY + "\n", []),
        ("hf_token: !!int " + CANARY + "\n", []),
    ],
    ids=repr,
)
def test_canary_in_a_mistake(
    content: str, overrides: list[str], valid: str, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MRL_TEST_TOKEN", CANARY)
    with pytest.raises(ConfigError) as caught:
        load_config(write(content + valid), overrides)
    assert CANARY not in str(caught.value)
    assert CANARY not in repr([dataclasses.astuple(problem) for problem in caught.value.problems])


@pytest.mark.parametrize(
    "line",
    [
        "password: !!int " + CANARY,
        "password: *" + CANARY,
        "password: !" + CANARY + " x",
        "password: &" + CANARY + " 1\nother: &" + CANARY + " 2\nlast: [",
        "password: 012345670123",
        "password: ${" + CANARY,
        "password: ${oc.decode:'" + CANARY + " {'}",
        "password: {" + CANARY + ": [1, 2}",
    ],
)
def test_a_secret_that_is_written_out_and_cannot_be_read(line: str, valid: str, write: Write) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(line + "\n" + valid))
    assert CANARY not in str(caught.value)
    assert "012345670123" not in str(caught.value)


def test_a_piece_of_a_secret_is_not_quoted(valid: str, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MRL_TEST_TOKEN", "first-half {second-half")
    with pytest.raises(ConfigError) as caught:
        load_config(write(valid), ["run.name=${oc.decode:${oc.env:MRL_TEST_TOKEN}}"])
    assert [str(problem) for problem in caught.value.problems] == ["command line: run.name: cannot be resolved"]


def test_a_missing_variable_is_named_though_its_value_would_be_secret(valid: str, write: Write) -> None:
    with pytest.raises(ConfigError, match="Environment variable 'MRL_TEST_UNSET_TOKEN' not found"):
        load_config(write(valid), ["rollout.vllm.hf_overrides.hf_token=${oc.env:MRL_TEST_UNSET_TOKEN}"])


def test_secrets_inside_a_list_are_hidden_elsewhere(valid: str, write: Write) -> None:
    overrides = [
        f"rollout.vllm.hf_overrides={{a: [{{password: {CANARY}}}], secret: [other-canary-value]}}",
        "rollout.vllm.hf_overrides.tokenizer=${rollout.vllm.hf_overrides.a[0].password}",
        "rollout.vllm.hf_overrides.revision=${rollout.vllm.hf_overrides.secret[0]}",
    ]
    resolved = load_config(write(valid), overrides)
    written = everything_written(resolved, load_config("run.yaml"))
    assert CANARY not in written
    assert "other-canary-value" not in written
    assert CANARY not in repr(resolved.secrets)


def test_a_secret_names_no_directory(valid: str, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MRL_TEST_TOKEN", CANARY)
    with pytest.raises(
        ConfigError, match=r"command line: run\.name: contains a secret, which would become the name of a directory"
    ):
        load_config(write(valid), ["run.name=${oc.env:MRL_TEST_TOKEN}"])
    assert not Path("runs").exists()


def test_what_rewards_are_given_is_secret_whatever_it_is_called(valid: str, write: Write) -> None:
    given = "reward.environment={JUDGE_KEY: abcd-canary-1, DB_PASS: abcd-canary-2, MY_PAT: abcd-canary-3}"
    resolved = load_config(write(valid), [given])
    assert "canary" not in everything_written(resolved, load_config("run.yaml"))
    assert resolved.config.reward.environment["MY_PAT"] == "abcd-canary-3", "the functions have it"
