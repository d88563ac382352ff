"""Paths in a configuration: each is relative to the file, or the folder, that names it."""

import json
import os
import re
from pathlib import Path
from typing import Any

from stages.contract.errors import UserError

_OF_SUITES = ("prompts", "oracle_model", "oracle_code")
# A runner's section, and its table whose names are paths.
_PATHS_OF_RUNNERS = (
    ("docker", "mounts"),
    ("kubernetes", "volumes"),
)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
_FILE_SUFFIXES = (".jsonl", ".json", ".parquet", ".py", ".jinja", ".yaml", ".txt")


def anchor_paths(values: dict[str, Any], folder: Path) -> None:
    """Makes the paths of nested settings absolute, in place; relative ones start in ``folder``.

    Hub ids, URLs and commands stay as they are. Values that are not text stay, too: validation
    says what is wrong with them. UserError if a path names the home folder of an unknown user.
    """
    if _is_path(values.get("store")) and "://" not in values["store"]:
        values["store"] = _absolute(values["store"], folder, "store")
    inputs = values.get("inputs")
    if isinstance(inputs, dict):
        if isinstance(inputs.get("prompts"), str):
            inputs["prompts"] = [inputs["prompts"]]
        for name, named in inputs.items():
            inputs[name] = _input(named, folder, f"inputs.{name}")
    suites = values.get("suites")
    for suite, section in suites.items() if isinstance(suites, dict) else ():
        if isinstance(section, dict):
            for name in _OF_SUITES:
                if name in section:
                    section[name] = _input(section[name], folder, f"suites.{suite}.{name}")
    execution = values.get("execution")
    if isinstance(execution, dict):
        _anchor_execution(execution, folder)


def _anchor_execution(execution: dict[str, Any], folder: Path) -> None:
    interpreters = execution.get("interpreters")
    if isinstance(interpreters, dict):
        for stage, location in interpreters.items():
            # A name without a folder is a command on the path.
            if _is_path(location) and os.sep in location:
                interpreters[stage] = _absolute(location, folder, f"execution.interpreters.{stage}")
    for runner, table in _PATHS_OF_RUNNERS:
        section = execution.get(runner)
        if not isinstance(section, dict):
            continue
        if isinstance(section.get(table), dict):
            name = f"execution.{runner}.{table}"
            section[table] = {
                _absolute(location, folder, name) if _is_path(location) else location: value
                for location, value in section[table].items()
            }


def _input(location: Any, folder: Path, name: str) -> Any:
    if isinstance(location, list):
        return [_input(part, folder, name) for part in location]
    if not _is_path(location):
        return location
    path = _absolute(location, folder, name)
    looks_remote = _HUB_ID.fullmatch(location) and not location.startswith((".", "~"))
    looks_remote = looks_remote and not location.endswith(_FILE_SUFFIXES)
    return location if looks_remote and not Path(path).exists() else path


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and value.strip() != "" and "\0" not in value


def _absolute(location: str, folder: Path, name: str) -> str:
    """The path without ``..``; links stay, since an environment's interpreter is one."""
    try:
        return os.path.normpath(folder.absolute() / Path(location).expanduser())
    except RuntimeError as error:
        raise UserError(
            f"{name}: {json.dumps(location)}: {error}", "write the folder out"
        ) from error
