"""Configuration files: sparse YAML in, a checked RunConfig out, errors that help."""

import copy
import difflib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from flows.pipeline.checks import check
from flows.pipeline.config import RunConfig
from flows.pipeline.fields import field_rows
from flows.pipeline.paths import anchor_paths
from flows.pipeline.strict_yaml import parse_yaml, read_yaml
from stages.contract.errors import UserError
from stages.store.opening import location_of

# Most of a value, and most problems, in a message.
_SHOWN_CHARACTERS = 200
_SHOWN_PROBLEMS = 20
_SUFFIXES = (".yaml", ".yml", ".json")
Sections = Mapping[str, Any]
"""Settings of a run, a mapping for each section."""


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads the configuration of a run and applies ``section.field=value`` overrides.

    ``extends`` names one or several files, relative to this one, that are read first. Paths are
    relative to the file that names them; paths in overrides, and the default store, to
    the present folder.

    Raises:
        UserError: The file cannot be read or a value is wrong; the message names all of them.
    """
    origin = f"{path.absolute()}{' with --set' if overrides else ''}"
    return load_overridden(path, {}, overrides, origin)


def with_overrides(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Nested sections in which ``NAME=VALUE`` are set; paths start in the present folder."""
    for override in overrides:
        name, separator, text = override.partition("=")
        if not separator or not name:
            raise UserError(
                f"--set {_shown(override)} is not NAME=VALUE", "write --set train.kappa=1e-3"
            )
        value = parse_yaml(text, f"the value of --set {_shown(name)}")
        if isinstance(value, str) and "#" in text and "#" not in value:
            raise UserError(
                f"--set {_shown(override)}: a comment begins at its #", "put the value in quotes"
            )
        values = _replaced(values, name, value)
    return values


def _replaced(values: Sections, name: str, value: Any) -> dict[str, Any]:
    """Nested sections in which a setting of a full name, ``train.kappa``, has another value."""
    names = name.split(".")
    nested = value
    for part in reversed(names):
        nested = {part: nested}
    return merged(values, anchor_paths(nested, Path.cwd()), len(names))


def load_overridden(
    path: Path | None, overrides: Sections, lines: Sequence[str], origin: str
) -> RunConfig:
    """Reads the configuration of a run, and lays sections and then ``NAME=VALUE`` lines over it.

    Without a ``path``, fields that are not given have their defaults. Errors are as in
    :func:`load_config`, and name the overrides' ``origin``.
    """
    given = anchor_paths(copy.deepcopy(dict(overrides)), Path.cwd())
    values = merged(read_sections(path), given) if path else given
    return check_config(with_overrides(values, lines), origin)


def merged(values: Sections, others: Sections, depth: float = math.inf) -> dict[str, Any]:
    """Nested sections with others laid over them; an empty one, or one below a depth, replaces."""
    result = dict(values)
    for name, other in others.items():
        value = result.get(name)
        if depth > 1 and other and isinstance(value, dict) and isinstance(other, dict):
            other = merged(value, other, depth - 1)
        result[name] = other
    return result


def with_fields(config: RunConfig, fields: Mapping[str, Any], origin: str) -> RunConfig:
    """A configuration read anew with some fields changed, as by ``--set``.

    Fields have their full names, ``train.kappa``; messages say by ``origin`` where they come from.

    Raises:
        UserError: A field is unknown, or a value is wrong; the message names all of them.
    """
    values = config.given_values()
    for name, value in fields.items():
        values = _replaced(values, name, value)
    return check_config(values, origin)


