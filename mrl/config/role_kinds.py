"""The kind of each role, and the teacher of each data source."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from mrl.config.schema import Config
from mrl.errors import DataError

_KINDS = {"reward_models": "reward_model", "teachers": "teacher"}


def kind_of(role: str) -> str:
    """Return the kind of a role: `reward_model` for `reward_models.NAME`, `teacher` for `teachers.NAME`."""
    section, _, name = role.partition(".")
    return _KINDS[section] if name else role


def writes_tokens(role: str) -> bool:
    """Return whether the model of a role has an output for each token. All others have a score."""
    return kind_of(role) in ("actor", "reference", "teacher")


def teacher_of(config: Config, source: str) -> str:
    """Return the role of the only teacher of a data source. A teacher without `sources` has the rest.

    Raise an error if a source has several teachers, or none.
    """
    teachers = config.teaching_models()
    named = [role for role, model in teachers.items() if _names(model.sources, source)]
    found = named or [role for role, model in teachers.items() if not model.sources]
    if len(found) == 1:
        return found[0]
    if found:
        what = f'"{source}" is in the sources of {" and of ".join(found)}'
        raise DataError(what, where=found[-1], fix="name each data source in the sources of one teacher")
    raise DataError(
        f'no teacher reads the samples of "{source}"',
        where="teachers",
        fix=f'add "{source}" to the sources of one, or leave the sources of one empty: it reads all others',
    )


def rows_by_teacher(config: Config, sources: Sequence[str]) -> dict[str, list[int]]:
    """Return the numbers of the rows that each teacher reads. Teachers without rows are absent."""
    owners = {source: teacher_of(config, source) for source in dict.fromkeys(sources)}
    rows: dict[str, list[int]] = {role: [] for role in config.teaching_models() if role in owners.values()}
    for row, source in enumerate(sources):
        rows[owners[source]].append(row)
    return rows


def _names(patterns: Iterable[str], source: str) -> bool:
    return any(fnmatchcase(source, pattern) for pattern in patterns)
