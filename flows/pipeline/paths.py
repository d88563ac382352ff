"""Paths in a configuration: each is relative to the file, or the folder, that names it."""

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from stages.contract.errors import UserError

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
_FILE_SUFFIXES = (".jsonl", ".json", ".parquet", ".py", ".jinja", ".yaml", ".txt")


def anchor_paths(values: dict[str, Any], folder: Path) -> None:
    """Makes the paths of nested settings absolute, in place; relative ones start in ``folder``.

    Hub ids, URLs and commands stay as they are. Values that are not text stay, too: validation
    says what is wrong with them. UserError if a path names the home folder of an unknown user.
    """
    for pattern, anchored in _ANCHORED.items():
        for section, name, title in _settings(values, pattern.split(".")):
            section[name] = anchored(section[name], folder, title)


def _settings(
    values: Any, pattern: Sequence[str], title: str = ""
) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yields section, name and full name of each setting that a pattern names."""
    if not isinstance(values, dict):
        return
    first, *rest = pattern
    for name in list(values):
        if first not in (name, "*"):
            continue
        if rest:
            yield from _settings(values[name], rest, f"{title}{name}.")
        else:
            yield values, name, f"{title}{name}"


def _path(location: Any, folder: Path, title: str) -> Any:
    """The path without ``..``; links stay, since an environment's interpreter is one."""
    if not isinstance(location, str) or not location.strip() or "\0" in location:
        return location
    try:
        return os.path.normpath(folder.absolute() / Path(location).expanduser())
    except RuntimeError as error:
        raise UserError(
            f"{title}: {json.dumps(location)}: {error}", "write the folder out"
        ) from error


def _store(location: Any, folder: Path, title: str) -> Any:
    return location if "://" in str(location) else _path(location, folder, title)


def _interpreter(location: Any, folder: Path, title: str) -> Any:
    """A name without a folder is a command on the path."""
    return _path(location, folder, title) if os.sep in str(location) else location


def _table(table: Any, folder: Path, title: str) -> Any:
    """A table whose names are paths."""
    if not isinstance(table, dict):
        return table
    return {_path(location, folder, title): value for location, value in table.items()}


def _input(location: Any, folder: Path, title: str) -> Any:
    if isinstance(location, list):
        return [_input(part, folder, title) for part in location]
    path = _path(location, folder, title)
    if not isinstance(location, str) or not _HUB_ID.fullmatch(location):
        return path
    is_file = location.startswith((".", "~")) or location.endswith(_FILE_SUFFIXES)
    return path if is_file or Path(path).exists() else location


_ANCHORED = {
    "store": _store,
    "inputs.*": _input,
    "suites.*.prompts": _input,
    "suites.*.oracle_model": _input,
    "suites.*.oracle_code": _input,
    "execution.interpreters.*": _interpreter,
    "execution.docker.mounts": _table,
    "execution.kubernetes.volumes": _table,
}