def check_config(values: Sections, origin: str, *, strict: bool = True) -> RunConfig:
    """Validates a run's configuration; ``origin`` says in messages where the values come from.

    If it is not ``strict``, settings that this version does not know are left out.
    """
    try:
        config = RunConfig.model_validate(values, extra="forbid" if strict else "ignore")
        config._given = values
        check(config)
        # pydantic does not look for infinite numbers in tables of any values.
        json.dumps(values, allow_nan=False, default=str)
        problems = []
    except ValidationError as error:
        # A hint for each of thousands would take minutes.
        problems = [_explain(problem) for problem in error.errors()[:_SHOWN_PROBLEMS]]
        if error.error_count() > _SHOWN_PROBLEMS:
            problems.append(f"and {error.error_count() - _SHOWN_PROBLEMS} more")
    except ValueError as error:
        problems = [f"configuration: {error}"]
    if problems:
        raise UserError(
            f"{origin} is not a valid configuration:\n  " + "\n  ".join(problems),
            "correct these settings; `geb fields` lists all of them with their meaning",
        )
    # In full: the next command may be called elsewhere.
    store = location_of(config.store)
    return config.for_processors().model_copy(update={"store": store})


def read_sections(path: Path) -> dict[str, Any]:
    """The sections of a file laid over the files that it extends; they are not checked.

    A file that several files extend is read once, before the first of them.

    Raises:
        UserError: It cannot be read, or extends itself.
    """
    layers: dict[Path, Sections] = {}
    _collect_layers(path, layers, ())
    values: dict[str, Any] = {}
    for sections in layers.values():
        values = merged(values, sections)
    return values


def _collect_layers(path: Path, layers: dict[Path, Sections], seen: tuple[Path, ...]) -> None:
    """Adds the sections of the files that a file extends, and then its sections."""
    path = path.absolute()
    file = path.resolve()
    if file in layers:
        return
    if file in seen:
        raise UserError(
            f"{seen[-1]} extends {path}, which extends it, too",
            "remove one file from `extends` of the other",
        )
    # What a file of another kind holds, such as passwords, is never quoted as unknown settings.
    if path.suffix not in _SUFFIXES:
        raise UserError(
            f"{path} is not a configuration file",
            f"name a file that ends in {_SUFFIXES[0]}; `geb resume RUN` goes on with a run",
        )
    loaded = read_yaml(path)
    values = {} if loaded is None else loaded
    if not isinstance(values, dict):
        raise UserError(f"{path} holds no settings", "write `name: value` lines")
    parents = values.pop("extends", [])
    named = [parents] if isinstance(parents, str) else parents
    if not isinstance(named, list) or not all(isinstance(parent, str) for parent in named):
        raise UserError(
            f"{path}: extends names no files: {_shown(parents)}", "write `extends: other.yaml`"
        )
    for parent in named:
        _collect_layers(path.parent / parent, layers, (*seen, file))
    layers[file] = anchor_paths(values, path.parent)


def _explain(error: ErrorDetails) -> str:
    parts = [str(part) for part in error["loc"]]
    # Where a field takes several kinds of values, pydantic ends with the kind that it has tried.
    if parts and re.fullmatch(r"literal\[.*\]|constrained-(int|float)", parts[-1]):
        parts.pop()
    name = ".".join(parts) or "configuration"
    if error["type"] == "extra_forbidden":
        settings = [*RunConfig.model_fields, *(row.name for row in field_rows(RunConfig))]
        elsewhere = [setting for setting in settings if setting.endswith(f".{parts[-1]}")]
        if elsewhere:
            return f"{name}: no such setting; did you mean {' or '.join(elsewhere[:3])}?"
        return f"{name}: no such setting{_hint(name, settings)}"
    cause = error.get("ctx", {}).get("error")
    message = error["msg"].removeprefix("Value error, ")
    if isinstance(cause, UserError):
        message = cause.message
    if isinstance(error["input"], dict | BaseModel):
        return f"{name}: {message}"
    expected = re.findall(r"'([^']*)'", error.get("ctx", {}).get("expected", ""))
    hint = _hint(str(error["input"]), expected)
    return f"{name}: {message}, not {_shown(error['input'])}{hint}"


def _hint(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _shown(value: Any) -> str:
    """A value as JSON for a message, without an address's password, cut if it is long."""
    text = re.sub(r"(?<=://)[^/\s]*@", "…@", json.dumps(value, default=str))
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
