"""Names of models: a directory, or `organization/name[@revision]` on the hub, and where its files are on this machine;
single files of data sets.

The hub's library takes a second to load, so that what only looks for a file knows the layout of its cache.
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
"""What is downloaded of a model: settings, tokenizer, chat template and weights, and never a pickle."""
NOT_FILES = ("*/*", "consolidated*")
"""What of these is not read: folders, such as `original/`, and the weights once more in another form."""
_REPOSITORY = re.compile(r"(?!.*(?:--|\.\.|\.git$))\b[\w.-]{1,96}\b/\b[\w.-]{1,96}\b", re.ASCII)
_REVISION = re.compile(r"(?!.*\.\.)\w[\w./-]*", re.ASCII)
_SNAPSHOT = re.compile(r"models--([^/]+)--([^/]+)/snapshots/([0-9a-f]{40})")

_MORE_TEMPLATES = "additional_chat_templates/*.jinja"


@dataclass(frozen=True)
class HubName:
    """A model on the hub, or a data set, and which state of it: a branch, a tag or a commit."""

    repository: str
    revision: str = "main"
    kind: Literal["model", "dataset"] = "model"

    @classmethod
    def parse(cls, name: str) -> HubName | None:
        """Return what a name means on the hub; None where a directory has it, or it cannot be one of the hub's."""
        repository, at, revision = name.partition("@")
        is_name = _REPOSITORY.fullmatch(repository) and (not at or _REVISION.fullmatch(revision))
        return cls(repository, revision or "main") if is_name and _directory(name) is None else None

    def __str__(self) -> str:
        return self.repository if self.revision == "main" else f"{self.repository}@{self.revision}"

    @property
    def command(self) -> str:
        """What fetches it by hand."""
        kind = "" if self.kind == "model" else f" --repo-type {self.kind}"
        revision = "" if self.revision == "main" else f" --revision {self.revision}"
        return f"hf download{kind} {self.repository}{revision}"


def local_files(name: str) -> Path | None:
    """The directory of that name, else the model's snapshot in the hub's cache: its config.json and perhaps more."""
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
    """Return what was looked for, and where, when a name means nothing."""
    directory = os.path.abspath(os.path.expanduser(name))
    return f'there is no directory {directory}, and "{name}" is no name on the hub (organization/name[@revision])'


def is_offline() -> bool:
    from huggingface_hub import constants

    return constants.is_offline_mode()


def model_directory(name: str, *, download: bool = False) -> Path:
    """Return the directory of a model, of which a snapshot in the hub's cache has to be whole.

    `download` fetches what is not there, with progress on stderr, unless HF_HUB_OFFLINE is set.
    """
    if (own := _directory(name)) is not None:
        return own
    if (hub := HubName.parse(name)) is None:
        raise ModelError(neither(name), fix="a Hugging Face model directory, or a model's name on the hub")
    found, lacking = _cached(hub)
    if found is not None and not lacking:
        return found
    if not download or is_offline():
        raise _not_here(hub, found, lacking)
    # What is there in part becomes whole at its own commit, which a branch may have left by now.
    directory = _download(hub if found is None else HubName(hub.repository, found.name))
    if lacking := missing_files(directory):
        fix = "load it with transformers where you trust it, `save_pretrained` it, and name that directory"
        raise ModelError(f"the hub has no {', '.join(lacking)} of it: no safetensors", where=str(hub), fix=fix)
    return directory


def missing_files(directory: Path) -> list[str]:
    """Return the files without which no model can be loaded that are not there; links to nothing count as such."""
    try:
        index = json.loads(files.read_text(directory / INDEX_FILE))
        weights = sorted(set(index["weight_map"].values()))
    except OSError:
        weights = [SINGLE_FILE]
    except (ValueError, TypeError, KeyError, AttributeError):
        weights = []  # the reader of weights says what is wrong with the index
    return [name for name in ("config.json", *weights) if not (directory / name).is_file()]


def check_files(directory: Path) -> None:
    """Refuse a model directory with a FIFO, a device or the like among its files: libraries would wait for ever."""
    for path in (*(path for name in FILES for path in directory.glob(name)), *directory.glob(_MORE_TEMPLATES)):
        try:
            files.check_regular(path, None if path.suffix == ".safetensors" else files.MAX_TEXT_BYTES)
        except FileNotFoundError:
            continue  # a link to nothing: `missing_files` says so where it matters
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
        missing = _not_here(hub, None, ())
        what, fix = (missing.what, missing.fix) if is_offline() else _explained(hub, error)
        fix += "; or name the files themselves: --from FILE ..."
        raise DataError(what, where=f"{hub}: {path}", fix=fix) from error


