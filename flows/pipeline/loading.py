"""Configuration files: sparse YAML in, a checked RunConfig out, errors that help."""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from flows.pipeline.config import RunConfig
from flows.pipeline.renamed import current_names, move_renamed
from flows.pipeline.strict_yaml import non_finite, parse_yaml, read_yaml
from stages.contract.errors import UserError

# Of a value in a message.
_SHOWN_CHARACTERS = 200
S = TypeVar("S", bound=BaseModel)

_PLACES = ("policy", "test_prompts", "warm_start", "oracle_model", "oracle_code")


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads the configuration of a run; see :func:`load_settings`."""
    return load_settings(path, overrides, RunConfig)


def load_settings(path: Path | None, overrides: Sequence[str], schema: type[S]) -> S:
    """Reads a configuration file and applies ``section.field=value`` overrides.

    ``extends`` names one or several files, relative to this one, that are read first. Files named
    under ``inputs`` are relative to the file that names them.

    Args:
        path: The file; None for the defaults.
        overrides: What ``--set`` says.
        schema: The settings that the file is to hold.

    Raises:
        UserError: The file cannot be read or a value is wrong; the message names all of them.
    """
    values = {} if path is None else _read(path, ())
    for override in overrides:
        _apply(values, override)
    return _check(values, "--set" if path is None else str(path), schema)


def load_overridden(path: Path, overrides: Mapping[str, Any], place: str) -> RunConfig:
    """Reads the configuration of a run and lays nested ``overrides`` over it.

    Args:
        path: The file.
        overrides: Sections and fields as in a configuration file; what is absent stays.
        place: Says in messages where the overrides come from.

    Raises:
        UserError: The file cannot be read or a value is wrong; the message names all of them.
    """
    values = _read(path, ())
    current = copy.deepcopy(dict(overrides))
    move_renamed(current, place)
    _merge(values, current)
    return check_config(values, place)


def with_fields(config: RunConfig, fields: Mapping[str, Any], place: str) -> RunConfig:
    """A configuration with some fields changed.

    Args:
        config: The configuration.
        fields: Values by the fields' full names, ``train.kappa``.
        place: Says in messages where the values come from.

    Raises:
        UserError: There is no such field, or a value is wrong; the message names all of them.
    """
    values = json.loads(config.to_json())
    for name, value in fields.items():
        _set(values, name, value, place)
    return check_config(values, place)


def check_config(values: dict[str, Any], place: str) -> RunConfig:
    """Validates a run's configuration; ``place`` says in messages where the values come from."""
    return _check(values, place, RunConfig)


def _check(values: dict[str, Any], place: str, schema: type[S]) -> S:
    # Of a run that was stored, or within a whole section that `--set` names.
    move_renamed(values, place, defaults=RunConfig().model_dump(mode="json"))
    try:
        checked = schema.model_validate(values)
    except ValidationError as error:
        problems = [_explain(dict(each), schema) for each in error.errors()]
        listed = "; `geb fields` lists all of them with their meaning"
        raise _invalid(
            place, problems, "correct these settings" + (listed if schema is RunConfig else "")
        ) from error
    # Here, since pydantic reads `1e+999`, to YAML a text, as infinity.
    infinite = [
        f"{name}: {value} is no finite number" for name, value in non_finite(checked.model_dump())
    ]
    if infinite:
        raise _invalid(place, infinite, "write finite numbers, or leave these settings out")
    return checked


def _invalid(place: str, problems: Sequence[str], remedy: str) -> UserError:
    return UserError(f"{place} is not a valid configuration:\n  " + "\n  ".join(problems), remedy)


def _read(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    path = path.absolute()
    if path in seen:
        raise UserError(f"{path} extends itself", "remove it from its own `extends`")
    loaded = read_yaml(path)
    if loaded is not None and not isinstance(loaded, dict):
        raise UserError(f"{path} holds no settings", "write `name: value` lines")
    values: dict[str, Any] = loaded or {}
    parents = values.pop("extends", [])
    merged: dict[str, Any] = {}
    named = [parents] if isinstance(parents, str) else parents
    if not isinstance(named, list) or not all(isinstance(each, str) for each in named):
        raise UserError(
            f"{path}: extends names no files: {_shown(parents)}", "write `extends: other.yaml`"
        )
    for parent in named:
        _merge(merged, _read(path.parent / parent, (*seen, path)))
    move_renamed(values, str(path))
    _anchor_places(values.get("inputs"), path.parent)
    _merge(merged, values)
    return merged


def _merge(values: dict[str, Any], others: Mapping[str, Any]) -> None:
    for name, other in others.items():
        if isinstance(other, dict) and isinstance(values.get(name), dict):
            _merge(values[name], other)
        else:
            values[name] = other


def _anchor_places(inputs: Any, folder: Path) -> None:
    """Makes file names under ``inputs`` absolute; hub ids stay as they are."""
    if not isinstance(inputs, dict):
        return

    def anchored(place: Any) -> Any:
        if not isinstance(place, str):
            return place
        try:
            found = folder / Path(place).expanduser()
        except RuntimeError as error:
            raise UserError(f"inputs: {_shown(place)}: {error}", "write the folder out") from error
        looks_local = place.startswith((".", "/", "~")) or found.exists()
        return str(found.resolve()) if looks_local else place

    for name in _PLACES:
        if name in inputs:
            inputs[name] = anchored(inputs[name])
    if isinstance(inputs.get("prompts"), str):
        inputs["prompts"] = [inputs["prompts"]]
    if isinstance(inputs.get("prompts"), list):
        inputs["prompts"] = [anchored(each) for each in inputs["prompts"]]


def _apply(values: dict[str, Any], override: str) -> None:
    name, separator, text = override.partition("=")
    if not separator or not name:
        raise UserError(
            f"--set {_shown(override)} is not NAME=VALUE", "write --set train.kappa=1e-3"
        )
    _set(values, name, parse_yaml(text, f"the value of --set {_shown(name)}"), "--set")


def _set(values: dict[str, Any], name: str, value: Any, place: str) -> None:
    for current in current_names(name, place):
        holder = values
        *sections, last = current.split(".")
        for section in sections:
            holder = holder.setdefault(section, {})
            if not isinstance(holder, dict):
                raise UserError(f"{name}: {section!r} is no section", "check the name")
        holder[last] = value


def _explain(error: dict[str, Any], schema: type[BaseModel]) -> str:
    place = [str(part) for part in error["loc"]]
    name = ".".join(place) or "configuration"
    if error["type"] == "extra_forbidden":
        known = _names_at(schema, place[:-1])
        near = difflib.get_close_matches(place[-1], known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; known here: {', '.join(known)}"
        return f"{name}: no such setting{hint}"
    message = str(error["msg"]).removeprefix("Value error, ")
    if isinstance(error["input"], dict | BaseModel):
        return f"{name}: {message}"
    return f"{name}: {message}, not {_shown(error['input'])}"


def _shown(value: Any) -> str:
    """A value as JSON for a message, cut where it is long."""
    text = json.dumps(value, default=str)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def _names_at(model: type[BaseModel], place: Iterable[str]) -> list[str]:
    for part in place:
        field = model.model_fields.get(part)
        if field is None or not (
            isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        ):
            return []
        model = field.annotation
    return list(model.model_fields)
