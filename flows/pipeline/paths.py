"""Paths in a configuration: each is relative to the file, or the folder, that names it."""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from stages.contract.errors import UserError

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
_FILE_SUFFIXES = (".jsonl", ".json", ".parquet", ".py", ".jinja", ".yaml", ".txt")


def anchor_paths(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Makes the paths of nested settings absolute, in place; relative ones start in ``folder``.

    Hub ids, URLs and commands stay as they are. Values that are not text stay, too: validation
    says what is wrong with them. UserError if a path names an unknown home folder.
    """
    for pattern, anchored in _ANCHORED.items():
        *sections, name = pattern.split(".")
        for section in _sections(values, sections):
            for setting in section if name == "*" else section.keys() & {name}:
                section[setting] = anchored(section[setting], folder)
    return values


def _sections(values: Any, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields the sections that names lead to; ``*`` is any name."""
    if not isinstance(values, dict):
        return
    if not names:
        yield values
        return
    for name in values if names[0] == "*" else values.keys() & {names[0]}:
        yield from _sections(values[name], names[1:])


def _path(location: Any, folder: Path) -> Any:
    """The path without ``..``; links stay, since an environment's interpreter is one."""
    if not isinstance(location, str) or not location.strip():
        return location
    try:
        expanded = Path(location).expanduser()
    except RuntimeError as error:
        raise UserError(f"{location}: no such home folder", "write the folder out") from error
    return os.path.normpath(folder.absolute() / expanded)


def _store(location: Any, folder: Path) -> Any:
    return location if "://" in str(location) else _path(location, folder)


def _interpreter(location: Any, folder: Path) -> Any:
    """A name without a folder is a command on the path."""
    return _path(location, folder) if os.sep in str(location) else location


def _table(table: Any, folder: Path) -> Any:
    """A table whose names are paths."""
    if not isinstance(table, dict):
        return table
    return {_path(location, folder): value for location, value in table.items()}


def anchored_input(location: Any, folder: Path) -> Any:
    """The path of an input, or the paths of several; a hub id stays unless it is a path here."""
    if isinstance(location, list):
        return [anchored_input(part, folder) for part in location]
    path = _path(location, folder)
    if not isinstance(location, str) or not _HUB_ID.fullmatch(location):
        return path
    is_file = location.startswith((".", "~")) or location.endswith(_FILE_SUFFIXES)
    return path if is_file or Path(path).exists() else location


_ANCHORED = {
    "store": _store,
    "inputs.*": anchored_input,
    "suites.*.prompts": anchored_input,
    "suites.*.oracle_model": anchored_input,
    "suites.*.oracle_code": anchored_input,
    "execution.interpreters.*": _interpreter,
    "execution.docker.mounts": _table,
    "execution.kubernetes.volumes": _table,
}