def node_copy(directory: str, *, download: bool = False) -> Path:
    """Return where this node has the model that the driver has in `directory`.

    There as well, where nodes share a file system; else the same commit in this node's own cache of the hub, for the
    path of a snapshot says which model and commit it holds.
    """
    snapshot = _SNAPSHOT.fullmatch("/".join(Path(directory).parts[-3:]))
    if snapshot is None or (os.path.isdir(directory) and not missing_files(Path(directory))):
        return Path(directory)
    organization, name, commit = snapshot.groups()
    return model_directory(f"{organization}/{name}@{commit}", download=download)


def node_lacks(directories: Sequence[str], download: bool) -> str:
    """Return why this node cannot have the driver's models; nothing where it has them, downloaded if need be."""
    try:
        lacking = [name for name in directories if not node_copy(name, download=download).is_dir()]
    except MrlError as error:
        return str(error)
    return f"there is no directory {', '.join(lacking)}" if lacking else ""


def _directory(name: str) -> Path | None:
    path = os.path.abspath(os.path.expanduser(name))
    return Path(path) if os.path.isdir(path) else None


def _cached(hub: HubName) -> tuple[Path | None, list[str]]:
    """The snapshot in the cache, and what it lacks by the hub's list of its files or by its own list of weights."""
    from huggingface_hub.errors import IncompleteSnapshotError, LocalEntryNotFoundError

    try:
        found = _snapshot(hub, is_local=True)
    except IncompleteSnapshotError as error:
        found = Path(error.snapshot_path)
        return found, missing_files(found) or ["some of its files"]
    except LocalEntryNotFoundError:
        return None, []
    return found, missing_files(found)


def _snapshot(hub: HubName, *, is_local: bool) -> Path:
    from huggingface_hub import snapshot_download

    name, revision, wanted, unwanted = hub.repository, hub.revision, [*FILES], [*NOT_FILES]
    found = snapshot_download(
        name, revision=revision, allow_patterns=wanted, ignore_patterns=unwanted, local_files_only=is_local
    )
    return Path(found)


def _not_here(hub: HubName, found: Path | None, lacking: Sequence[str]) -> ModelError:
    from huggingface_hub import constants

    place = f"the hub's cache {constants.HF_HUB_CACHE}"
    what = f"{place} does not have it" if found is None else f"{found} lacks {', '.join(lacking)}"
    why = ", and HF_HUB_OFFLINE forbids to download it" if is_offline() else ""
    return ModelError(f"{what}{why}", where=str(hub), fix=f"{hub.command}, where there is a network")


def _download(hub: HubName) -> Path:
    import httpx

    try:
        return _snapshot(hub, is_local=False)
    except (OSError, httpx.HTTPError, RuntimeError, ValueError) as error:
        what, fix = _explained(hub, error)
        raise ModelError(what, where=str(hub), fix=fix) from error


def _explained(hub: HubName, error: Exception) -> tuple[str, str]:
    """Return why a download failed, and what would mend it."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    folder = "datasets/" if hub.kind == "dataset" else ""
    page = f"{constants.ENDPOINT}/{folder}{hub.repository}"
    if isinstance(error, GatedRepoError):
        return "its owner gives it to those who asked", f"ask at {page}, then `hf auth login`, or set HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError):
        fix = "is the name right? For a private one: `hf auth login`, or set HF_TOKEN"
        return f"{constants.ENDPOINT} has no such {hub.kind}, or not for everybody", fix
    if isinstance(error, RevisionNotFoundError):
        return f'it has no revision "{hub.revision}"', f"{page}/commits/main lists branches, tags and commits"
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in reason:
        return f"{constants.HF_HUB_CACHE} is full: {reason}", "free some room, or set HF_HOME to a larger place"
    if isinstance(error, PermissionError):
        return f"it cannot be written: {reason}", "set HF_HOME to a place of your own"
    fix = f"are HF_ENDPOINT and the proxy right? Or {hub.command} on a machine with a network, and share its HF_HOME"
    return f"it cannot be downloaded from {constants.ENDPOINT}: {reason}", fix
