"""Names of models: their meaning, the place of their files, and the errors if files are missing."""

from __future__ import annotations

import errno
import hashlib
import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError

from mrl.errors import DataError, ModelError
from mrl.hub import HubName, dataset_file, local_files, missing_files, model_directory, node_copy, node_lacks
from tests.hub import Hub, commit_of, hub_service, make_hub_cache

NAME = "maker/tiny"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Directory of a model, including files that must not be downloaded."""
    directory = tmp_path / "made"
    directory.mkdir()
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (directory / "config.json").write_text(json.dumps({"num_hidden_layers": 2, "num_attention_heads": 4}))
    (directory / "tokenizer.json").write_text("{}")
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for number, file in enumerate(weight_map.values()):
        (directory / file).write_bytes(bytes([number]) * 1000)
    for file in ("pytorch_model.bin", "README.md", "consolidated.safetensors"):
        (directory / file).write_bytes(file.encode())
    return directory


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty cache of the hub, in offline mode."""
    cache = tmp_path / "cache"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return cache


@pytest.fixture
def hub(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Service of the hub with one model."""
    with hub_service({NAME: model}) as service:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", service.endpoint)
        template = service.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield service


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", HubName("Qwen/Qwen2.5-0.5B-Instruct")),
        ("a/b@v1.0", HubName("a/b", "v1.0")),
        ("a/b@refs/pr/3", HubName("a/b", "refs/pr/3")),
        *[(name, None) for name in ("model", "a/b/c", "./a", "/a/b", "a/b@", "a/b@../c", "a--b/c", "a/b.git", "~/a")],
    ],
)
def test_what_a_name_means_on_the_hub(name: str, meaning: HubName | None, cache: Path) -> None:
    assert HubName.parse(name) == meaning


def test_a_directory_comes_first_and_becomes_absolute(
    model: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_hub_cache(cache, NAME, model)
    shutil.copytree(model, "maker/tiny")
    assert model_directory(NAME) == tmp_path / "maker" / "tiny"
    assert local_files(NAME) == Path(NAME)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert model_directory("~/made") == model


@pytest.mark.parametrize("revision", [None, "v1"])
def test_the_cache_is_enough(revision: str | None, model: Path, cache: Path) -> None:
    snapshot = make_hub_cache(cache, NAME, model, revision or "main")
    name = NAME if revision is None else f"{NAME}@{revision}"
    assert model_directory(name, download=True) == local_files(name) == snapshot
    assert model_directory(f"{NAME}@{snapshot.name}") == snapshot


def test_what_is_not_in_the_cache_comes_with_its_command(cache: Path) -> None:
    assert local_files(NAME) is None
    with pytest.raises(ModelError, match=re.escape(f"{NAME}@v1: the hub's cache {cache} does not have it")) as caught:
        model_directory(f"{NAME}@v1", download=True)
    assert "HF_HUB_OFFLINE" in caught.value.what
    assert caught.value.fix.startswith(f"hf download {NAME} --revision v1, ")


@pytest.mark.parametrize("lost", ["config.json", "model-00002-of-00002.safetensors"])
def test_a_snapshot_in_part_is_not_taken_for_whole(lost: str, model: Path, cache: Path) -> None:
    snapshot = make_hub_cache(cache, NAME, model)
    (snapshot / lost).resolve().unlink()
    assert missing_files(snapshot) == [lost]
    with pytest.raises(ModelError, match=f"is missing {lost}, and HF_HUB_OFFLINE"):
        model_directory(NAME, download=True)


def test_a_download_brings_what_is_read_and_is_not_repeated(hub: Hub, cache: Path, model: Path) -> None:
    with pytest.raises(ModelError, match="does not have it"):
        model_directory(NAME)
    assert hub.asked == [], "only `download` asks the hub"
    directory = model_directory(NAME, download=True)
    assert directory == cache / "models--maker--tiny" / "snapshots" / commit_of(NAME, model)
    unread = {"pytorch_model.bin", "README.md", "consolidated.safetensors"}
    assert {file.name for file in directory.iterdir()} == {file.name for file in model.iterdir()} - unread
    assert all((directory / file.name).read_bytes() == file.read_bytes() for file in directory.iterdir())
    assert any(line.startswith("GET /blobs/") for line in hub.asked), "weights are served by a redirect"
    hub.asked.clear()
    assert model_directory(NAME, download=True) == model_directory(NAME) == directory
    assert hub.asked == []


@pytest.mark.parametrize("lost", ["tokenizer.json", "model-00001-of-00002.safetensors"])
def test_what_an_interruption_left_is_completed_at_its_commit(lost: str, hub: Hub, model: Path, tmp_path: Path) -> None:
    snapshot = model_directory(NAME, download=True)
    moved = Path(shutil.copytree(model, tmp_path / "moved"))
    (moved / "config.json").write_text("{}")
    hub.models = {NAME: moved, f"{NAME}@before": model}
    (snapshot / lost).unlink()
    with pytest.raises(ModelError, match="is missing"):
        model_directory(NAME)
    assert model_directory(NAME, download=True) == snapshot
    assert (snapshot / lost).read_bytes() == (model / lost).read_bytes()


@pytest.mark.parametrize(
    ("name", "what", "fix"),
    [
        ("maker/other", "has no such model, or it is private", "hf auth login"),
        (f"{NAME}@v9", 'it has no revision "v9"', "/maker/tiny/commits/main"),
    ],
)
def test_what_the_hub_does_not_have(name: str, what: str, fix: str, hub: Hub) -> None:
    with pytest.raises(ModelError, match=re.escape(what)) as caught:
        model_directory(name, download=True)
    assert caught.value.where == name
    assert fix in caught.value.fix


@pytest.mark.parametrize("token", [None, "hf_mine"])
def test_a_gated_model_says_where_to_ask(token: str | None, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.gated.add(NAME)
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(ModelError, match=f"{NAME}: it is gated") as caught:
        model_directory(NAME, download=True)
    assert f"request access at {hub.endpoint}/{NAME}, then `hf auth login`, or set HF_TOKEN" in caught.value.fix


def test_a_hub_that_is_out_of_order_or_out_of_reach(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.is_down = True
    with pytest.raises(ModelError, match=f"cannot be downloaded from {hub.endpoint}") as caught:
        model_directory(NAME, download=True)
    assert f"hf download {NAME} on a machine with a network" in caught.value.fix
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(ModelError, match=r"cannot be downloaded from http://127\.0\.0\.1:1"):
        model_directory(NAME, download=True)


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "is full: .*No space left"),
        (PermissionError(errno.EACCES, "denied"), "cannot write to the cache"),
    ],
)
def test_a_full_disk_and_a_cache_of_somebody_else(
    error: Exception, what: str, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, local_files_only: bool, **__: object) -> None:
        raise LocalEntryNotFoundError("nothing") if local_files_only else error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelError, match=what) as caught:
        model_directory(NAME, download=True)
    assert "HF_HOME" in caught.value.fix


def test_a_model_of_pickles_alone_is_refused(hub: Hub, model: Path) -> None:
    for file in (*model.glob("*.safetensors"), model / "model.safetensors.index.json"):
        file.unlink()
    with pytest.raises(ModelError, match=r"the model on the hub has no model\.safetensors: it has no safetensors"):
        model_directory(NAME, download=True)


def test_a_node_has_the_drivers_directory_or_its_own_snapshot_of_that_commit(
    hub: Hub, model: Path, cache: Path, tmp_path: Path
) -> None:
    elsewhere = make_hub_cache(tmp_path / "driver", NAME, model)
    assert node_copy(str(elsewhere)) == elsewhere, "nodes share a file system"
    assert node_copy(str(tmp_path / "made")) == tmp_path / "made"
    gone = str(elsewhere)
    (tmp_path / "driver").rename(tmp_path / "away")
    own = cache / "models--maker--tiny" / "snapshots" / elsewhere.name
    assert "does not have it" in node_lacks([gone], False)
    assert node_lacks([gone], True) == ""
    assert node_copy(gone) == own
    assert node_lacks([str(tmp_path / "nowhere")], True) == f"missing directory: {tmp_path}/nowhere"


SUMS, FILE = "maker/sums", "main/train.jsonl"
COMMIT = hashlib.sha1(SUMS.encode()).hexdigest()


@pytest.fixture
def sums(hub: Hub, tmp_path: Path) -> Hub:
    """Service of the hub with a data set at one commit."""
    directory = tmp_path / "sums"
    (directory / "main").mkdir(parents=True)
    (directory / FILE).write_text('{"question": "1+1", "answer": "2"}\n')
    hub.models[SUMS] = directory
    assert commit_of(SUMS, directory) == COMMIT, (
        "the commit only covers files outside of folders, and this data set has none"
    )
    return hub


def test_a_file_of_a_data_set_is_downloaded_once(sums: Hub) -> None:
    path = dataset_file(SUMS, COMMIT, FILE)
    assert path.read_text() == '{"question": "1+1", "answer": "2"}\n'
    assert path.name == "train.jsonl"
    assert sums.asked[-1] == f"GET /datasets/{SUMS}/resolve/{COMMIT}/{FILE}"
    sums.asked.clear()
    assert dataset_file(SUMS, COMMIT, FILE) == path
    assert sums.asked == []


@pytest.mark.parametrize(
    ("repository", "revision", "what"),
    [
        ("maker/other", COMMIT, "has no such dataset, or it is private"),
        (SUMS, "9" * 40, f'it has no revision "{"9" * 40}"'),
    ],
)
def test_a_data_set_that_the_hub_does_not_have(repository: str, revision: str, what: str, sums: Hub) -> None:
    with pytest.raises(DataError, match=what) as caught:
        dataset_file(repository, revision, FILE)
    assert caught.value.where == f"{repository}@{revision}: {FILE}"
    assert caught.value.fix.endswith("; or pass the files: --from FILE ...")


def test_a_data_set_without_a_network(sums: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)  # the hub's library waits between retries
    sums.is_down = True
    with pytest.raises(DataError, match=f"it cannot be downloaded from {sums.endpoint}"):
        dataset_file(SUMS, COMMIT, FILE)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=f"the hub's cache {cache} does not have it, and HF_HUB_OFFLINE") as caught:
        dataset_file(SUMS, COMMIT, FILE)
    assert caught.value.fix.startswith(f"hf download --repo-type dataset {SUMS} --revision {COMMIT}, ")
