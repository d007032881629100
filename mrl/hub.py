"""Names of models: a directory, or `organization/name[@revision]` on the hub, and the place of their files on this
machine; single files of data sets.

The hub's library takes a second to load, so code that only looks for a file uses the cache's layout directly.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mrl import files
from mrl.errors import DataError, ModelError, MrlError

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
FILES = ("*.json", "*.jinja", "*.safetensors", "*.model", "*.txt")
"""Files of a model to download: settings, tokenizer, chat template and weights, never a pickle."""
NOT_FILES = ("*/*", "consolidated*")
"""Files among these to skip: folders, such as `original/`, and second copies of the weights in another form."""
_REPOSITORY = re.compile(r"(?!.*(?:--|\.\.|\.git$))\b[\w.-]{1,96}\b/\b[\w.-]{1,96}\b", re.ASCII)
_REVISION = re.compile(r"(?!.*\.\.)\w[\w./-]*", re.ASCII)
_SNAPSHOT = re.compile(r"models--([^/]+)--([^/]+)/snapshots/([0-9a-f]{40})")

_MORE_TEMPLATES = "additional_chat_templates/*.jinja"


@dataclass(frozen=True)
class HubName:
    """A model or data set on the hub, with its revision: a branch, a tag or a commit."""

    repository: str
    revision: str = "main"
    kind: Literal["model", "dataset"] = "model"

    @classmethod
    def parse(cls, name: str) -> HubName | None:
        """Return the hub's model of that name. Return None if it is a directory, or cannot be a name on the hub."""
        repository, at, revision = name.partition("@")
        is_name = _REPOSITORY.fullmatch(repository) and (not at or _REVISION.fullmatch(revision))
        return cls(repository, revision or "main") if is_name and _directory(name) is None else None

    def __str__(self) -> str:
        return self.repository if self.revision == "main" else f"{self.repository}@{self.revision}"

    @property
    def command(self) -> str:
        """Return the command that downloads it by hand."""
        kind = "" if self.kind == "model" else f" --repo-type {self.kind}"
        revision = "" if self.revision == "main" else f" --revision {self.revision}"
        return f"hf download{kind} {self.repository}{revision}"


def local_files(name: str) -> Path | None:
    """Return the directory of that name, or else the model's snapshot in the hub's cache, with config.json and perhaps
    more."""
    if os.path.isdir(directory := os.path.expanduser(name)):
        return Path(directory)
    if (hub := HubName.parse(name)) is None:
        return None
    from huggingface_hub import constants

    cached = Path(constants.HF_HUB_CACHE, f"models--{hub.repository.replace('/', '--')}")
    ref = cached / "refs" / hub.revision
    snapshot = cached / "snapshots" / (ref.read_text(encoding="utf-8").strip() if ref.is_file() else hub.revision)
    return snapshot if (snapshot / "config.json").is_file() else None


def neither(name: str) -> str:
    """Return a message about a name that is not a directory and not a name on the hub."""
    directory = os.path.abspath(os.path.expanduser(name))
    return f'{directory} is not a directory, and "{name}" is not a name on the hub (organization/name[@revision])'


def is_offline() -> bool:
    from huggingface_hub import constants

    return constants.is_offline_mode()


def model_directory(name: str, *, download: bool = False) -> Path:
    """Return the directory of a model. A snapshot in the hub's cache must be complete.

    With `download`, missing files are downloaded, with progress on stderr, unless HF_HUB_OFFLINE is set.
    """
    if (own := _directory(name)) is not None:
        return own
    if (hub := HubName.parse(name)) is None:
        raise ModelError(neither(name), fix="use a Hugging Face model directory, or a model's name on the hub")
    snapshot, missing = _cached(hub)
    if snapshot is not None and not missing:
        return snapshot
    if not download or is_offline():
        raise _not_here(hub, snapshot, missing)
    # Complete a partial snapshot at its own commit, because the branch may have moved.
    directory = _download(hub if snapshot is None else HubName(hub.repository, snapshot.name))
    if missing := missing_files(directory):
        fix = "if you trust it, load it with transformers, `save_pretrained` it, and use that directory"
        raise ModelError(
            f"the model on the hub has no {', '.join(missing)}: it has no safetensors", where=str(hub), fix=fix
        )
    return directory


def missing_files(directory: Path) -> list[str]:
    """Return the missing files without which a model cannot be loaded. Broken links count as missing."""
    try:
        index = json.loads(files.read_text(directory / INDEX_FILE))
        weights = sorted(set(index["weight_map"].values()))
    except OSError:
        weights = [SINGLE_FILE]
    except (ValueError, TypeError, KeyError, AttributeError):
        weights = []  # the reader of weights reports the problem with the index
    return [name for name in ("config.json", *weights) if not (directory / name).is_file()]


def check_files(directory: Path) -> None:
    """Reject a model directory that contains a FIFO, a device or similar: libraries would wait forever."""
    for path in (*(path for name in FILES for path in directory.glob(name)), *directory.glob(_MORE_TEMPLATES)):
        try:
            files.check_regular(path, None if path.suffix == ".safetensors" else files.MAX_TEXT_BYTES)
        except FileNotFoundError:
            continue  # a broken link: `missing_files` reports it if it matters
        except OSError as error:
            raise ModelError(str(error.strerror), where=str(path), fix="put the model's own file there") from error


def dataset_file(repository: str, revision: str, path: str) -> Path:
    """Return a file of a data set, from the hub's cache or downloaded, unless HF_HUB_OFFLINE is set."""
    import httpx
    from huggingface_hub import hf_hub_download

    hub = HubName(repository, revision, "dataset")
    try:
        return Path(hf_hub_download(repository, path, repo_type=hub.kind, revision=revision))
    except (OSError, httpx.HTTPError, RuntimeError, ValueError) as error:
        unavailable = _not_here(hub, None, ())
        what, fix = (unavailable.what, unavailable.fix) if is_offline() else _explained(hub, error)
        fix += "; or pass the files: --from FILE ..."
        raise DataError(what, where=f"{hub}: {path}", fix=fix) from error


def node_copy(directory: str, *, download: bool = False) -> Path:
    """Return this node's copy of the driver's model directory.

    If nodes share a file system, it is the same directory. Otherwise it is the same commit in this node's own hub
    cache, because the path of a snapshot contains the model and the commit.
    """
    snapshot = _SNAPSHOT.fullmatch("/".join(Path(directory).parts[-3:]))
    if snapshot is None or (os.path.isdir(directory) and not missing_files(Path(directory))):
        return Path(directory)
    organization, name, commit = snapshot.groups()
    return model_directory(f"{organization}/{name}@{commit}", download=download)


def node_lacks(directories: Sequence[str], download: bool) -> str:
    """Return why this node cannot get the driver's models, or an empty string if it has or downloads them."""
    try:
        missing = [name for name in directories if not node_copy(name, download=download).is_dir()]
    except MrlError as error:
        return str(error)
    return f"missing directory: {', '.join(missing)}" if missing else ""


def _directory(name: str) -> Path | None:
    path = os.path.abspath(os.path.expanduser(name))
    return Path(path) if os.path.isdir(path) else None


def _cached(hub: HubName) -> tuple[Path | None, list[str]]:
    """Return the snapshot in the cache, and its missing files by the hub's list or by its own list of weights."""
    from huggingface_hub.errors import IncompleteSnapshotError, LocalEntryNotFoundError

    try:
        snapshot = _snapshot(hub, is_local=True)
    except IncompleteSnapshotError as error:
        snapshot = Path(error.snapshot_path)
        return snapshot, missing_files(snapshot) or ["some of its files"]
    except LocalEntryNotFoundError:
        return None, []
    return snapshot, missing_files(snapshot)


def _snapshot(hub: HubName, *, is_local: bool) -> Path:
    from huggingface_hub import snapshot_download

    name, revision, patterns, excluded = hub.repository, hub.revision, [*FILES], [*NOT_FILES]
    path = snapshot_download(
        name, revision=revision, allow_patterns=patterns, ignore_patterns=excluded, local_files_only=is_local
    )
    return Path(path)


def _not_here(hub: HubName, snapshot: Path | None, missing: Sequence[str]) -> ModelError:
    from huggingface_hub import constants

    place = f"the hub's cache {constants.HF_HUB_CACHE}"
    what = f"{place} does not have it" if snapshot is None else f"{snapshot} is missing {', '.join(missing)}"
    offline_note = ", and HF_HUB_OFFLINE forbids the download" if is_offline() else ""
    return ModelError(f"{what}{offline_note}", where=str(hub), fix=f"{hub.command}, on a machine with a network")


def _download(hub: HubName) -> Path:
    import httpx

    try:
        return _snapshot(hub, is_local=False)
    except (OSError, httpx.HTTPError, RuntimeError, ValueError) as error:
        what, fix = _explained(hub, error)
        raise ModelError(what, where=str(hub), fix=fix) from error


def _explained(hub: HubName, error: Exception) -> tuple[str, str]:
    """Return why a download failed, and how to fix it."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    folder = "datasets/" if hub.kind == "dataset" else ""
    page = f"{constants.ENDPOINT}/{folder}{hub.repository}"
    if isinstance(error, GatedRepoError):
        return (
            "it is gated: its owner must grant access",
            f"request access at {page}, then `hf auth login`, or set HF_TOKEN",
        )
    if isinstance(error, RepositoryNotFoundError):
        fix = "check the name; for a private one, `hf auth login` or set HF_TOKEN"
        return f"{constants.ENDPOINT} has no such {hub.kind}, or it is private", fix
    if isinstance(error, RevisionNotFoundError):
        return f'it has no revision "{hub.revision}"', f"{page}/commits/main lists branches, tags and commits"
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in reason:
        return f"{constants.HF_HUB_CACHE} is full: {reason}", "free some space, or set HF_HOME to a larger place"
    if isinstance(error, PermissionError):
        return f"cannot write to the cache: {reason}", "set HF_HOME to your own directory"
    fix = f"check HF_ENDPOINT and the proxy; or run {hub.command} on a machine with a network, and share its HF_HOME"
    return f"it cannot be downloaded from {constants.ENDPOINT}: {reason}", fix
